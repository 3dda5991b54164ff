"""What the evaluate stage writes: `evaluation.json` (scores, for the gates) and `samples.jsonl` (texts, for people)."""

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ConfigDict, Field

from engine.spec.base import Spec

EVALUATION_FILE = "evaluation.json"
SAMPLES_FILE = "samples.jsonl"
PAIRS_SHOWN = 4
"""Of each kind: gained most, lost most, changed in words."""


class Evidence(Spec):
    """Base of the evidence: as a spec, and NaN survives JSON (as the string "NaN"), so that a gate can see it."""

    model_config = ConfigDict(ser_json_inf_nan="strings")


class PromptScores(Evidence):
    """How one model did on one held-out prompt."""

    id: str = Field(min_length=1)
    """The prompt's id in the prepared set; the same for every model."""
    task: str
    """Name of the task the prompt belongs to, for the breakdown."""
    cluster: str = ""
    """Prompts made from one source text share a cluster and are resampled together; empty: independent."""
    greedy: float
    """Reward of the greedy response."""
    sampled: list[float] = []
    """Reward of every sampled response, [samples_per_prompt]."""
    lengths: list[int] = []
    """Response tokens: the greedy one first, then the sampled ones."""
    format_errors: int = Field(0, ge=0)
    """Responses, greedy included, that the reward's pattern did not match."""


class ModelEvaluation(Evidence):
    """One model on one prompt set with one setting: what the evaluation cache keeps."""

    model: str = Field(min_length=1)
    """`EvaluatedModel.name`."""
    uri: str = ""
    """Hugging Face directory that was evaluated."""
    weights_hash: str
    """sha256 over the weight files."""
    prompts_hash: str
    """sha256 of the prompt set, from its manifest."""
    settings_hash: str = ""
    """sha256 over whatever else changes the scores: seeds, temperature, lengths, rewards."""
    prompts: list[PromptScores]
    metrics: dict[str, float] = {}
    """`engine.statistics.summarise(prompts, pass_threshold)` and what else the stage measured."""


class Evaluation(Evidence):
    """The whole `evaluation.json`: all models of the stage on the same prompts with the same seeds."""

    schema_version: int = 1
    pass_threshold: float = 1.0
    models: list[ModelEvaluation]

    def of(self, name: str) -> ModelEvaluation:
        """The evaluation of the model called `name`.

        Raises:
            KeyError: no such model; says which there are.
        """
        found = {m.model: m for m in self.models}
        if name not in found:
            raise KeyError(f"evaluation has no model {name!r}; it has {sorted(found)}")
        return found[name]


class SampleRecord(Evidence):
    """One line of `samples.jsonl`: one response, as text."""

    model: str
    id: str
    """Prompt id."""
    task: str
    prompt: str
    """As given to the model's user turn (the last chat message), not the whole template."""
    answer: str = ""
    """The reference answer."""
    response: str
    greedy: bool
    score: float
    tokens: int = Field(ge=0)


@dataclass(frozen=True)
class Pair:
    """The greedy responses of two models to one prompt."""

    kind: str
    """`gained`, `lost` or `changed`."""
    before: SampleRecord
    after: SampleRecord


def choose_pairs(samples: Iterable[SampleRecord], before: str, after: str) -> list[Pair]:
    """Greedy responses worth reading: those whose score rose most, fell most, or stayed while the words changed."""
    by_model: dict[str, dict[str, SampleRecord]] = {before: {}, after: {}}
    for sample in samples:
        if sample.greedy and sample.model in by_model:
            by_model[sample.model][sample.id] = sample
    both = [(old, by_model[after][name]) for name, old in by_model[before].items() if name in by_model[after]]
    both.sort(key=lambda pair: (pair[0].score - pair[1].score, pair[0].id))
    gained = [Pair("gained", old, new) for old, new in both if new.score > old.score]
    lost = [Pair("lost", old, new) for old, new in reversed(both) if new.score < old.score]
    changed = [Pair("changed", old, new) for old, new in both
               if new.score == old.score and new.response != old.response]
    return gained[:PAIRS_SHOWN] + lost[:PAIRS_SHOWN] + changed[:PAIRS_SHOWN]
