"""How much better each token was than expected: GAE, and the estimators that need no critic.

Group estimators take the scores of all ranks ([N], gathered) with each row's group id, and the caller takes its own
rows from the result; so a group may lie on several ranks or microbatches, and groups may differ in size.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.algorithms.masking import check_shapes, row_sums, zero_masked


def token_rewards(scores: Tensor, mask: Tensor) -> Tensor:
    """[B, R] rewards: each sequence's score on its last unmasked token, 0 elsewhere.

    Args: scores: [B]; mask: [B, R]. A row without tokens gets no reward.
    """
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"{tuple(scores.shape)} scores for {mask.shape[0]} rows; there must be one a row")
    slots = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask * slots).amax(dim=1, keepdim=True)
    return torch.where(mask & (slots == last), scores[:, None], torch.zeros_like(scores)[:, None])


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the unmasked tokens of each row, which end the episode.

    To bootstrap a response that was cut off from the value v after its last token, add gamma * v to its last reward:
    `rewards + token_rewards(gamma * v, mask)`.

    Args:
        rewards: [B, R] token rewards.
        values: [B, R], slot r the value before response token r.
        mask: [B, R]. A masked slot (padding, or a tool's output in the middle) is no step: nothing is read from it,
            and the token before it is followed by the next unmasked one.
        gamma: discount per step.
        gae_lambda: 1 is Monte Carlo, 0 is one-step TD.
    Returns:
        (advantages, returns), both [B, R], 0 in masked slots; returns = advantages + values.
    Source: Schulman et al., arXiv:1506.02438, eq. 16.
    """
    check_shapes(mask, rewards=rewards, values=values)
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)
    advantages = torch.zeros_like(values)
    next_value = running = values.new_zeros(len(values))
    for slot in range(mask.shape[1] - 1, -1, -1):
        here = mask[:, slot]
        error = rewards[:, slot] + gamma * next_value - values[:, slot]
        running = torch.where(here, error + gamma * gae_lambda * running, running)
        next_value = torch.where(here, values[:, slot], next_value)
        advantages[:, slot] = zero_masked(running, here)
    return advantages, zero_masked(advantages + values, mask)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[B, R] sum of the rewards from each unmasked token on, discounted by gamma a step; 0 in masked slots."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def over_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """[B, R]: each row's advantage [B] on all its unmasked tokens."""
    return torch.where(mask, advantages[:, None], torch.zeros_like(advantages)[:, None])


@dataclass(frozen=True)
class Groups:
    """Which rows answer the same prompt."""

    index: Tensor
    """[N] int64: the group of each row, 0 .. number of groups - 1."""
    sizes: Tensor
    """[groups] int64 rows of each group."""

    def sums(self, values: Tensor) -> Tensor:
        """[groups] sums of [N] values."""
        return torch.zeros(len(self.sizes), dtype=values.dtype, device=values.device).index_add_(0, self.index, values)

    def means(self, values: Tensor) -> Tensor:
        """[N] each row's group mean."""
        return (self.sums(values) / self.sizes)[self.index]


def make_groups(scores: Tensor, group_ids: Tensor, minimum: int = 2) -> Groups:
    """Find the groups of rows with equal ids.

    Args: scores: [N]; group_ids: [N] integers, in any order.
    Raises:
        ValueError: the two differ in shape, or a group has fewer than `minimum` rows.
    """
    if scores.shape != group_ids.shape or scores.ndim != 1:
        raise ValueError(f"scores {tuple(scores.shape)} and group ids {tuple(group_ids.shape)} must both be [N]")
    ids, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if len(sizes) and int(sizes.min()) < minimum:
        group = int(sizes.argmin())
        raise ValueError(
            f"group {int(ids[group])} has {int(sizes[group])} response(s); a comparison within the group needs "
            f"at least {minimum}: sample more responses per prompt")
    return Groups(index, sizes)


