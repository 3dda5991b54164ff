"""Spec of the prepare stage: prompt files in, checked Parquet shards and a manifest out."""

from typing import Literal

from pydantic import Field

from engine.spec.base import URI, Count, Share, Spec


class GeneratedSource(Spec):
    """Rows made by a reasoning-gym generator: the task, its settings, its own seed."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the reasoning-gym dataset, for example `chain_sum`."""
    config: dict[str, int | float | str | bool] = {}
    """Settings of the generator."""
    size: Count
    """Rows to make."""
    seed: int = 0
    prompt: str = "{question}"
    """Template of the user message; `{question}` is the generated question."""
    system: str | None = None
    """System message put before it."""


class FileSource(Spec):
    """JSONL, JSONL.gz, Parquet or a Hugging Face `datasets` directory, at a path or `s3://`."""

    kind: Literal["file"] = "file"
    uri: URI
    prompt_field: str = "prompt"
    """Column with a string or a list of chat messages."""
    answer_field: str | None = "answer"
    """Column with the reference answer, given to rewards; None when there is none."""


class PromptSetSpec(Spec):
    """One named prompt set and where its rows come from."""

    sources: list[GeneratedSource | FileSource] = Field(min_length=1)


class PrepareSpec(Spec):
    """Read, check and freeze the training and the held-out prompts."""

    stage: Literal["prepare"] = "prepare"
    schema_version: Literal[1] = 1
    tokenizer: URI
    """Hugging Face directory whose chat template and tokenizer measure the prompts."""
    train: PromptSetSpec
    eval: PromptSetSpec
    output: URI
    """Where `train/`, `eval/`, `quarantine.jsonl` and `manifest.json` go."""
    max_prompt_tokens: Count
    """After the chat template."""
    overlong: Literal["quarantine", "cut_left", "cut_right"] = "quarantine"
    max_bad_share: Share = 0.01
    """The job fails (exit 2) when more of the rows are bad."""
    rows_per_shard: Count = 10_000
