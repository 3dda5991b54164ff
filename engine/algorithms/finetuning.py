"""Losses before and beside RL: supervised fine-tuning, reward models (Bradley-Terry), DPO and IPO.

Each is a sum over tokens or pairs divided by a denominator that is counted over the whole minibatch (all ranks, all
microbatches) before the first forward, so the losses and gradients of microbatches add up. Each returns (scalar loss,
sums): detached scalars that add up in the same way. N is the number of preference pairs at hand.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algorithms.losses import Sums
from engine.algorithms.masking import check_shapes, masked_sum, zero_masked


def sft_loss(logprobs: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of the demonstrated tokens.

    Args:
        logprobs: [B, R] of the demonstrated tokens.
        mask: [B, R] bool: tokens that are trained on, the end token among them.
        weights: [B, R] from `token_weights`; with aggregation `token` every token of the minibatch weighs the same.
    Returns:
        (scalar, sums `tokens` and `nll`, nats).
    Source: InstructGPT, arXiv:2203.02155, sec. 3.5; the prompt's tokens are not trained on.
    """
    check_shapes(mask, logprobs=logprobs, weights=weights)
    losses = -zero_masked(logprobs, mask)
    return (zero_masked(weights, mask) * losses).sum(), {
        "tokens": mask.sum(), "nll": masked_sum(losses.detach(), mask)}


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, num_pairs: Tensor | float, margin: float = 0.0,
                       centering: float = 0.0) -> tuple[Tensor, Sums]:
    """Minus the log-probability that the chosen response is preferred, -log sigmoid(chosen - rejected - margin).

    Args:
        chosen, rejected: [N] scores of the two responses to a prompt.
        num_pairs: of the whole minibatch.
        margin: by how much the chosen one should lead.
        centering: weight of (chosen + rejected)^2, which keeps scores near zero: a difference alone leaves their
            level free.
    Returns:
        (scalar, sums of `_pair_sums`).
    Raises:
        ValueError: the two are not vectors of one length.
    Source: InstructGPT, arXiv:2203.02155, eq. 1; margin, Llama 2, arXiv:2307.09288, eq. 2; centering,
        arXiv:2312.09244, sec. 2.
    """
    _check_pairs(chosen=chosen, rejected=rejected)
    losses = -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()
    return losses.sum() / num_pairs, _pair_sums(chosen, rejected)


@dataclass(frozen=True)
class PairLogprobs:
    """What a policy and the frozen reference say of the pairs: logprobs summed over each response, every field [N]."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    def __post_init__(self) -> None:
        _check_pairs(chosen=self.chosen, rejected=self.rejected, ref_chosen=self.ref_chosen,
                     ref_rejected=self.ref_rejected)

    def gaps(self) -> tuple[Tensor, Tensor]:
        """[N] log policy - log reference of the chosen and of the rejected responses."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected


def dpo_loss(pairs: PairLogprobs, num_pairs: Tensor | float, beta: float,
             label_smoothing: float = 0.0) -> tuple[Tensor, Sums]:
    """Bradley-Terry on the implicit reward beta (log policy - log reference).

    Args:
        pairs: logprobs with gradient in those of the policy.
        num_pairs: of the whole minibatch.
        beta: strength of the KL to the reference.
        label_smoothing: assumed share of pairs that are the wrong way round, below 0.5.
    Returns:
        (scalar, sums of `_pair_sums` of the implicit rewards).
    Source: DPO, arXiv:2305.18290, eq. 7; label smoothing, Mitchell 2023, "A note on DPO with noisy preferences", eq. 3.
    """
    chosen, rejected = (beta * gap for gap in pairs.gaps())
    lead = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(lead) - label_smoothing * F.logsigmoid(-lead)
    return losses.sum() / num_pairs, _pair_sums(chosen, rejected)


def ipo_loss(pairs: PairLogprobs, num_pairs: Tensor | float, beta: float) -> tuple[Tensor, Sums]:
    """Squared distance of the log-ratio difference to 1 / (2 beta): bounded also where preferences are certain.

    Args and returns: as `dpo_loss`.
    Source: IPO, arXiv:2310.12036, eq. 17 (its tau is beta).
    """
    chosen, rejected = pairs.gaps()
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return losses.sum() / num_pairs, _pair_sums(beta * chosen, beta * rejected)


def _check_pairs(**scores: Tensor) -> None:
    shapes = {name: tuple(score.shape) for name, score in scores.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 1:
        raise ValueError(f"pairs must be vectors of one length, not {shapes}")


def _pair_sums(chosen: Tensor, rejected: Tensor) -> Sums:
    """`pairs`; `correct`, those whose chosen response leads (a tie counts half); `chosen` and `rejected` scores."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    return {
        "pairs": torch.ones_like(chosen).sum(),
        "correct": (0.5 * (1 + torch.sign(chosen - rejected))).sum(),
        "chosen": chosen.sum(), "rejected": rejected.sum(),
    }
