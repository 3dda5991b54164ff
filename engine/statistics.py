"""Statistics of evaluations: intervals, paired tests, detectable differences. numpy only; usable above the boundary.

Letters: P prompts, C clusters of prompts (independent of one another), K metrics tested side by side, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.spec.evaluation import PromptScores


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of independent values with Student's interval; for samples clustered by prompt give the prompts' means.

    Args:
        values: [P], any units; NaN makes the result NaN.
        level: two-sided coverage.
    Returns:
        The interval; low = high = NaN for a single value.
    Raises:
        ValueError: no values.
    """
    raise NotImplementedError


def prompt_scores(prompts: Sequence[PromptScores], score: str, pass_threshold: float) -> np.ndarray:
    """[P] one number per prompt: `mean_reward`, `greedy_reward` or `pass_at_1` (share of samples that pass).

    Raises:
        ValueError: unknown score, or a sampled score of a prompt that has no samples.
    """
    raise NotImplementedError


def summarise(prompts: Sequence[PromptScores], pass_threshold: float) -> dict[str, float]:
    """The metrics of an evaluation: each score with `_low` and `_high`, lengths, format errors, and per task.

    Returns:
        `mean_reward`, `greedy_reward`, `pass_at_1` (each also `_low`, `_high`: 95 % interval over prompt means),
        `response_tokens` (mean), `format_error_share`, `num_prompts`, and `task/<task>/<score>`.
    """
    raise NotImplementedError


@dataclass(frozen=True)
class PairedResult:
    """Is B better than A on the same prompts?"""

    difference: float
    """Mean of B - A over prompts."""
    low: float
    """One-sided lower bound of the difference at the level asked for."""
    high: float
    p_bootstrap: float
    """Of the hypothesis difference <= margin."""
    p_sign: float
    """Exact sign test of the hypothesis that B wins no more prompts than A."""
    wins: int
    losses: int

    @property
    def p_value(self) -> float:
        """Both tests must reject, so the larger one counts."""
        return max(self.p_bootstrap, self.p_sign)
