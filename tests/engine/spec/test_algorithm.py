"""The union of algorithms: one line of YAML changes the algorithm, and what cannot work is refused."""

import re
from pathlib import Path

import pytest
import yaml

from engine.dataflows import initial_state, iteration_for
from engine.dataflows.objectives import ActorObjective
from engine.errors import SpecError
from engine.spec import parse_spec

KINDS = ["ppo", "grpo", "dapo", "gspo", "cispo", "rloo", "opo", "reinforce_pp", "remax", "safe_rlhf"]
WITH_CRITIC = {"ppo", "safe_rlhf"}


def train_spec(algorithm, **changes):
    data = {
        "stage": "train", "model": "m", "prompts": "p", "checkpoint_dir": "c", "export_dir": "e", "iterations": 1,
        "prompts_per_iteration": 8, "rewards": [{"kind": "length"}], "rollout": {"max_response_tokens": 8},
        "actor": {"lr": 1e-5}, "algorithm": algorithm, **changes}
    if algorithm["kind"] in WITH_CRITIC:
        data.setdefault("critic", {"lr": 1e-5})
    return parse_spec(data)


def algorithm_of(kind):
    return {"kind": kind} | ({"costs": [{"kind": "length"}]} if kind == "safe_rlhf" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_alone_is_a_whole_algorithm(kind):
    algorithm = train_spec(algorithm_of(kind)).algorithm
    assert algorithm.kind == kind and algorithm.needs_critic == (kind in WITH_CRITIC)
    assert not algorithm.needs_reference
    assert callable(iteration_for(algorithm)) and initial_state(algorithm).iterations == 0
    assert ActorObjective(algorithm, 8).algorithm is algorithm


@pytest.mark.parametrize("kind", KINDS)
def test_loss_aggregation_mismatch_and_kl_combine_with_every_kind(kind):
    algorithm = train_spec(algorithm_of(kind) | {
        "loss": "sequence_clip", "aggregation": "constant", "clip_ratio_high": .4, "entropy_coefficient": .01,
        "mismatch": {"kind": "truncated"}, "overlong": {"kind": "shaping", "buffer_tokens": 4},
        "kl": {"kind": "adaptive"}}).algorithm
    assert algorithm.needs_reference and algorithm.clip_high == .4 and algorithm.mismatch.cap == 2.0


@pytest.mark.parametrize(("kind", "expected"), [
    ("ppo", ("clip", .2, .2, "token")), ("grpo", ("clip", .2, .2, "sequence")), ("dapo", ("clip", .2, .28, "token")),
    ("gspo", ("sequence_clip", 3e-4, 4e-4, "sequence")), ("cispo", ("weight_clip", 1.0, 4.0, "token"))])
def test_the_defaults_are_the_papers(kind, expected):
    algorithm = train_spec(algorithm_of(kind)).algorithm
    assert (algorithm.loss, algorithm.clip_ratio, algorithm.clip_high, algorithm.aggregation) == expected


@pytest.mark.parametrize(("kl", "needed"), [
    ({"kind": "fixed", "coefficient": 0.0}, False), ({"kind": "fixed", "coefficient": .1}, True),
    ({"kind": "fixed", "coefficient": .1, "place": "loss"}, True), ({"kind": "adaptive"}, True)])
def test_the_reference_is_needed_exactly_when_a_kl_is(kl, needed):
    assert train_spec({"kind": "grpo", "kl": kl}).algorithm.needs_reference == needed


@pytest.mark.parametrize(("algorithm", "changes", "message"), [
    ({"kind": "grpo", "samples_per_prompt": 1}, {}, "greater than or equal to 2"),
    ({"kind": "grpo", "dual_clip": 3.0, "loss": "reinforce"}, {}, "only loss clip reads it, not reinforce"),
    ({"kind": "ppo", "dual_clip": 1.0}, {}, "greater than 1"),
    ({"kind": "reinforce_pp", "group_baseline": True}, {}, "needs at least 2, not 1"),
    ({"kind": "reinforce_pp", "group_baseline": True, "samples_per_prompt": 2, "gamma": .9}, {}, "gamma 0.9"),
    ({"kind": "grpo"}, {"critic": {"lr": 1e-5}}, "grpo has no critic"),
    ({"kind": "ppo"}, {"critic": None}, "ppo trains a critic"),
    ({"kind": "safe_rlhf", "costs": []}, {}, "at least 1"),
    ({"kind": "ppo", "dynamic_sampling": {}}, {}, "Extra inputs"),
    ({"kind": "grpo", "overlong": {"kind": "shaping", "buffer_tokens": 9}}, {}, "9 is more than .* 8"),
    ({"kind": "remax", "samples_per_prompt": 4}, {"prompts_per_iteration": 6, "minibatches": 4}, "multiple of 4"),
    ({"kind": "nope"}, {}, "'nope'|expected tags"),
])
def test_what_cannot_work_is_refused_before_anything_starts(algorithm, changes, message):
    with pytest.raises(SpecError, match=message):
        train_spec(algorithm, **changes)


def test_every_example_in_the_documentation_is_a_valid_algorithm():
    text = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    examples = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    assert {example["kind"] for example in examples} == set(KINDS)
    for example in examples:
        assert train_spec(example).algorithm.kind == example["kind"]
