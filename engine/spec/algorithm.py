"""The algorithms a run can use: a union on `kind`. A new one is a member here, a dataflow and a test.

A kind fixes how advantages are estimated and gives every other field the value of its paper. Loss, aggregation, KL,
mismatch correction and treatment of cut-off responses are fields of all kinds, so that any of them can be combined.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.spec.base import Count, Spec
from engine.spec.reward import Reward

Estimator = Literal["k1", "k2", "k3", "full"]
"""Schulman's estimators from the sampled tokens (joschu.net/blog/kl-approx.html), or the KL of whole distributions."""


class FixedKL(Spec):
    """KL to the reference with a constant coefficient."""

    kind: Literal["fixed"] = "fixed"
    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL term; 0 turns it off."""
    place: Literal["reward", "loss"] = "reward"
    """Subtracted from each token's reward, or added to the loss."""
    estimator: Estimator = "k1"


class AdaptiveKL(Spec):
    """KL in the reward with a coefficient that a proportional controller moves towards a target."""

    kind: Literal["adaptive"] = "adaptive"
    initial_coefficient: float = Field(0.05, gt=0)
    target: float = Field(6.0, gt=0)
    """KL per sequence, in nats."""
    horizon: Count = 10_000
    """Samples over which the coefficient changes by one clipped error."""
    estimator: Estimator = "k1"


KL = Annotated[FixedKL | AdaptiveKL, Field(discriminator="kind")]
PolicyLoss = Literal["clip", "sequence_clip", "weight_clip", "reinforce"]
"""PPO's clipped surrogate; GSPO's of the sequence ratio; CISPO's clipped weight; plain policy gradient."""
Aggregation = Literal["token", "sequence", "constant"]
"""What weighs the same in the loss: tokens, sequences, or tokens by a constant (1 / response limit)."""


class _Bounds(Spec):
    """A range of importance ratios around 1."""

    low: float = Field(0.5, ge=0, le=1)
    high: float = Field(2.0, ge=1)


class TruncatedImportance(Spec):
    """Weigh each token by min(trainer's / sampler's probability, cap)."""

    kind: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or of its whole sequence."""
    cap: float = Field(2.0, ge=1)


class MaskedImportance(_Bounds):
    """As truncated, but a ratio outside [low, high] makes the weight 0."""

    kind: Literal["masked"] = "masked"
    level: Literal["token", "sequence"] = "token"


class Rejection(_Bounds):
    """Leave out sequences whose mean (geometric) token ratio is outside [low, high]; the others weigh 1."""

    kind: Literal["rejected"] = "rejected"
    low: float = Field(0.99, ge=0, le=1)
    high: float = Field(1.01, ge=1)


Mismatch = Annotated[TruncatedImportance | MaskedImportance | Rejection, Field(discriminator="kind")]


class OverlongShaping(Spec):
    """DAPO's soft punishment: the score falls by up to `penalty` over the last `buffer_tokens` of the limit."""

    kind: Literal["shaping"] = "shaping"
    buffer_tokens: Count
    penalty: float = Field(1.0, gt=0)


class TruncationPenalty(Spec):
    """A response that the limit cut off scores `penalty` less."""

    kind: Literal["penalty"] = "penalty"
    penalty: float = Field(1.0, gt=0)


class TruncationFilter(Spec):
    """A response that the limit cut off is scored but not trained on."""

    kind: Literal["filter"] = "filter"


Overlong = Annotated[OverlongShaping | TruncationPenalty | TruncationFilter, Field(discriminator="kind")]


class DynamicSampling(Spec):
    """Train only on groups whose scores differ, and sample more prompts for the others (DAPO, arXiv:2503.14476)."""

    max_rounds: Count = 3
    """Rounds of generation in one iteration; 1 never refills."""


class PolicyAlgorithm(Spec):
    """What all algorithms share."""

    samples_per_prompt: Count = 1
    """G: responses sampled for each prompt."""
    loss: PolicyLoss = "clip"
    clip_ratio: float = Field(0.2, gt=0, le=1)
    """The policy ratio counts within [1 - clip_ratio, 1 + clip_ratio_high]."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """None: the same as clip_ratio."""
    dual_clip: float | None = Field(None, gt=1)
    """Loss `clip`: a token with negative advantage loses at most dual_clip x |advantage|."""
    aggregation: Aggregation = "token"
    entropy_coefficient: float = Field(0.0, ge=0)
    kl: KL = FixedKL()
    mismatch: Mismatch | None = None
    """Correction for the gap between the sampler's and the trainer's logprobs."""
    overlong: Overlong | None = None
    """Treatment of responses near or at the limit."""

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen reference is read."""
        return self.kl.kind == "adaptive" or self.kl.coefficient > 0

    @property
    def needs_full_kl(self) -> bool:
        """Whether the reference is read as whole distributions."""
        return self.needs_reference and self.kl.estimator == "full"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.kl.kind == "fixed" and self.kl.place == "loss" and self.kl.coefficient > 0

    @property
    def clip_high(self) -> float:
        """The upper clip range, whichever way it was given."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @model_validator(mode="after")
    def _dual_clip_has_a_reader(self) -> Self:
        if self.dual_clip is not None and self.loss != "clip":
            raise ValueError(f"dual_clip: only loss clip reads it, not {self.loss}; remove one of the two")
        return self


class ActorCritic(PolicyAlgorithm):
    """What algorithms with a critic and GAE share."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    value_clip: float | None = Field(0.2, gt=0)
    """A new value counts within this distance of the old one; null: no clipping."""
    whiten_advantages: bool = True

    @property
    def needs_critic(self) -> bool:
        """Always."""
        return True


