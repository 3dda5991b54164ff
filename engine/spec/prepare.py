"""Spec of the prepare stage: prompt files in, checked Parquet shards and a manifest out."""

from typing import Literal

from pydantic import Field

from engine.spec.base import URI, Count, Share, Spec


class Demonstration(Spec):
    """One answered turn."""

    question: str = Field(min_length=1)
    """Put into the template `prompt` as a generated question is."""
    response: str = Field(min_length=1)
    """The assistant's message."""


class GeneratedSource(Spec):
    """Rows made by a reasoning-gym generator: the task, its settings, its own seed."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Name of the reasoning-gym dataset, for example `chain_sum`."""
    config: dict[str, int | float | str | bool] = {}
    """Settings of the generator."""
    size: Count
    """Rows to make, all different: repetitions and prompts of the eval set are drawn again."""
    seed: int = 0
    """Of this source. Sources of different seeds share no rows by construction, only by chance."""
    prompt: str = "{question}"
    """Template of the user message; `{question}` is the generated question."""
    system: str | None = None
    """System message put before it."""
    demonstrations: list[Demonstration] = []
    """Answered turns put between them: they show a small model the form of an answer."""


class FileSource(Spec):
    """A `.jsonl`, `.jsonl.gz` or `.parquet` file, a directory of them, or what `datasets`' `save_to_disk` wrote."""

    kind: Literal["file"] = "file"
    uri: URI
    prompt_field: str = "prompt"
    """Column with a string or a list of chat messages (`role`, `content`). A string becomes the one user message when
    the tokenizer has a chat template, else it is given to the model as it is."""
    answer_field: str | None = "answer"
    """Column with the reference answer, given to rewards; None when there is none."""
    task_field: str | None = "task"
    """Column that names the row's task for breakdowns; rows without it, or None: the file's name."""
    tools_field: str | None = None
    """Column with the tool definitions that the chat template shows the model."""


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
    overlong: Literal["quarantine", "drop", "cut_left", "cut_right", "error"] = "quarantine"
    """What becomes of a prompt over the limit: a bad row; removed but not bad; its first or its last tokens (the
    template's end, with `cut_right`) removed; the end of the job. All are counted."""
    max_bad_share: Share = 0.01
    """The job fails (exit 2) when more of the rows of a set are bad."""
    rows_per_shard: Count = 10_000
