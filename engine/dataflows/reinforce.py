"""REINFORCE with a baseline that needs no critic: REINFORCE++ (arXiv:2501.03262) and ReMax (arXiv:2310.10505)."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from engine.algorithms.advantages import discounted_returns, group_centred, over_tokens, remax, sequence_scores
from engine.batch import response_mask
from engine.dataflows.roles import Metrics, Roles
from engine.dataflows.state import AlgorithmState
from engine.dataflows.steps import (
    add_token_rewards,
    correct_mismatch,
    gather_by_sample,
    policy_logprobs,
    shaped_scores,
    update,
    whitened,
)
from engine.spec.algorithm import ReinforcePP, ReMax


def reinforce_pp_iteration(
    roles: Roles, prompts: Sequence[Any], algorithm: ReinforcePP, state: AlgorithmState
) -> tuple[TensorDict, Metrics]:
    """Rewards to come, or scores relative to the group's mean, whitened over all tokens of the batch."""
    batch = roles.reward.score(roles.rollout.generate(prompts))
    batch = policy_logprobs(roles, batch)
    metrics = correct_mismatch(roles.comm, batch, algorithm)
    scores = shaped_scores(batch, algorithm, roles.max_response_tokens)
    metrics |= add_token_rewards(roles.comm, batch, scores, algorithm, state)

    mask = response_mask(batch)
    if algorithm.group_baseline:
        ids, (everyone,), mine = gather_by_sample(
            roles.comm, batch["sample_ids"], sequence_scores(batch["token_rewards"], mask))
        advantages = over_tokens(group_centred(everyone, ids // algorithm.samples_per_prompt)[mine], mask)
    else:
        advantages = discounted_returns(batch["token_rewards"], mask, algorithm.gamma)
    batch["advantages"] = whitened(roles.comm, advantages, mask)
    return batch, metrics | update(roles, batch, state)


def remax_iteration(
    roles: Roles, prompts: Sequence[Any], algorithm: ReMax, state: AlgorithmState
) -> tuple[TensorDict, Metrics]:
    """Rewards to come minus the score of the greedy response to the same prompt."""
    batch = roles.reward.score(roles.rollout.generate(prompts))
    baselines = greedy_scores(roles, prompts, batch, algorithm)
    batch = policy_logprobs(roles, batch)
    metrics = correct_mismatch(roles.comm, batch, algorithm)
    scores = shaped_scores(batch, algorithm, roles.max_response_tokens)
    metrics |= add_token_rewards(roles.comm, batch, scores, algorithm, state)

    batch["advantages"] = remax(batch["token_rewards"], baselines, response_mask(batch))
    return batch, metrics | update(roles, batch, state)


def greedy_scores(roles: Roles, prompts: Sequence[Any], batch: TensorDict, algorithm: ReMax) -> Tensor:
    """[B] for each of this rank's rows the score of the greedy response, which any rank may have generated."""
    greedy = roles.rollout.generate(prompts, greedy=True)
    # Counted as each prompt's first sample, so that the reward finds the prompt as in any other batch.
    greedy["sample_ids"] = greedy["sample_ids"] * algorithm.samples_per_prompt
    greedy = roles.reward.score(greedy)
    scores = shaped_scores(greedy, algorithm, roles.max_response_tokens)
    _, (by_prompt,), _ = gather_by_sample(roles.comm, greedy["sample_ids"], scores)
    return by_prompt[batch["sample_ids"] // algorithm.samples_per_prompt]
