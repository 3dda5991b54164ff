"""Safe-RLHF's constraint: the most reward with the mean cost under a limit (Dai et al., arXiv:2310.12773)."""

import math

from torch import Tensor

MAX_LOG_MULTIPLIER = math.log(1e4)


def lagrangian_advantages(reward_advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """(reward advantage - multiplier * cost advantage) / (1 + multiplier), elementwise.

    The divisor keeps the scale of the policy gradient while the multiplier moves.

    Source: arXiv:2310.12773, eq. 10 and appendix B.3.
    """
    if reward_advantages.shape != cost_advantages.shape:
        raise ValueError(f"reward advantages {tuple(reward_advantages.shape)} and cost advantages "
                         f"{tuple(cost_advantages.shape)} must have one shape")
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


def update_multiplier(multiplier: float, mean_cost: float, limit: float, lr: float) -> float:
    """The multiplier after one step of gradient ascent on its logarithm, so that it stays positive.

    Args:
        multiplier: above 0.
        mean_cost: average cost of recent sequences. Not finite: the multiplier stays.
        limit: the mean cost that is allowed.
        lr: step size.
    Source: arXiv:2310.12773, eq. 11: d/d(log m) of m * (cost - limit).
    """
    if not math.isfinite(mean_cost):
        return multiplier
    return math.exp(min(math.log(multiplier) + lr * multiplier * (mean_cost - limit), MAX_LOG_MULTIPLIER))
