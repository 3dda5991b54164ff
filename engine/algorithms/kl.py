"""KL divergence to the reference, from sampled tokens or from whole distributions, and its controller.

Schulman's estimators (joschu.net/blog/kl-approx.html) of KL(policy || reference), for a token drawn from the policy,
with d = logprob - reference logprob:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d.
k1 and k3 have the KL as their mean, k3 is never negative; k2 is biased but its gradient is not.

As a penalty in the reward only k1 gives the policy the gradient of the KL; the others shape the reward.
As a loss, k1 and k3 have a wrong gradient when differentiated as they stand: k1's is zero in the mean, k3's is that of
the reverse KL. `kl_loss` therefore takes the value of the estimator and the gradient of the KL itself.
"""

from typing import Literal

import torch
from torch import Tensor

from engine.algorithms.masking import check_shapes, zero_masked

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""k3 counts the log ratio within +-20, so that one impossible token cannot make it infinite."""


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: Estimator) -> Tensor:
    """[B, R] estimate at each sampled token, 0 in masked slots.

    Args: logprobs, ref_logprobs: [B, R] of the sampled tokens, drawn from the policy of `logprobs`; mask: [B, R].
    """
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    difference = zero_masked(logprobs, mask) - zero_masked(ref_logprobs, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.exp(-bounded) - 1 + bounded
    raise ValueError(f"KL estimator {estimator!r} is not one of k1, k2, k3")


def kl_loss(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, estimator: Estimator
) -> Tensor:
    """[B, R] KL estimates of the trained policy whose gradient is, in the mean, the gradient of the KL.

    The tokens were drawn from the old policy, so each estimate is weighted with w = policy / old. The gradient of
    w * k3 is w * d * grad(logprob), without bias; that of w * k1 differs from it only by a term of mean zero, and that
    of k2 is the same with w held constant. So every estimator gets this gradient, and the value that is logged is the
    value that is trained. It is the gradient at the states that were visited; their own dependence on the policy
    belongs to the reward.

    Args:
        logprobs: [B, R] of the policy being trained.
        ref_logprobs, old_logprobs: [B, R], constants.
        mask: [B, R].
        estimator: of the value.
    Source: the log-derivative identity; the weighting is DeepSeek-V3.2's, arXiv:2512.02556, sec. 3.1.
    """
    check_shapes(mask, old_logprobs=old_logprobs)
    clean = zero_masked(logprobs, mask)
    fixed = clean.detach()
    weight = (fixed - zero_masked(old_logprobs, mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    value = weight * estimate_kl(fixed, ref_logprobs, mask, estimator)
    slope = weight * estimate_kl(fixed, ref_logprobs, mask, "k1")
    # clean - fixed is zero: it adds the gradient and leaves the value.
    return value + slope * (clean - fixed)


def full_kl(log_policy: Tensor, log_reference: Tensor, mask: Tensor) -> Tensor:
    """[B, R] exact KL(policy || reference) at each position: no sampling noise, and its gradient is its own.

    Args: log_policy, log_reference: [B, R, V] normalised log probabilities; mask: [B, R].
    """
    present = mask[..., None].expand_as(log_policy)
    log_p, log_q = zero_masked(log_policy, present), zero_masked(log_reference, present)
    # A token of probability 0 contributes 0, not 0 * -inf.
    possible = present & (log_p > -torch.inf)
    log_p, log_q = zero_masked(log_p, possible), zero_masked(log_q, possible)
    return zero_masked(log_p.exp() * (log_p - log_q), possible).sum(dim=-1)


def penalise_rewards(token_rewards: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """[B, R] rewards minus coefficient times `kl`, both [B, R]."""
    check_shapes(torch.ones_like(kl, dtype=torch.bool), token_rewards=token_rewards)
    return token_rewards - coefficient * kl


def adapt_coefficient(coefficient: float, kl: float, target: float, num_samples: int, horizon: int) -> float:
    """The KL coefficient after an iteration: proportional control in log space.

    Args:
        coefficient: of this iteration.
        kl: measured, nats per sequence. Not finite: the coefficient stays.
        target: wanted, nats per sequence.
        num_samples: sequences of this iteration, over all ranks.
        horizon: sequences over which an error clipped to 20 % is applied in full.
    Source: Ziegler et al., arXiv:1909.08593, sec. 2.2.
    """
    if kl != kl or kl in (float("inf"), float("-inf")):
        return coefficient
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_samples / horizon)
