"""Safe-RLHF: PPO on reward and cost, weighed by a Lagrange multiplier (arXiv:2310.12773)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.algorithms.advantages import gae, token_rewards
from engine.algorithms.lagrange import lagrangian_advantages, update_multiplier
from engine.batch import response_mask
from engine.dataflows.roles import Metrics, Roles
from engine.dataflows.state import AlgorithmState
from engine.dataflows.steps import (
    add_token_rewards,
    correct_mismatch,
    policy_logprobs,
    shaped_scores,
    update,
    whitened,
)
from engine.spec.algorithm import SafeRLHF


def safe_rlhf_iteration(
    roles: Roles, prompts: Sequence[Any], algorithm: SafeRLHF, state: AlgorithmState
) -> tuple[TensorDict, Metrics]:
    """As PPO, with a cost and its critic beside the reward and its; the multiplier moves before the policy does."""
    batch = roles.rollout.generate(prompts)
    batch = policy_logprobs(roles, batch)
    batch = roles.critic.values(batch)
    batch = roles.reward.score(batch)
    batch["costs"] = roles.cost.score(batch.copy())["scores"]
    batch["cost_values"] = roles.cost_critic.values(batch.copy())["values"]
    metrics = correct_mismatch(roles.comm, batch, algorithm)
    scores = shaped_scores(batch, algorithm, roles.max_response_tokens)
    metrics |= add_token_rewards(roles.comm, batch, scores, algorithm, state)
    metrics |= move_multiplier(roles, batch["costs"], algorithm, state)

    mask = response_mask(batch)
    penalty = batch["token_rewards"] - token_rewards(scores, mask)
    # The KL penalty is in the reward and in the cost: so the multiplier does not change its weight in their sum.
    cost_rewards = token_rewards(batch["costs"], mask) - penalty
    advantages, batch["returns"] = gae(
        batch["token_rewards"], batch["values"], mask, algorithm.gamma, algorithm.gae_lambda)
    cost_advantages, batch["cost_returns"] = gae(
        cost_rewards, batch["cost_values"], mask, algorithm.gamma, algorithm.gae_lambda)
    batch["advantages"] = lagrangian_advantages(advantages, cost_advantages, state.multiplier)
    if algorithm.whiten_advantages:
        batch["advantages"] = whitened(roles.comm, batch["advantages"], mask)
    metrics |= update(roles, batch, state)
    if not metrics["alarms/nan"]:
        metrics |= update_cost_critic(roles, batch)
    return batch, metrics


def move_multiplier(roles: Roles, costs: Tensor, algorithm: SafeRLHF, state: AlgorithmState) -> Metrics:
    """One step of the multiplier on the mean cost of the last iterations, over all ranks."""
    total, rows = roles.comm.sum(torch.stack([costs.double().sum(), torch.ones_like(costs).sum().double()])).tolist()
    if math.isfinite(total):
        state.recent_costs = [*state.recent_costs, total / rows][-algorithm.cost_window:]
    if state.recent_costs and state.iterations >= algorithm.multiplier_delay:
        mean_cost = sum(state.recent_costs) / len(state.recent_costs)
        state.multiplier = update_multiplier(
            state.multiplier, mean_cost, algorithm.cost_limit, algorithm.multiplier_lr)
    return {"cost/mean": total / rows, "cost/multiplier": state.multiplier}


def update_cost_critic(roles: Roles, batch: TensorDict) -> Metrics:
    """Train the second critic on the cost returns; metrics `cost_critic/*`."""
    view = batch.copy()
    view["values"], view["returns"] = batch["cost_values"], batch["cost_returns"]
    return {f"cost_{name}": value for name, value in roles.cost_critic.update(view).items()}
