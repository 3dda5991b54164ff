"""What the evaluate stage writes: `evaluation.json` (scores, for the gates) and `samples.jsonl` (texts, for people)."""

from pydantic import ConfigDict, Field

from engine.spec.base import Spec

EVALUATION_FILE = "evaluation.json"
SAMPLES_FILE = "samples.jsonl"


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