class PPO(ActorCritic):
    """Proximal policy optimisation with a critic and GAE (arXiv:1707.06347, arXiv:1506.02438)."""

    kind: Literal["ppo"] = "ppo"


class SafeRLHF(ActorCritic):
    """PPO on reward and cost with a Lagrange multiplier that keeps the mean cost under a limit (arXiv:2310.12773)."""

    kind: Literal["safe_rlhf"] = "safe_rlhf"
    costs: list[Reward] = Field(min_length=1)
    """What a response costs: scored as rewards are, summed with their weights."""
    cost_limit: float = 0.0
    """Mean cost per response that is allowed."""
    initial_multiplier: float = Field(1.0, gt=0)
    multiplier_lr: float = Field(0.1, gt=0)
    """Step size of the multiplier's logarithm, once an iteration."""
    multiplier_delay: int = Field(0, ge=0)
    """Iterations before the multiplier first moves."""
    cost_window: Count = 1
    """Iterations whose mean cost is compared with the limit."""


class GroupAlgorithm(PolicyAlgorithm):
    """What algorithms that compare responses to one prompt share."""

    samples_per_prompt: int = Field(8, ge=2)
    kl: KL = FixedKL(place="loss", estimator="k3")
    dynamic_sampling: DynamicSampling | None = None


class GroupRelative(GroupAlgorithm):
    """What algorithms with GRPO's advantages share."""

    scale_by_std: bool = True
    """False keeps reward units."""
    std: Literal["population", "sample"] = "population"
    """Which standard deviation; most other trainers take the sample's."""


class GRPO(GroupRelative):
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

    Dr. GRPO (arXiv:2503.20783) is `scale_by_std: false` with `aggregation: constant`.
    """

    kind: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "sequence"


class DAPO(GroupRelative):
    """GRPO with clip-higher, token mean, dynamic sampling and overlong shaping (arXiv:2503.14476)."""

    kind: Literal["dapo"] = "dapo"
    clip_ratio_high: float | None = Field(0.28, gt=0)
    dynamic_sampling: DynamicSampling | None = DynamicSampling()


class GSPO(GroupRelative):
    """GRPO's advantages with a clipped sequence ratio (arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    loss: PolicyLoss = "sequence_clip"
    clip_ratio: float = Field(3e-4, gt=0, le=1)
    clip_ratio_high: float | None = Field(4e-4, gt=0)
    aggregation: Aggregation = "sequence"


class CISPO(GroupRelative):
    """GRPO's advantages with a clipped importance weight (MiniMax-M1, arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"
    loss: PolicyLoss = "weight_clip"
    clip_ratio: float = Field(1.0, gt=0, le=1)
    clip_ratio_high: float | None = Field(4.0, gt=0)


class RLOO(GroupAlgorithm):
    """REINFORCE with the other responses' mean as the baseline (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    kl: KL = FixedKL()


class OPO(GroupAlgorithm):
    """REINFORCE with the length-weighted group mean as the baseline (arXiv:2505.23585)."""

    kind: Literal["opo"] = "opo"


class ReinforcePP(PolicyAlgorithm):
    """REINFORCE++: rewards to come, whitened over the whole batch (arXiv:2501.03262)."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = False
    """Subtract the mean of the prompt's responses first; needs samples_per_prompt >= 2."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""

    @model_validator(mode="after")
    def _baseline_has_a_group(self) -> Self:
        if self.group_baseline and self.samples_per_prompt < 2:
            raise ValueError(f"samples_per_prompt: group_baseline compares responses to one prompt and needs at least "
                             f"2, not {self.samples_per_prompt}")
        if self.group_baseline and self.gamma != 1:
            raise ValueError(f"gamma {self.gamma}: group_baseline gives a response one advantage without discount; "
                             f"remove the field")
        return self


class ReMax(PolicyAlgorithm):
    """REINFORCE with the score of the greedy response as the baseline (arXiv:2310.10505)."""

    kind: Literal["remax"] = "remax"


Algorithm = Annotated[
    PPO | GRPO | DAPO | GSPO | CISPO | RLOO | OPO | ReinforcePP | ReMax | SafeRLHF, Field(discriminator="kind")]
