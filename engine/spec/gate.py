"""The rules by which a candidate may replace the champion. Checked by `tasks.gates.gate`."""

from typing import Literal

from pydantic import Field, model_validator

from engine.spec.base import Count, Spec

PrimaryScore = Literal["mean_reward", "pass_at_1", "greedy_reward", "greedy_pass"]


class PrimaryMetric(Spec):
    """A score per prompt that has to rise: tested paired, prompt by prompt."""

    score: PrimaryScore
    """`mean_reward`: mean over the samples; `pass_at_1`: share of samples that pass; of the greedy response:
    `greedy_reward`, `greedy_pass`."""
    margin: float = Field(0.0, ge=0)
    """The rise must be proven to be larger than this, in units of the score."""


class GuardMetric(Spec):
    """A metric of the evaluation that must not get worse by more than a tolerance."""

    metric: str = Field(min_length=1)
    """Name in `ModelEvaluation.metrics`, for example `task/chain_sum/mean_reward` or `response_tokens`."""
    better: Literal["higher", "lower"] = "higher"
    tolerance: float = Field(0.0, ge=0)
    """Largest loss that is still accepted, in units of the metric."""


class Limit(Spec):
    """Absolute bounds of one of the candidate's metrics, from its evaluation or from its training."""

    metric: str = Field(min_length=1)
    """For example `format_error_share`, `response_tokens`, `actor/kl_to_reference`, `alarms/nan`."""
    minimum: float | None = None
    maximum: float | None = None

    @model_validator(mode="after")
    def _bounds(self):
        if self.minimum is None and self.maximum is None:
            raise ValueError(f"limit {self.metric}: give minimum, maximum or both")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"limit {self.metric}: minimum {self.minimum} is above maximum {self.maximum}")
        return self


class GatePolicy(Spec):
    """When a candidate may be promoted, and who says so."""

    primary: list[PrimaryMetric] = Field([PrimaryMetric(score="mean_reward")], min_length=1)
    require: Literal["any", "all"] = "any"
    """`any`: one primary metric must rise, at a level that Holm's method holds over all of them, and no other may fall
    below `-tolerance`; `all`: every one must rise."""
    tolerance: float = Field(0.0, ge=0)
    """With `any`: largest fall of a primary metric that is still accepted, in units of the score."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Level: the largest probability that a candidate no better than the champion passes."""
    power: float = Field(0.8, gt=0.5, lt=1)
    """Probability of passing that the stated detectable difference is computed for."""
    min_prompts: Count = 50
    """Independent prompts (clusters) below which nothing is promoted."""
    bootstrap_samples: int = Field(10_000, ge=1000)
    seed: int = 0
    """Of the bootstrap: the same evidence always gives the same verdict."""
    guards: list[GuardMetric] = []
    limits: list[Limit] = []
    approval: Literal["human", "automatic"] = "human"
    """`automatic`: a passed gate is an approval."""
    approval_timeout_hours: float = Field(72.0, gt=0)
    """A candidate that nobody decided on for so long is rejected."""

    @model_validator(mode="after")
    def _scores_differ(self):
        scores = [p.score for p in self.primary]
        if len(set(scores)) != len(scores):
            raise ValueError(f"primary: scores repeat: {scores}")
        return self
