"""Safe-RLHF's constraint: the most reward with the mean cost under a limit (Dai et al., arXiv:2310.12773)."""

import math

from torch import Tensor

MAX_LOG_MULTIPLIER = math.log(1e4)


def lagrangian_advantages(reward_advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """(reward advantage - multiplier * cost advantage) / (1 + multiplier), elementwise.

    The divisor keeps the scale of the policy gradient while the multiplier moves.

    Source: arXiv:2310.12773.
    """
    if reward_advantages.shape != cost_advantages.shape:
        raise ValueError(f"reward advantages {tuple(reward_advantages.shape)} and cost advantages "
                         f"{tuple(cost_advantages.shape)} must have one shape")
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


def update_multiplier(multiplier: float, mean_cost: float, limit: float, lr: float) -> float:
    """The multiplier after one step on its logarithm, so that it stays positive: log m += lr * (mean cost - limit).

    The paper's step, the gradient in log m, has one more factor m. With it the multiplier hardly moves when it is small
    and runs away when it is large (from 1 to 1e4 in three steps, in our tests); without it a cost that is one unit over
    the limit always multiplies it by exp(lr).

    Args:
        multiplier: above 0.
        mean_cost: average cost of recent sequences. Not finite: the multiplier stays.
        limit: the mean cost that is allowed.
        lr: step size.
    Returns:
        Within 1e-4 .. 1e4, so that it can always come back.
    Source: arXiv:2310.12773, as exponentiated gradient ascent.
    """
    if not math.isfinite(mean_cost):
        return multiplier
    log_multiplier = math.log(multiplier) + lr * (mean_cost - limit)
    return math.exp(min(max(log_multiplier, -MAX_LOG_MULTIPLIER), MAX_LOG_MULTIPLIER))
