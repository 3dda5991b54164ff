"""Policy, value and entropy losses. Each is `sum(weights * per-token loss)`.

The weights come from `token_weights`, whose denominator is counted over the whole minibatch (all ranks, all
microbatches) before the first forward. So the loss of a minibatch is the plain sum of its microbatches' losses, and its
gradient the sum of theirs.

Every policy loss returns (scalar loss, sums). The sums are detached scalars that add up over microbatches and ranks:
`tokens`, `clipped_tokens`, `kl_to_old` (k3 estimate of KL(old || new), nats), `ratio`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.algorithms.masking import check_shapes, masked_sum, row_means, zero_masked

Aggregation = Literal["token", "sequence", "constant"]
Sums = dict[str, Tensor]

MAX_LOG_RATIO = 20.0
"""Log ratios count within +-20: exp(20) is finite in every dtype used, and far outside every clip range."""


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens of one microbatch, as a policy loss needs them. Every field is [B, R]."""

    old_logprobs: Tensor
    """Logprobs of the policy before this iteration's updates."""
    advantages: Tensor
    mask: Tensor
    """bool: tokens that are trained on."""
    weights: Tensor
    """From `token_weights`, times importance weights if any."""

    def __post_init__(self) -> None:
        check_shapes(self.mask, old_logprobs=self.old_logprobs, advantages=self.advantages, weights=self.weights)


def loss_denominator(mask: Tensor, aggregation: Aggregation, max_tokens: int) -> Tensor:
    """What the losses of a minibatch are divided by: this part's share, to be added over microbatches and ranks.

    Args:
        mask: [B, R].
        aggregation: `token`: every token of the minibatch weighs the same (DAPO). `sequence`: every sequence weighs
            the same, its tokens share it (GRPO). `constant`: every token weighs 1 / (sequences * max_tokens)
            (Dr. GRPO), so that a long response is not diluted.
        max_tokens: limit of response tokens, read for `constant` only.
    Returns:
        Scalar float64: tokens, sequences with at least one token, or those times max_tokens.
    """
    if aggregation == "token":
        return mask.sum().double()
    sequences = mask.any(dim=1).sum().double()
    return sequences * max_tokens if aggregation == "constant" else sequences


def token_weights(mask: Tensor, aggregation: Aggregation, denominator: Tensor | float) -> Tensor:
    """[B, R] float32 weights, 0 in masked slots, that sum to 1 over the minibatch (`constant`: to less).

    Args:
        mask: [B, R].
        aggregation: as in `loss_denominator`.
        denominator: `loss_denominator` added over all microbatches and ranks of the minibatch.
    """
    # A minibatch without a token has the denominator 0; its weights are all 0 either way.
    weights = mask.double() / torch.as_tensor(denominator, dtype=torch.float64, device=mask.device).clamp(min=1)
    if aggregation == "sequence":
        weights = weights / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return weights.float()


def ppo_loss(
    logprobs: Tensor, sampled: Sampled, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Sums]:
    """Clipped surrogate.

    Args:
        logprobs: [B, R] of the policy being trained.
        sampled: the tokens.
        clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high]; unequal is DAPO's clip-higher.
        dual_clip: bounds the loss of tokens with a negative advantage by dual_clip * |advantage|; above 1.
    Source: PPO, arXiv:1707.06347, eq. 7; DAPO, arXiv:2503.14476, eq. 10; dual clip, arXiv:1912.09729.
    """
    ratio, advantages = _token_ratio(logprobs, sampled), zero_masked(sampled.advantages, sampled.mask)
    losses, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (losses > bound)
        losses, clipped = torch.where(bounded, bound, losses), clipped | bounded
    return _weighted(losses, sampled), _sums(logprobs, sampled, ratio, clipped)


