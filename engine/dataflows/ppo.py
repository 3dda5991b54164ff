"""PPO with a critic and GAE (arXiv:1707.06347, arXiv:1506.02438; for language models arXiv:2203.02155)."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from engine.algorithms.advantages import gae
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
from engine.spec.algorithm import PPO


def ppo_iteration(
    roles: Roles, prompts: Sequence[Any], algorithm: PPO, state: AlgorithmState
) -> tuple[TensorDict, Metrics]:
    """Generate, score, estimate advantages with the critic, update critic and actor."""
    batch = roles.rollout.generate(prompts)
    batch = policy_logprobs(roles, batch)
    batch = roles.critic.values(batch)
    batch = roles.reward.score(batch)
    metrics = correct_mismatch(roles.comm, batch, algorithm)
    scores = shaped_scores(batch, algorithm, roles.max_response_tokens)
    metrics |= add_token_rewards(roles.comm, batch, scores, algorithm, state)

    mask = response_mask(batch)
    batch["advantages"], batch["returns"] = gae(
        batch["token_rewards"], batch["values"], mask, algorithm.gamma, algorithm.gae_lambda)
    if algorithm.whiten_advantages:
        batch["advantages"] = whitened(roles.comm, batch["advantages"], mask)
    return batch, metrics | update(roles, batch, state)
