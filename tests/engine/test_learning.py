"""Every algorithm on the real engine: a stated rise of a held-out reward in a stated number of iterations.

The task: sums of two digits, in five wordings. A random model is fine-tuned for a while, so that it gets some of them
right; RL has to make more of that. Held out is one wording of each sum. Seeds are fixed.
"""

import json
from pathlib import Path

import pytest

from engine.job import Job
from engine.spec import load_spec, parse_spec
from examples.models import make
from tests.engine.finetuning import finetune, metrics_of, write_finetune_job
from tests.engine.multiprocess import shared_ranks
from tests.engine.test_evaluate import evaluate
from tests.engine.vllm_process import in_vllm

pytestmark = pytest.mark.slow

WORDINGS = ("{a}+{b}", "add {a} {b}", "{a} plus {b}", "sum {a} {b}", "{a} {b} +")
RIGHT = {"kind": "exact", "pattern": r"(?s)(\d+).*"}
ODD = {"kind": "regex", "pattern": r"(?s)\d*[13579](\D.*)?"}
"""As a cost: more than half of the right answers have it."""
GROUP = {"samples_per_prompt": 8}
ALGORITHMS = {
    "ppo": {"kind": "ppo", **GROUP},
    "grpo": {"kind": "grpo", **GROUP},
    "grpo_kl": {"kind": "grpo", **GROUP, "kl": {"kind": "fixed", "place": "loss", "estimator": "k3",
                                                "coefficient": 0.01}},
    "dr_grpo": {"kind": "grpo", **GROUP, "scale_by_std": False, "aggregation": "constant"},
    "dapo": {"kind": "dapo", **GROUP, "dynamic_sampling": {"max_rounds": 2}},
    "gspo": {"kind": "gspo", **GROUP},
    "cispo": {"kind": "cispo", **GROUP},
    "rloo": {"kind": "rloo", **GROUP},
    "opo": {"kind": "opo", **GROUP},
    "reinforce_pp": {"kind": "reinforce_pp", **GROUP},
    "reinforce_pp_baseline": {"kind": "reinforce_pp", **GROUP, "group_baseline": True},
    "remax": {"kind": "remax", **GROUP},
    "safe_rlhf": {"kind": "safe_rlhf", **GROUP, "costs": [ODD], "cost_limit": 0.25, "initial_multiplier": 0.5,
                  "multiplier_lr": 1.0, "cost_window": 2},
}
ITERATIONS = 30
RISE = 0.12
"""Of the mean reward over 55 held-out prompts with 8 samples each."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """`prompts/`, and a model that knows some of the sums in `base/export`."""
    from engine.prepare import run

    root = tmp_path_factory.mktemp("learning")
    make("tiny", root / "base")
    rows = {"train": [], "eval": []}
    for a, b in ((first, second) for first in range(10) for second in range(10 - first)):
        for place, wording in enumerate(WORDINGS):
            row = {"prompt": wording.format(a=a, b=b), "answer": str(a + b), "response": str(a + b), "task": "sum"}
            rows["eval" if place == (7 * a + b) % len(WORDINGS) else "train"].append(row)
    for name, lines in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"train": "train", "eval": "eval", "sft": "train", "sft_eval": "eval"}
    sets = {name: {"sources": [{"kind": "file", "uri": str(root / f"{file}.jsonl")}]} for name, file in files.items()}
    (root / "prepare_job").mkdir()
    run(Job(root / "prepare_job"), parse_spec({
        "stage": "prepare", "tokenizer": str(root / "base"), "output": str(root / "prompts"), "max_prompt_tokens": 24,
        "max_sequence_tokens": 32, **sets}))
    job = write_finetune_job(root, "sft", "sft", optimizer={"lr": 2e-3}, iterations=60, rows_per_iteration=64)
    shared_ranks(1).run(finetune, job)
    return root


@pytest.fixture(scope="module")
def before(world) -> float:
    """Held-out mean reward before RL."""
    return held_out(world, "sft", RIGHT)


def train(job: Path) -> None:
    """Run a train job in this process."""
    from engine.train import run

    run(Job(job), load_spec(job))


def learn(world: Path, name: str) -> list[dict]:
    """Train with an algorithm, once for all tests; metrics of its iterations."""
    algorithm, job = ALGORITHMS[name], world / name
    if (job / "export").exists():
        return metrics_of(job)
    job.mkdir()
    critic = {"critic": {"lr": 1e-3}} if algorithm["kind"] in ("ppo", "safe_rlhf") else {}
    (job / "spec.json").write_text(json.dumps({
        "stage": "train", "model": str(world / "sft" / "export"), "prompts": str(world / "prompts"),
        "algorithm": algorithm, "rewards": [RIGHT], "actor": {"lr": 5e-4, "schedule": "linear"}, **critic,
        "rollout": {"max_response_tokens": 3, "kv_cache_bytes": 16 << 20, "release_memory": False},
        "iterations": ITERATIONS, "prompts_per_iteration": 32, "minibatches": 2,
        "checkpoint_dir": str(job / "checkpoints"), "export_dir": str(job / "export"), "seed": 1}))
    in_vllm(train, job)
    return metrics_of(job)


def held_out(world: Path, name: str, reward: dict) -> float:
    """Mean over the held-out prompts of what the reward gives the model of job `name`."""
    spec = parse_spec({
        "stage": "evaluate", "models": [{"name": "it", "uri": str(world / name / "export")}],
        "prompts": str(world / "prompts"), "rewards": [reward], "max_response_tokens": 3, "samples_per_prompt": 8,
        "kv_cache_bytes": 16 << 20})
    return in_vllm(evaluate, spec, world / name / reward["kind"])[0].metrics["it/mean_reward"]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "safe_rlhf"])
def test_the_held_out_reward_rises_by_the_stated_amount(world, before, name):
    metrics = learn(world, name)
    after = held_out(world, name, RIGHT)
    assert after - before >= RISE
    assert all(m["alarms/nan"] == m["actor/skipped_steps"] == 0 for m in metrics)


def test_safe_rlhf_keeps_the_held_out_cost_under_its_limit_where_ppo_does_not(world):
    learn(world, "ppo")
    metrics = learn(world, "safe_rlhf")
    limit = ALGORITHMS["safe_rlhf"]["cost_limit"]
    assert metrics[0]["cost/mean"] > limit
    assert held_out(world, "safe_rlhf", ODD) < limit < held_out(world, "ppo", ODD)
    assert held_out(world, "safe_rlhf", RIGHT) > 0.3, "the even sums are still answered"
