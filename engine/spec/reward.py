"""How responses are scored: a union on `kind`; several rewards add up with weights."""

from typing import Annotated, Literal

from pydantic import Field

from engine.spec.base import Spec


class RewardBase(Spec):
    """What all rewards share."""

    weight: float = 1.0
    """Factor in the sum of rewards."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds one sample may take."""
    on_error: float = 0.0
    """Score of a sample whose scoring raised or ran out of time; it is counted, it never ends the run."""


class ReasoningGymReward(RewardBase):
    """reasoning-gym's own verifier of the row's task, on the answer taken from the response by `pattern`."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    pattern: str = r"(?s)\s*(.*?)\s*"
    """Regular expression the whole response must match; its first group is the answer."""
    format_score: float = Field(0.0, ge=0, le=1)
    """Score of a response that matches but is wrong; a response that does not match scores 0."""


class ExactMatchReward(RewardBase):
    """1 when the answer taken from the response by `pattern` equals the row's answer, else 0."""

    kind: Literal["exact"] = "exact"
    pattern: str = r"(?s)\s*(.*?)\s*"


class LengthReward(RewardBase):
    """Minus the share of the allowed length that the response used."""

    kind: Literal["length"] = "length"


Reward = Annotated[ReasoningGymReward | ExactMatchReward | LengthReward, Field(discriminator="kind")]
