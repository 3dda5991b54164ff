"""The algorithms a run can use: a union on `kind`. A new one is a member here, a dataflow and a test."""

from typing import Annotated, Literal

from pydantic import Field

from engine.spec.base import Count, Spec


class FixedKL(Spec):
    """KL to the reference with a constant coefficient."""

    kind: Literal["fixed"] = "fixed"
    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL term; 0 turns it off."""
    place: Literal["reward", "loss"] = "reward"
    """Subtracted from each token's reward, or added to the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators (joschu.net/blog/kl-approx.html)."""


class AdaptiveKL(Spec):
    """KL in the reward with a coefficient that a proportional controller moves towards a target."""

    kind: Literal["adaptive"] = "adaptive"
    initial_coefficient: float = Field(0.05, gt=0)
    target: float = Field(6.0, gt=0)
    """KL per sequence, in nats."""
    horizon: Count = 10_000
    """Samples over which the coefficient changes by one clipped error."""
    estimator: Literal["k1", "k2", "k3"] = "k1"


KL = Annotated[FixedKL | AdaptiveKL, Field(discriminator="kind")]


class PPO(Spec):
    """Proximal policy optimisation with a critic and GAE (arXiv:1707.06347, arXiv:1506.02438)."""

    kind: Literal["ppo"] = "ppo"
    samples_per_prompt: Count = 1
    clip_ratio: float = Field(0.2, gt=0, lt=1)
    """The policy ratio counts within [1 - clip_ratio, 1 + clip_ratio]."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    value_clip: float = Field(0.2, gt=0)
    """A new value counts within this distance of the old one."""
    whiten_advantages: bool = True
    entropy_coefficient: float = Field(0.0, ge=0)
    kl: KL = FixedKL()


class GRPO(Spec):
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    samples_per_prompt: int = Field(8, ge=2)
    """G: responses sampled for each prompt."""
    clip_ratio: float = Field(0.2, gt=0, lt=1)
    scale_by_std: bool = True
    """False keeps reward units (Dr. GRPO, arXiv:2503.20783)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    kl: KL = FixedKL(place="loss", estimator="k3")


Algorithm = Annotated[PPO | GRPO, Field(discriminator="kind")]
