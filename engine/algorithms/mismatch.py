"""Corrections for the gap between the sampler's and the trainer's logprobs of the same tokens.

vLLM and Megatron run the same weights through different kernels, so tokens are really drawn from the policy `rollout`
while the gradient is computed for `old`. The importance ratio is old / rollout.
Source: Yao et al. 2025, fengyao.notion.site/off-policy-rl (truncated); Liu et al. 2025, "When speed kills stability"
(masked and rejected); Ring-1T's IcePop, arXiv:2510.18855.
"""

from typing import Literal

import torch
from torch import Tensor

from engine.algorithms.masking import check_shapes, masked_sum, row_means, zero_masked

Level = Literal["token", "sequence"]

MAX_LOG_RATIO = 20.0


def importance_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """[B, R] ratio of each token, or of its whole sequence (the product) on each of its tokens; 1 in masked slots."""
    check_shapes(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, mask)
    if level == "sequence":
        log_ratio = zero_masked(log_ratio.sum(dim=1, keepdim=True).expand_as(mask), mask)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(ratio: Tensor, cap: float) -> Tensor:
    """[B, R] min(ratio, cap): truncated importance sampling; bounded variance, a little bias."""
    return ratio.clamp(max=cap)


def masked_weights(ratio: Tensor, low: float, high: float) -> Tensor:
    """[B, R] the ratio within [low, high], 0 outside: masked importance sampling. Denominators stay."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def accepted_rows(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> Tensor:
    """[B] bool: the geometric mean of the row's token ratios is within [low, high]; other rows are rejected.

    The mean, and not the product: a bound on the product would reject long responses for their length.
    """
    ratio = row_means(_log_ratio(old_logprobs, rollout_logprobs, mask), mask).exp()
    return (ratio >= low) & (ratio <= high)


def mismatch_sums(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[6] float64, to be added over ranks for `mismatch_metrics`: tokens, |gap|, k1 and k3 of KL(rollout || old),
    ratio, ratio squared."""
    gap = _log_ratio(old_logprobs, rollout_logprobs, mask).double()
    ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    terms = (torch.ones_like(gap), gap.abs(), -gap, ratio - 1 - gap, ratio, ratio.square())
    return torch.stack([masked_sum(term, mask) for term in terms])


def mismatch_metrics(sums: Tensor) -> dict[str, float]:
    """The diagnostics of an iteration from `mismatch_sums` added over all ranks.

    `logprob_gap` mean |old - rollout| in nats; `mismatch_k1`, `mismatch_k3` KL(rollout || old) a token; `mismatch_ess`
    effective sample share of token importance sampling, 1 when the two agree.
    """
    tokens, gap, k1, k3, ratio, squared = sums.tolist()
    count = max(tokens, 1.0)
    return {
        "logprob_gap": gap / count, "mismatch_k1": k1 / count, "mismatch_k3": k3 / count,
        "mismatch_ess": ratio * ratio / (count * squared) if squared > 0 else 1.0,
    }


def _log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    return zero_masked(old_logprobs, mask) - zero_masked(rollout_logprobs, mask)
