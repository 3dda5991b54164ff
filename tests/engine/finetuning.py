"""What tests of the finetune stage share: a task that a tiny model can learn, prepared, and jobs in this process.

The task: answer with the last letter of the prompt. Held-out prompts are other words than those trained on.
"""

import json
import os
import random
from pathlib import Path

from engine.job import Job
from engine.spec import RunResult, parse_spec
from tests.engine.tiny_models import make_tiny_model

LETTERS = "abcdefghij"
OBJECTIVES = {
    "sft": {"kind": "sft"},
    "reward_model": {"kind": "reward_model", "margin": 0.2, "centering": 0.01},
    "dpo": {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.05},
    "ipo": {"kind": "ipo", "beta": 0.2},
}


def make_world(root: Path, train: int, held_out: int = 13) -> Path:
    """`root` with a model in `base/` and prepared prompts, demonstrations and pairs in `prompts/`."""
    from engine.prepare import run

    make_tiny_model(root / "base")
    generator = random.Random(0)
    words = set()
    while len(words) < train + held_out:
        words.add("".join(generator.choices(LETTERS, k=generator.randint(2, 6))))
    rows = []
    for word in sorted(words, key=hash_of):
        wrong = generator.choice(LETTERS.replace(word[-1], "")) * generator.randint(1, 3)
        rows.append({"prompt": word, "answer": word[-1], "response": word[-1], "chosen": word[-1], "rejected": wrong})
    sets = {}
    for name, part in (("eval", rows[:held_out]), ("train", rows[held_out:])):
        file = root / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
        source = {"sources": [{"kind": "file", "uri": str(file)}]}
        sets |= {name: source} | ({"sft": source, "preferences": source} if name == "train" else
                                  {"sft_eval": source, "preferences_eval": source})
    (root / "prepare_job").mkdir()
    run(Job(root / "prepare_job"), parse_spec({
        "stage": "prepare", "tokenizer": str(root / "base"), "output": str(root / "prompts"), "max_prompt_tokens": 16,
        "max_sequence_tokens": 24, **sets}))
    return root


def hash_of(word: str) -> int:
    """An order of words that no session changes."""
    return random.Random(word).getrandbits(32)


def write_finetune_job(world: Path, name: str, kind: str, **fields) -> Path:
    """A job directory whose outputs stand beside its spec."""
    job = world / name
    job.mkdir()
    spec = {
        "stage": "finetune", "model": str(world / "base"), "prompts": str(world / "prompts"),
        "objective": OBJECTIVES[kind], "optimizer": {"lr": 1e-3}, "iterations": 3, "rows_per_iteration": 8,
        "microbatch_tokens": 10_000, "checkpoint_dir": str(job / "checkpoints"), "export_dir": str(job / "export"),
        **fields}
    (job / "spec.json").write_text(json.dumps(spec))
    return job


def finetune(job: Path) -> RunResult:
    """Run a job on this rank."""
    from engine.finetune import run
    from engine.spec import load_spec

    return run(Job(job, rank=int(os.environ.get("RANK", "0"))), load_spec(job))


def metrics_of(job: Path) -> list[dict]:
    """Metrics of each step, the held-out ones before the first included."""
    return [json.loads(line)["metrics"] for line in (job / "metrics.jsonl").read_text().splitlines()]
