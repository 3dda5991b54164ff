"""Shortcuts for tests of the prepare stage."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.job import Job
from engine.prepare import run
from engine.prompts import Prompt, PromptSet
from engine.spec import PrepareSpec, RunResult, parse_spec

EVAL_ROWS = [{"prompt": "held out", "answer": "0"}]


def write_lines(path: Path, rows: Iterable[Any]) -> str:
    """A JSONL file of `rows`; bytes are lines as they are."""
    with path.open("wb") as file:
        for row in rows:
            file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
    return str(path)


def make_spec(tmp_path: Path, tokenizer: Path, train: Any, **changes: Any) -> PrepareSpec:
    """A spec whose training set is the file `train` (or a source), its eval set one row, all rows may be bad."""
    def as_set(source: Any) -> dict[str, Any]:
        return {"sources": [{"kind": "file", "uri": source} if isinstance(source, str) else source]}

    evaluation = changes.pop("eval", None) or write_lines(tmp_path / "eval.jsonl", EVAL_ROWS)
    fields = {"stage": "prepare", "tokenizer": str(tokenizer), "train": as_set(train), "eval": as_set(evaluation),
              "output": str(tmp_path / "output"), "max_prompt_tokens": 1000, "max_bad_share": 1.0}
    return parse_spec(fields | changes)


def prepare(tmp_path: Path, spec: PrepareSpec) -> RunResult:
    """Run the stage in a job directory."""
    job_dir = tmp_path / "job"
    job_dir.mkdir(exist_ok=True)
    return run(Job(job_dir), spec)


def train_rows(spec: PrepareSpec, split: str = "train") -> list[Prompt]:
    """The prompts of a prepared set."""
    return list(PromptSet.open(spec.output, split))


def quarantined(tmp_path: Path) -> list[tuple[str, int, str]]:
    """File name, line and kind of each quarantined row."""
    lines = (tmp_path / "job" / "quarantine.jsonl").read_text().splitlines()
    return [(Path(row["file"]).name, row["line"], row["kind"]) for row in map(json.loads, lines)]


def shard_bytes(output: str | Path) -> dict[str, bytes]:
    """Content of every shard."""
    return {str(path.relative_to(output)): path.read_bytes() for path in sorted(Path(output).rglob("*.parquet"))}
