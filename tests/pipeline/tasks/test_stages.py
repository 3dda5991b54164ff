"""From preset, form and results to specs and decisions: pure functions."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import SpecError
from engine.spec import RunResult, TrackingSpec
from engine.spec.algorithm import ALGORITHMS
from tasks import pipeline, stages
from tests.pipeline.examples import preset, train_section

TRACKING = TrackingSpec(experiment="e", run_id="r", parent_run_id="p")


def plan(**changes):
    return pipeline.parse_pipeline(preset(**changes))


def run_of(plan, **results):
    done = {name.replace("__", "."): RunResult(stage="x", **content) for name, content in results.items()}
    return stages.Run(pipeline=plan, root="/store/runs/r", evaluations="/store/evaluations", base_model="/models/tiny",
                      results=done, tracking=TRACKING)


def evaluated(**scores):
    return {"metrics": {f"{model}/mean_reward": score for model, score in scores.items()}}


PROMPTS = {"outputs": {"prompts": "/store/prompts"}}
TRAINED = {"outputs": {"checkpoint": "/store/c/step-3", "export": "/store/e"}}


def rlhf(**changes):
    """A preset with all sections before RL."""
    source = {"kind": "reasoning_gym", "task": "chain_sum", "size": 8, "rejected": "no"}
    sets = {name: {"sources": [{**source, "seed": seed}]} for seed, name in enumerate(
        ("train", "eval", "sft", "sft_eval", "preferences", "preferences_eval"))}
    section = {"optimizer": {"lr": 1e-3}, "iterations": 2, "rows_per_iteration": 4}
    trained = [{"kind": "exact"}, {"kind": "reward_model", "model": "trained", "weight": 0.5}]
    return preset(**{
        "prepare": {"max_prompt_tokens": 32, "max_sequence_tokens": 48, **sets}, "sft": section,
        "reward_model": {**section, "objective": {"kind": "reward_model", "margin": 0.1}},
        "dpo": {**section, "objective": {"kind": "ipo"}}, "train": train_section(rewards=trained), **changes})


@pytest.mark.parametrize(("sections", "policy", "reward_model"), [
    ((), "/models/tiny", None),
    (("sft",), "/store/runs/r/sft/export", None),
    (("reward_model",), "/models/tiny", "/models/tiny"),
    (("sft", "reward_model"), "/store/runs/r/sft/export", "/store/runs/r/sft/export"),
    (("sft", "reward_model", "dpo"), "/store/runs/r/dpo/export", "/store/runs/r/sft/export"),
    (("dpo",), "/store/runs/r/dpo/export", None),
])
def test_each_part_of_the_chain_starts_from_what_was_trained_before_it(sections, policy, reward_model):
    whole = rlhf()
    changes = {name: whole[name] if name in sections else None for name in pipeline.FINETUNED}
    if "reward_model" not in sections:
        changes["train"] = train_section()
    run = run_of(pipeline.parse_pipeline(whole | changes), prepare=PROMPTS, stage_1__train=TRAINED)
    assert run.pipeline.finetuned == sections
    for stage in (1, 2):
        assert stages.train_spec(run, stage).model == policy
    if "sft" in sections:
        assert stages.finetune_spec(run, "sft").model == "/models/tiny"
    if reward_model:
        made = stages.finetune_spec(run, "reward_model")
        assert (made.model, made.objective.margin) == (reward_model, 0.1)
        used = stages.train_spec(run, 1).rewards[1]
        assert used.model == made.export_dir == "/store/runs/r/reward_model/export" and used.weight == 0.5
    if "dpo" in sections:
        assert stages.finetune_spec(run, "dpo").objective.kind == "ipo"


def test_a_cost_of_safe_rlhf_may_be_the_reward_model_of_the_run():
    own = {"kind": "reward_model", "model": "trained"}
    safe = train_section(algorithm={"kind": "safe_rlhf", "costs": [own, {"kind": "length"}]})
    run = run_of(pipeline.parse_pipeline(rlhf(train=safe)), prepare=PROMPTS)
    costs = stages.train_spec(run, 1).algorithm.costs
    assert costs[0].model == "/store/runs/r/reward_model/export" and costs[1].kind == "length"
    with pytest.raises(SpecError, match="is missing, but train.algorithm.costs has the model 'trained'"):
        pipeline.parse_pipeline(rlhf(train=safe, reward_model=None))


def test_a_review_scores_with_the_reward_model_of_the_run():
    judged = {"rewards": [{"kind": "reward_model", "model": "trained"}], "max_response_tokens": 8}
    run = run_of(pipeline.parse_pipeline(rlhf(evaluate=judged)))
    spec = stages.comparison_spec(run, {"champion": "/c"}, prompts="/p")
    assert spec.rewards[0].model == "/store/runs/r/reward_model/export"


@pytest.mark.parametrize(("change", "said"), [
    ({"reward_model": None}, "reward_model: is missing, but train.rewards has the model 'trained'"),
    ({"prepare": preset()["prepare"]}, "prepare.sft: is missing, but section sft trains on it"),
    ({"sft": {"objective": {"kind": "dpo"}, "optimizer": {"lr": 1}, "iterations": 1, "rows_per_iteration": 1}},
     "sft.objective.kind: must be sft (got 'dpo')"),
    ({"dpo": {"optimizer": {"lr": 1}, "iterations": 1, "rows_per_iteration": 1, "model": "/x"}},
     "dpo.model is set by the run; remove it (got '/x')"),
    ({"sft": {"optimizer": {"lr": 1}, "iterations": 0, "rows_per_iteration": 1}},
     "sft.iterations: Input should be greater than or equal to 1 (got '0')"),
])
def test_a_chain_whose_parts_do_not_fit_is_refused(change, said):
    with pytest.raises(SpecError, match=re.escape(said)):
        pipeline.parse_pipeline(rlhf(**change))


def test_the_override_wins_over_the_form_and_the_form_over_the_preset():
    resolved = stages.resolve(preset(), stages.Form(iterations=7, lr=0.5, approval="automatic"),
                              {"train": {"actor": {"lr": 0.25}}})
    assert resolved.train["iterations"] == 7
    assert resolved.train["actor"] == {"lr": 0.25}
    assert resolved.train["critic"] == preset()["train"]["critic"]
    assert resolved.gate.approval == "automatic"


@pytest.mark.parametrize("kind", sorted(set(ALGORITHMS) - {"safe_rlhf"}))
@pytest.mark.parametrize("before", ["ppo", "grpo"])
def test_every_algorithm_can_be_chosen_in_the_form(kind, before):
    train = train_section() if before == "ppo" else train_section(
        algorithm={"kind": "grpo", "samples_per_prompt": 4}, critic=None)
    resolved = stages.resolve(preset(train=train), stages.Form(algorithm=kind), {}).train_numbers
    if kind == before:
        assert resolved == pipeline.parse_pipeline(preset(train=train)).train_numbers
        return
    assert resolved.algorithm == ALGORITHMS[kind](), "the settings of its paper"
    assert (resolved.critic is not None) == resolved.algorithm.needs_critic
    assert resolved.critic is None or resolved.critic.lr == train["actor"]["lr"]


def test_the_override_gives_settings_of_the_algorithm_that_the_form_chose():
    override = {"train": {"algorithm": {"samples_per_prompt": 4}}}
    resolved = stages.resolve(preset(), stages.Form(algorithm="grpo"), override).train_numbers
    assert (resolved.algorithm.kind, resolved.algorithm.samples_per_prompt, resolved.critic) == ("grpo", 4, None)


def test_an_algorithm_that_needs_more_says_so():
    with pytest.raises(SpecError, match=r"train.algorithm.safe_rlhf.costs"):
        stages.resolve(preset(), stages.Form(algorithm="safe_rlhf"), {})


def test_an_empty_form_changes_nothing():
    assert stages.resolve(preset(), stages.Form(), {}) == pipeline.parse_pipeline(preset())


def test_another_kind_replaces_a_whole_section_instead_of_mixing_two():
    base = {"algorithm": {"kind": "ppo", "gae_lambda": 0.9, "kl": {"kind": "fixed", "coefficient": 0.1}}}
    assert pipeline.merge(base, {"algorithm": {"kind": "grpo"}}) == {"algorithm": {"kind": "grpo"}}
    assert pipeline.merge(base, {"algorithm": {"gae_lambda": 1.0}})["algorithm"]["kl"]["coefficient"] == 0.1


JSON = st.recursive(st.integers() | st.text(max_size=3) | st.none(),
                    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8)


@given(base=JSON, change=JSON)
def test_merging_twice_is_merging_once_and_nothing_changes_nothing(base, change):
    once = pipeline.merge(base, change)
    assert pipeline.merge(once, change) == once
    assert pipeline.merge(base, {}) == (base if isinstance(base, dict) else {})


@pytest.mark.parametrize(("change", "said"), [
    ({"train": {"actor": {"lr": -1}}}, "train.actor.lr: Input should be greater than 0 (got '-1')"),
    ({"train": {"itrations": 3}}, "train.itrations: Extra inputs are not permitted (got '3')"),
    ({"train": {"prompts_per_iteration": 3, "minibatches": 2}}, "3 samples do not divide"),
    ({"train": {"export_dir": "/x"}}, "train.export_dir is set by the run; remove it (got '/x')"),
    ({"evaluate": {"cache": "/x"}}, "evaluate.cache is set by the run"),
    ({"prepare": {"max_bad_share": 2}}, "prepare.max_bad_share: Input should be less than or equal to 1 (got '2')"),
    ({"stages": {"count": 0}}, "stages.count: Input should be greater than or equal to 1 (got '0')"),
    ({"gate": {"alpha": 0.9}}, "gate.alpha: Input should be less than 0.5 (got '0.9')"),
    ({"registry": {"model": "a/b"}}, "registry.model"),
    ({"modell": "x"}, "modell: Extra inputs are not permitted (got 'x')"),
    ({"start_from": "best"}, "start_from: Input should be 'base' or 'champion' (got 'best')"),
])
def test_a_wrong_field_is_named_with_its_value_in_one_line(change, said):
    with pytest.raises(SpecError, match=re.escape(said)) as caught:
        stages.resolve(preset(), stages.Form(), change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [1, 2", "- a list", "just words"])
def test_text_that_is_no_yaml_mapping_is_refused_in_one_line(text):
    with pytest.raises(SpecError, match="override") as caught:
        pipeline.read_yaml(text, "override")
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_is_refused_with_the_names_there_are(tmp_path):
    (tmp_path / "tiny.yaml").write_text("{}")
    with pytest.raises(SpecError, match="preset: '../tiny' is not in .*; there are tiny"):
        pipeline.read_preset(tmp_path, "../tiny")


@pytest.mark.parametrize("name", pipeline.preset_names(Path("examples")))
def test_every_preset_of_the_project_fits_the_schema(name):
    resolved = stages.resolve(pipeline.read_preset(Path("examples"), name), stages.Form(), {})
    assert resolved.description and resolved.train_numbers.iterations


def test_the_first_stage_starts_from_the_model_and_the_second_from_the_first_ones_checkpoint():
    first = stages.train_spec(run_of(plan(), prepare=PROMPTS), 1)
    second = stages.train_spec(run_of(plan(), prepare=PROMPTS, stage_1__train=TRAINED), 2)
    assert (first.resume_from, second.resume_from) == (None, "/store/c/step-3")
    assert first.model == second.model == "/models/tiny" and first.prompts == "/store/prompts"
    assert first.export_dir != second.export_dir and first.checkpoint_dir != second.checkpoint_dir
    assert first.tracking == TRACKING


def test_the_same_results_make_the_same_spec():
    run = run_of(plan(), prepare=PROMPTS, stage_1__train=TRAINED)
    assert stages.train_spec(run, 2) == stages.train_spec(run, 2)


def test_a_missing_result_is_an_error_that_names_the_task():
    with pytest.raises(SpecError, match=r"task stage_1.train has no result; clear it"):
        stages.train_spec(run_of(plan(), prepare=PROMPTS), 2)
    with pytest.raises(SpecError, match=r"task stage_1.train has no output 'checkpoint'; it has \['export'\]"):
        stages.train_spec(run_of(plan(), prepare=PROMPTS, stage_1__train={"outputs": {"export": "/e"}}), 2)


def test_one_schedule_runs_over_all_stages():
    cosine = {"lr": 1e-3, "schedule": "cosine"}
    section = train_section(actor=cosine, critic=cosine, minibatches=2, epochs=3)
    spec = stages.train_spec(run_of(plan(train=section, stages={"count": 4}), prepare=PROMPTS), 1)
    assert spec.actor.decay_steps == spec.critic.decay_steps == 3 * 3 * 2 * 4
    said = train_section(actor={"lr": 1e-3, "schedule": "cosine", "decay_steps": 5})
    assert stages.train_spec(run_of(plan(train=said), prepare=PROMPTS), 1).actor.decay_steps == 5


def test_stages_and_review_evaluate_with_the_same_settings_so_that_they_share_the_cache():
    run = run_of(plan(), prepare=PROMPTS, stage_1__train=TRAINED)
    ours = stages.evaluate_spec(run, 1)
    theirs = stages.comparison_spec(run, {"champion": "/c", "candidate": "/store/e"}, prompts="/store/prompts")
    assert [m.name for m in ours.models] == ["base", "stage_1"]
    assert ours.cache == theirs.cache == "/store/evaluations"
    assert ours.model_dump(exclude={"models"}) == theirs.model_dump(exclude={"models"})


@pytest.mark.parametrize(("rule", "scores", "go_on", "said"), [
    ({"count": 2}, {0: 0.1, 1: 0.2}, True, "mean_reward is 0.2 after stage 1 of 2"),
    ({"count": 1}, {0: 0.1, 1: 0.2}, False, "stage 1 was the last of 1"),
    ({"count": 3, "target": 0.2}, {0: 0.1, 1: 0.2}, False, "reached the target 0.2"),
    ({"count": 3, "target": 0.3}, {0: 0.1, 1: 0.2}, True, ""),
    ({"count": 3, "min_improvement": 0.2}, {0: 0.1, 1: 0.2}, False, "changed mean_reward by +0.1 (from 0.1)"),
    ({"count": 3, "min_improvement": 0.05}, {0: 0.1, 1: 0.2}, True, ""),
    ({"count": 3, "min_improvement": 0.0}, {0: 0.2, 1: 0.1}, False, "by -0.1"),
    ({"count": 3}, {0: 0.2, 1: float("nan")}, False, "NaN"),
])
def test_the_run_goes_on_until_count_target_or_no_progress(rule, scores, go_on, said):
    decision = stages.decide(plan(stages=rule), 1, {k: {"mean_reward": v} for k, v in scores.items()})
    assert decision.go_on is go_on and said in decision.reason


def test_a_metric_that_was_not_measured_is_an_error_not_a_stop():
    with pytest.raises(SpecError, match=r"stages.metric: stage 1 has no 'accuracy'; it has \['mean_reward'\]"):
        stages.decide(plan(stages={"count": 2, "metric": "accuracy"}), 1, {1: {"mean_reward": 1.0}})


@given(scores=st.lists(st.floats(0, 1), min_size=6, max_size=6), count=st.integers(1, 5),
       least=st.none() | st.floats(-0.5, 0.5), target=st.none() | st.floats(0, 1))
def test_the_candidate_is_the_stage_at_which_the_run_stopped(scores, count, least, target):
    resolved = plan(stages={"count": count, "min_improvement": least, "target": target})
    known = {k: {"mean_reward": v} for k, v in enumerate(scores)}
    last = stages.last_stage(resolved, known)
    assert 1 <= last <= count and not stages.decide(resolved, last, known).go_on
    assert all(stages.decide(resolved, k, known).go_on for k in range(1, last))


def test_metrics_are_taken_from_the_evaluation_of_their_stage():
    results = {"prepare": PROMPTS, "stage_1__evaluate": evaluated(base=0.1, stage_1=0.2),
               "stage_2__evaluate": evaluated(base=0.1, stage_2=0.4)}
    found = stages.evaluations_of(run_of(plan(), **results).results)
    assert {k: v["mean_reward"] for k, v in found.items()} == {0: 0.1, 1: 0.2, 2: 0.4}


def test_the_report_shows_every_stage_that_ran_and_compares_the_last():
    files = {"outputs": {"evaluation": "/j/evaluation.json", "samples": "/j/samples.jsonl"}}
    results = {"prepare": PROMPTS, "stage_1__train": TRAINED, "stage_2__train": TRAINED,
               "stage_1__evaluate": evaluated(base=0.1, stage_1=0.2) | files,
               "stage_2__evaluate": evaluated(base=0.1, stage_2=0.4) | files}
    run = run_of(plan(stages={"count": 3}), **results)
    where = {task: f"/jobs/{task}" for task in run.results}
    with pytest.raises(SpecError, match="stages.metric"):
        stages.report_spec(run_of(plan(stages={"count": 3}), prepare=PROMPTS), where, {})
    ended = run_of(plan(stages={"count": 2}), **results)
    spec = stages.report_spec(ended, where, {"preset": "tiny"})
    assert spec.metrics == ["/jobs/stage_1.train/metrics.jsonl", "/jobs/stage_2.train/metrics.jsonl"]
    assert (spec.before, spec.after) == ("base", "stage_2") and spec.facts["preset"] == "tiny"


def test_a_relative_model_is_below_the_home_and_an_address_stays():
    assert stages.absolute_uri("models/tiny", "/home") == "/home/models/tiny"
    assert stages.absolute_uri("/m", "/home") == "/m"
    assert stages.absolute_uri("s3://b/m", "/home") == "s3://b/m"
