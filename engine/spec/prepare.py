"""Spec of the prepare stage: prompt files in, checked Parquet shards and a manifest out."""

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.spec.base import URI, Count, Share, Spec

RESPONSES: dict[str, tuple[str, ...]] = {"sft": ("response",), "preferences": ("chosen", "rejected")}
"""The responses that each row of a set has beside its prompt; sets that are not named have none."""


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
    response: str = Field("{answer}", min_length=1)
    """Sets `sft`: template of the response; `{question}` and `{answer}` are the generated ones."""
    chosen: str = Field("{answer}", min_length=1)
    """Sets `preferences`: template of the better response."""
    rejected: str | None = Field(None, min_length=1)
    """Sets `preferences`: template of the worse one. A row whose two are equal is drawn again."""


class FileSource(Spec):
    """A `.jsonl`, `.jsonl.gz` or `.parquet` file, a directory of them, or what `datasets`' `save_to_disk` wrote."""

    kind: Literal["file"] = "file"
    uri: URI
    prompt_field: str = "prompt"
    """Column with a string or a list of chat messages (`role`, `content`). A string becomes the one user message when
    the tokenizer has a chat template, else it is given to the model as it is."""
    answer_field: str | None = "answer"
    """Column with the reference answer, given to rewards; None when there is none. Only prompts have one."""
    task_field: str | None = "task"
    """Column that names the row's task for breakdowns; rows without it, or None: the file's name."""
    tools_field: str | None = None
    """Column with the tool definitions that the chat template shows the model."""
    response_field: str = "response"
    """Sets `sft`: column with the demonstrated response, a string."""
    chosen_field: str = "chosen"
    """Sets `preferences`: column with the better response, a string."""
    rejected_field: str = "rejected"
    """Sets `preferences`: column with the worse one."""


class PromptSetSpec(Spec):
    """One named prompt set and where its rows come from."""

    sources: list[GeneratedSource | FileSource] = Field(min_length=1)


class PrepareSpec(Spec):
    """Read, check and freeze training and held-out rows: prompts, demonstrations, preference pairs."""

    stage: Literal["prepare"] = "prepare"
    schema_version: Literal[1] = 1
    tokenizer: URI
    """Hugging Face directory whose chat template and tokenizer measure the prompts."""
    train: PromptSetSpec | None = None
    """Prompts, for RL; each set comes with its held-out one, and no training set asks what any held-out set asks."""
    eval: PromptSetSpec | None = None
    sft: PromptSetSpec | None = None
    """Prompts with a response, for supervised fine-tuning."""
    sft_eval: PromptSetSpec | None = None
    preferences: PromptSetSpec | None = None
    """Prompts with a better and a worse response, for reward models and DPO."""
    preferences_eval: PromptSetSpec | None = None
    output: URI
    """Where a folder for each set, `quarantine.jsonl` and `manifest.json` go."""
    max_prompt_tokens: Count
    """After the chat template."""
    max_sequence_tokens: Count | None = None
    """Prompt, longest response and end token together; needed by the sets with responses."""
    overlong: Literal["quarantine", "drop", "cut_left", "cut_right", "error"] = "quarantine"
    """What becomes of a prompt over the limit: a bad row; removed but not bad; its first or its last tokens (the
    template's end, with `cut_right`) removed; the end of the job. All are counted. Responses are never cut: a row over
    max_sequence_tokens is bad under both."""
    max_bad_share: Share = 0.01
    """The job fails (exit 2) when more of the rows of a set are bad."""
    rows_per_shard: Count = 10_000

    @property
    def sets(self) -> dict[str, PromptSetSpec]:
        """The sets that there are, by name, in the order they are read: held-out ones first."""
        names = ("eval", "sft_eval", "preferences_eval", "train", "sft", "preferences")
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _sets_are_whole(self) -> Self:
        pairs = (("train", "eval"), ("sft", "sft_eval"), ("preferences", "preferences_eval"))
        for trained, held_out in pairs:
            for name, other in ((trained, held_out), (held_out, trained)):
                if name in self.sets and other not in self.sets:
                    raise ValueError(f"{other}: is missing, but there is {name}; give the rows of both")
        if not self.sets:
            raise ValueError(f"sets: none is given; give {', '.join(' with '.join(pair) for pair in pairs)}")
        with_responses = [name for name in self.sets if set_responses(name)]
        if bool(with_responses) != (self.max_sequence_tokens is not None):
            wrong = f"is needed by {with_responses[0]}" if with_responses else "is read by sft and preferences only"
            raise ValueError(f"max_sequence_tokens: {wrong}")
        return self

    @model_validator(mode="after")
    def _generated_pairs_differ(self) -> Self:
        for name in ("preferences", "preferences_eval"):
            for place, source in enumerate(self.sets[name].sources if name in self.sets else ()):
                if isinstance(source, GeneratedSource) and source.rejected in (None, source.chosen):
                    raise ValueError(f"{name}.sources[{place}].rejected: {source.rejected!r} must be a template other "
                                     f"than chosen, {source.chosen!r}")
        return self


def set_responses(name: str) -> tuple[str, ...]:
    """The responses that a row of the set `name` has beside its prompt."""
    return RESPONSES.get(name.removesuffix("_eval"), ())
