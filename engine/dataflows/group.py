"""Algorithms that compare the responses to one prompt: GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, OPO."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.algorithms.advantages import groups_with_spread, grpo, opo, over_tokens, rloo, sequence_scores
from engine.batch import concat, response_mask
from engine.dataflows.roles import Metrics, Roles
from engine.dataflows.state import AlgorithmState
from engine.dataflows.steps import (
    add_token_rewards,
    correct_mismatch,
    gather_by_sample,
    leave_out,
    policy_logprobs,
    shaped_scores,
    update,
)
from engine.spec.algorithm import GroupAlgorithm


def group_iteration(
    roles: Roles, prompts: Sequence[Any], algorithm: GroupAlgorithm, state: AlgorithmState
) -> tuple[TensorDict, Metrics]:
    """Generate groups, score them, compare within each group, update the actor."""
    if algorithm.dynamic_sampling is None:
        batch, metrics = roles.reward.score(roles.rollout.generate(prompts)), {}
    else:
        batch, metrics = sample_with_spread(roles, prompts, algorithm)
    batch = policy_logprobs(roles, batch)
    metrics |= correct_mismatch(roles.comm, batch, algorithm)
    scores = shaped_scores(batch, algorithm, roles.max_response_tokens)
    metrics |= add_token_rewards(roles.comm, batch, scores, algorithm, state)

    mask = response_mask(batch)
    ids, (scores, lengths), mine = gather_by_sample(
        roles.comm, batch["sample_ids"], sequence_scores(batch["token_rewards"], mask), batch["response_lengths"])
    compared = compare(algorithm, scores, ids // algorithm.samples_per_prompt, lengths)
    batch["advantages"] = over_tokens(compared[mine], mask)
    return batch, metrics | update(roles, batch, state)


def compare(algorithm: GroupAlgorithm, scores: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """[N] the advantage of each response over the others to its prompt, as the algorithm defines it."""
    if algorithm.kind == "rloo":
        return rloo(scores, group_ids)
    if algorithm.kind == "opo":
        return opo(scores, group_ids, lengths)
    return grpo(scores, group_ids, algorithm.std if algorithm.scale_by_std else "none")


def sample_with_spread(
    roles: Roles, prompts: Sequence[Any], algorithm: GroupAlgorithm
) -> tuple[TensorDict, Metrics]:
    """Generate and score until as many groups as prompts have unequal scores, or the rounds are used up.

    Generation is repeated before anything else runs, so that the memory of the trainer comes back only once. Missing
    groups are filled with groups of equal scores, left out of the loss: the batch always has its full size.
    """
    wanted, rounds, batch = len(prompts), 0, None
    while True:
        drawn = roles.reward.score(roles.rollout.generate(prompts))
        # Sample ids of later rounds follow those of the first, so that no two groups share one.
        drawn["sample_ids"] = drawn["sample_ids"] + rounds * wanted * algorithm.samples_per_prompt
        batch = drawn if batch is None else concat([batch, drawn])
        rounds += 1
        ids, (scores,), mine = gather_by_sample(roles.comm, batch["sample_ids"], batch["scores"])
        groups = ids // algorithm.samples_per_prompt
        spread = groups_with_spread(scores, groups)
        if rounds == algorithm.dynamic_sampling.max_rounds or len(groups[spread].unique()) >= wanted:
            break
        prompts = roles.more_prompts()
    found = groups[spread].unique()
    chosen = torch.cat([found, groups[~spread].unique()])[:wanted]
    share = min(len(found), wanted) / wanted
    leave_out(batch, ~spread[mine])
    batch = roles.redistribute(batch[torch.isin(groups[mine], chosen)])
    return batch, {"rollout/rounds": float(rounds), "rollout/spread_share": share}
