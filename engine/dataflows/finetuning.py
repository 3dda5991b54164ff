"""What the finetune stage minimises: one objective a kind, over the fields of a batch.

As in `objectives.py`: the denominator is counted over the whole minibatch first, then losses, gradients and sums of
microbatches and ranks add up. A batch of pairs has the chosen response in rows 2n, the rejected one in rows 2n + 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.algorithms.finetuning import PairLogprobs, bradley_terry_loss, dpo_loss, ipo_loss, sft_loss
from engine.algorithms.losses import Sums, loss_denominator, token_weights
from engine.algorithms.masking import masked_sum, row_sums
from engine.batch import response_mask
from engine.spec.finetune import DPO, IPO, RewardModelling

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class SFTObjective:
    """Cross-entropy of the responses, every token of the minibatch weighing the same."""

    role: str
    """Prefix of the metrics."""

    def denominator(self, batch: TensorDict) -> Tensor:
        """Scalar float64: response tokens of this part."""
        return loss_denominator(response_mask(batch), "token", 1)

    def loss(self, outputs: Outputs, batch: TensorDict, denominator: Tensor | float) -> tuple[Tensor, Sums]:
        """The loss of one microbatch.

        Args:
            outputs: `logprobs` [B, R] with gradient; `greedy` [B, R], 1 where the token is the likeliest.
            denominator: of the whole minibatch.
        """
        mask = response_mask(batch)
        loss, sums = sft_loss(outputs["logprobs"], mask, token_weights(mask, "token", denominator))
        greedy = outputs["greedy"].bool()
        return loss, sums | {
            "greedy_tokens": masked_sum(outputs["greedy"], mask), "rows": mask.any(dim=1).sum(),
            "greedy_rows": (greedy | ~mask).all(dim=1).sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """From the sums of all microbatches and ranks; accuracy: of the likeliest token, given the ones before."""
        return {f"{self.role}/loss": sums["nll"] / max(sums["tokens"], 1),
                f"{self.role}/accuracy": sums["greedy_tokens"] / max(sums["tokens"], 1),
                f"{self.role}/sequence_accuracy": sums["greedy_rows"] / max(sums["rows"], 1)}


@dataclass(frozen=True)
class PairObjective:
    """What the objectives on preference pairs share: pairs weigh the same."""

    role: str
    spec: RewardModelling | DPO | IPO

    def denominator(self, batch: TensorDict) -> Tensor:
        """Scalar float64: pairs of this part."""
        return torch.tensor(len(batch) / 2, dtype=torch.float64, device=batch["input_ids"].device)

    def loss(self, outputs: Outputs, batch: TensorDict, denominator: Tensor | float) -> tuple[Tensor, Sums]:
        """The loss of one microbatch of whole pairs.

        Args:
            outputs: `scores` [B, R], each row's in one slot (reward model), or `logprobs` [B, R]; with gradient.
            batch: with `ref_logprobs` [B, R] for DPO and IPO.
            denominator: pairs of the whole minibatch.
        """
        spec = self.spec
        if isinstance(spec, RewardModelling):
            chosen, rejected = _split(outputs["scores"].sum(dim=1))
            return bradley_terry_loss(chosen, rejected, denominator, spec.margin, spec.centering)
        mask = response_mask(batch)
        logprobs, ref_logprobs = row_sums(outputs["logprobs"], mask), row_sums(batch["ref_logprobs"], mask)
        pairs = PairLogprobs(*_split(logprobs), *_split(ref_logprobs))
        if isinstance(spec, IPO):
            return ipo_loss(pairs, denominator, spec.beta)
        return dpo_loss(pairs, denominator, spec.beta, spec.label_smoothing)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """From the sums of all microbatches and ranks; scores of DPO and IPO are implicit rewards."""
        pairs = max(sums["pairs"], 1)
        return {f"{self.role}/loss": sums["loss"], f"{self.role}/accuracy": sums["correct"] / pairs,
                f"{self.role}/chosen_score": sums["chosen"] / pairs,
                f"{self.role}/rejected_score": sums["rejected"] / pairs}


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[2N] of a batch of pairs -> [N] of the chosen and [N] of the rejected responses."""
    return rows[0::2], rows[1::2]
