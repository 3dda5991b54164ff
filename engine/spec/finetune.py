"""Spec of the finetune stage: what is trained before and beside RL, a union on `kind`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.spec.base import Count, Spec
from engine.spec.train import OptimizerSpec, TrainingSpec


class SFT(Spec):
    """Supervised fine-tuning on demonstrations (set `sft`): cross-entropy of the responses' tokens."""

    kind: Literal["sft"] = "sft"


class RewardModelling(Spec):
    """A reward model from preference pairs: Bradley-Terry (InstructGPT, arXiv:2203.02155)."""

    kind: Literal["reward_model"] = "reward_model"
    margin: float = Field(0.0, ge=0)
    """By how much a chosen response should lead, in units of the score (Llama 2, arXiv:2307.09288)."""
    centering: float = Field(0.0, ge=0)
    """Weight of (chosen + rejected)^2, which keeps scores near zero (arXiv:2312.09244)."""


class DPO(Spec):
    """Direct preference optimisation against the frozen `model` (arXiv:2305.18290)."""

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """Strength of the KL to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs that are the wrong way round."""


class IPO(Spec):
    """DPO with a squared loss, which certain preferences do not drive to infinity (arXiv:2310.12036)."""

    kind: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0)
    """The log-ratio difference of a pair is drawn to 1 / (2 beta)."""


Objective = Annotated[SFT | RewardModelling | DPO | IPO, Field(discriminator="kind")]


class FinetuneSpec(TrainingSpec):
    """Some optimizer steps of supervised or preference training; one iteration is one step.

    Of `prompts`, the set `sft` or `preferences` is trained on, and its held-out set is measured before and after.
    """

    stage: Literal["finetune"] = "finetune"
    objective: Objective
    optimizer: OptimizerSpec
    rows_per_iteration: Count
    """Demonstrations or pairs of one optimizer step, over all ranks."""
    max_eval_rows: Count | None = None
    """First rows of the held-out set; None: all."""
    evaluate_every: Count | None = None
    """Iterations between measurements on the held-out set; None: only before the first and after the last."""

    @property
    def data(self) -> str:
        """Name of the set that is trained on."""
        return "sft" if self.objective.kind == "sft" else "preferences"

    @model_validator(mode="after")
    def _rows_divide(self) -> Self:
        if self.rows_per_iteration % self.layout.dp:
            raise ValueError(f"rows_per_iteration {self.rows_per_iteration} does not divide by layout.dp = "
                             f"{self.layout.dp}; choose a multiple of it")
        return self