def gspo_loss(logprobs: Tensor, sampled: Sampled, clip_low: float, clip_high: float) -> tuple[Tensor, Sums]:
    """Clipped surrogate of the sequence: its ratio is the geometric mean of its tokens' ratios.

    Args: as in `ppo_loss`. The paper's weights are those of aggregation `sequence`.
    Source: GSPO, arXiv:2507.18071, eq. 5 and 7.
    """
    mask = sampled.mask
    log_ratio = row_means(_log_ratio(logprobs, sampled), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()[:, None].expand_as(mask)
    losses, clipped = _clipped_surrogate(ratio, zero_masked(sampled.advantages, mask), clip_low, clip_high)
    return _weighted(losses, sampled), _sums(logprobs, sampled, ratio, clipped)


def cispo_loss(logprobs: Tensor, sampled: Sampled, clip_low: float, clip_high: float) -> tuple[Tensor, Sums]:
    """Policy gradient whose importance weight is clipped and held constant, so that every token keeps a gradient.

    Args: as in `ppo_loss`; clip_low = 1 is no lower bound, as in the paper.
    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    """
    ratio = _token_ratio(logprobs, sampled).detach()
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -held * zero_masked(sampled.advantages, sampled.mask) * zero_masked(logprobs, sampled.mask)
    return _weighted(losses, sampled), _sums(logprobs, sampled, ratio, held != ratio)


def reinforce_loss(logprobs: Tensor, sampled: Sampled) -> tuple[Tensor, Sums]:
    """Plain policy gradient, -advantage * logprob: exact for the policy that sampled, with no ratio and no clip.

    Source: Williams 1992, Machine Learning 8.
    """
    ratio = _token_ratio(logprobs, sampled).detach()
    losses = -zero_masked(sampled.advantages, sampled.mask) * zero_masked(logprobs, sampled.mask)
    return _weighted(losses, sampled), _sums(logprobs, sampled, ratio, torch.zeros_like(sampled.mask))


def entropy_bonus(entropies: Tensor, mask: Tensor, weights: Tensor) -> tuple[Tensor, Sums]:
    """Weighted mean token entropy, to be subtracted from the loss times its coefficient.

    Args: entropies: [B, R] nats; mask, weights: [B, R].
    Returns: (scalar, {"entropy": sum over unmasked tokens}).
    """
    check_shapes(mask, entropies=entropies, weights=weights)
    clean = zero_masked(entropies, mask)
    return (weights * clean).sum(), {"entropy": clean.detach().sum()}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, Sums]:
    """Half the squared error to the returns, the larger of it with and without clipping.

    Args:
        values: [B, R] of the critic being trained.
        old_values: [B, R] before this iteration's updates.
        returns: [B, R].
        weights: [B, R] from `token_weights`; 0 marks masked slots.
        clip: a new value counts within this distance of the old one; None: no clipping.
    Returns:
        (scalar loss, sums): `tokens`, `clipped_tokens`, and for the explained variance `returns`, `returns_squared`,
        `errors`, `errors_squared` (error = return - old value).
    Source: PPO's reference implementation (openai/baselines ppo2), value clipping.
    """
    mask = weights != 0
    check_shapes(mask, values=values, old_values=old_values, returns=returns)
    values, old, returns = (zero_masked(x, mask) for x in (values, old_values, returns))
    squared = (values - returns).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        clipped = bounded > squared
        squared = torch.maximum(squared, bounded)
    errors = (returns - old).detach().double()
    exact = returns.double()
    return 0.5 * (weights * squared).sum(), {
        "tokens": mask.sum(), "clipped_tokens": (clipped & mask).sum(),
        "returns": exact.sum(), "returns_squared": exact.square().sum(),
        "errors": errors.sum(), "errors_squared": errors.square().sum(),
    }


def _log_ratio(logprobs: Tensor, sampled: Sampled) -> Tensor:
    check_shapes(sampled.mask, logprobs=logprobs)
    return zero_masked(logprobs, sampled.mask) - zero_masked(sampled.old_logprobs, sampled.mask)


def _token_ratio(logprobs: Tensor, sampled: Sampled) -> Tensor:
    return _log_ratio(logprobs, sampled).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    free, bounded = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(free, bounded), bounded > free


def _weighted(losses: Tensor, sampled: Sampled) -> Tensor:
    return (zero_masked(sampled.weights, sampled.mask) * losses).sum()


def _sums(logprobs: Tensor, sampled: Sampled, ratio: Tensor, clipped: Tensor) -> Sums:
    mask, log_ratio = sampled.mask, _log_ratio(logprobs, sampled).detach()
    token_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "tokens": mask.sum(), "clipped_tokens": (clipped & mask).sum(),
        "kl_to_old": masked_sum(token_ratio - 1 - log_ratio, mask), "ratio": masked_sum(ratio.detach(), mask),
    }