def grpo(scores: Tensor, group_ids: Tensor, scale: Literal["population", "sample", "none"] = "population") -> Tensor:
    """[N] scores relative to the group's mean, in units of its standard deviation.

    Args:
        scores: [N] in reward units, of all ranks.
        group_ids: [N].
        scale: divide by the population's or the sample's standard deviation, or keep reward units (Dr. GRPO). The
            sample's shrinks advantages by sqrt((G - 1) / G), 13 % at G = 4.
    Returns:
        [N], mean zero in every group; 0 in a group of equal scores.
    Source: DeepSeekMath, arXiv:2402.03300, sec. 4.1.2; Dr. GRPO, arXiv:2503.20783.
    """
    groups = make_groups(scores, group_ids)
    exact = scores.double()
    centred = exact - groups.means(exact)
    if scale == "none":
        return centred.to(scores.dtype)
    degrees = groups.sizes - int(scale == "sample")
    std = (groups.sums(centred.square()) / degrees).sqrt()[groups.index]
    return (centred / (std + 1e-6)).to(scores.dtype)


def rloo(scores: Tensor, group_ids: Tensor) -> Tensor:
    """[N] score minus the mean of the other responses to the prompt.

    Source: Kool et al. 2019; Ahmadian et al., arXiv:2402.14740.
    """
    groups = make_groups(scores, group_ids)
    exact, sizes = scores.double(), groups.sizes[groups.index]
    return ((exact - groups.means(exact)) * sizes / (sizes - 1)).to(scores.dtype)


def opo(scores: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """[N] score minus the group's length-weighted mean: the baseline of least gradient variance when every token's
    gradient has the same norm.

    Args: lengths: [N] response tokens.
    Source: OPO, arXiv:2505.23585.
    """
    groups = make_groups(scores, group_ids)
    exact, weights = scores.double(), lengths.double()
    baseline = groups.sums(exact * weights) / groups.sums(weights)
    return (exact - baseline[groups.index]).to(scores.dtype)


def group_centred(scores: Tensor, group_ids: Tensor) -> Tensor:
    """[N] score minus the group's mean; REINFORCE++-baseline whitens the result over the batch's tokens.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return grpo(scores, group_ids, "none")


def remax(rewards: Tensor, greedy_scores: Tensor, mask: Tensor) -> Tensor:
    """[B, R] rewards still to come minus the score of the greedy response to the same prompt.

    Args: rewards: [B, R] token rewards; greedy_scores: [B], row by row; mask: [B, R].
    Source: ReMax, arXiv:2310.10505.
    """
    return zero_masked(discounted_returns(rewards, mask, 1.0) - greedy_scores[:, None], mask)


def sequence_scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B] sum of each row's token rewards: the score with its KL penalty, for estimators that see whole responses."""
    return row_sums(rewards, mask)


def groups_with_spread(scores: Tensor, group_ids: Tensor) -> Tensor:
    """[N] bool: the row's group has unequal scores. Other groups have no gradient; DAPO drops them.

    Source: DAPO, arXiv:2503.14476, eq. 11.
    """
    groups = make_groups(scores, group_ids, minimum=1)
    num_groups = len(groups.sizes)
    highest = scores.new_full((num_groups,), -torch.inf).scatter_reduce_(0, groups.index, scores, "amax")
    lowest = scores.new_full((num_groups,), torch.inf).scatter_reduce_(0, groups.index, scores, "amin")
    return (highest > lowest)[groups.index]


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """[B] float32 to add to the score: 0 up to max_tokens - buffer_tokens, then linearly down to -1 at max_tokens.

    Args: lengths: [B] response tokens; max_tokens: where -1 is reached; buffer_tokens: width of the slope.
    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"overlong buffer of {buffer_tokens} tokens must be within 1 .. {max_tokens} response tokens")
    return ((max_tokens - buffer_tokens - lengths).float() / buffer_tokens).clamp(-1, 0)
