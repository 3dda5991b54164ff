"""Spec of the evaluate stage."""

from typing import Literal

from pydantic import Field, model_validator

from engine.layout import GenerationLayout
from engine.spec.base import URI, Count, Spec
from engine.spec.reward import Reward
from engine.spec.tracking import TrackingSpec


class EvaluatedModel(Spec):
    """One model to evaluate."""

    name: str = Field(min_length=1)
    """How the result calls it: `base`, `candidate`, `champion`, `stage_2`."""
    uri: URI
    """Hugging Face directory."""


class EvaluateSpec(Spec):
    """Generate on the held-out prompts and score: the same prompts and the same seeds for every model."""

    stage: Literal["evaluate"] = "evaluate"
    schema_version: Literal[1] = 1
    models: list[EvaluatedModel] = Field(min_length=1)
    """Of one architecture; evaluated in one process, one after the other."""
    prompts: URI
    """Output directory of the prepare stage; `eval/` is used."""
    rewards: list[Reward] = Field(min_length=1)
    max_prompts: Count | None = None
    """First rows of the set; None: all."""
    max_response_tokens: Count
    samples_per_prompt: Count = 4
    """Sampled responses a prompt, besides the greedy one."""
    temperature: float = Field(1.0, gt=0)
    layout: GenerationLayout = GenerationLayout()
    world_size: Count = 1
    """Ranks; each group of layout.tp is one replica."""
    kv_cache_bytes: int = Field(256 << 20, ge=1 << 20)
    max_concurrent_sequences: Count = 64
    pass_threshold: float = 1.0
    """A response passes when its reward is at least this: pass@1 counts those."""
    cache: URI | None = None
    """Results by (weights hash, prompt set hash, settings); a hit is not generated again."""
    seed: int = 0
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="after")
    def _names_differ(self):
        names = [m.name for m in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"models: names repeat: {names}")
        return self
