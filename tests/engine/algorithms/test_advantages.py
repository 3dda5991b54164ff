import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.advantages import (
    discounted_returns,
    gae,
    group_centred,
    groups_with_spread,
    grpo,
    opo,
    over_tokens,
    overlong_penalty,
    remax,
    rloo,
    sequence_scores,
    token_rewards,
)
from tests.engine.algorithms import slow
from tests.engine.algorithms.inputs import close, examples, grouped_scores, masks, noise, poison, scales, seeds

unit = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def on(*values):
    return torch.tensor([values], dtype=torch.bool)


@examples
@given(mask=masks(), seed=seeds, scale=scales, gamma=unit, lam=unit)
def test_gae_equals_the_sum_in_the_paper_whatever_stands_in_masked_slots(mask, seed, scale, gamma, lam):
    rewards, values = noise(mask.shape, seed, scale), noise(mask.shape, seed + 1, scale)
    advantages, returns = gae(poison(rewards, mask, 1), poison(values, mask, 2), mask, gamma, lam)
    expected = slow.gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    close(advantages, expected)
    close(returns, torch.where(mask, torch.tensor(expected, dtype=torch.float64) + values, 0.0))


def test_gae_vectors():
    """A masked slot with value 77 in between changes nothing; lambda 0 is one-step TD (NeMo-RL test_ppo.py)."""
    advantages, returns = gae(row(0, 0, 1), row(.5, .4, .3), on(1, 1, 1), .99, .95)
    close(advantages, [[.41831, .55535, .7]], 1e-5)
    close(returns, [[.91831, .95535, 1]], 1e-5)
    advantages, returns = gae(row(0, 0, 0, 1), row(.5, 77, .4, .3), on(1, 0, 1, 1), .99, .95)
    close(advantages, [[.41831, 0, .55535, .7]], 1e-5)
    close(gae(row(0, 0, 5), row(1, 2, 3), on(1, 1, 1), 1, 0)[0], [[1, 1, 2]])


def test_gae_never_bootstraps_from_a_masked_value():
    """ROLL#447."""
    close(gae(row(0, 1, 0), row(0, 0, 100), on(1, 1, 0), 1, .95)[0], [[.95, 1, 0]])


@examples
@given(mask=masks(), seed=seeds, gamma=unit, lam=unit)
def test_adding_the_discounted_last_value_to_the_last_reward_bootstraps(mask, seed, gamma, lam):
    """A row that is cut off equals the same row with one more step whose value is known and whose error is zero."""
    rewards, values, last = noise(mask.shape, seed), noise(mask.shape, seed + 1), noise(mask.shape[:1], seed + 2)
    cut = gae(rewards + token_rewards(gamma * last, mask), values, mask, gamma, lam)[0]
    longer = [torch.cat([x, extra[:, None]], dim=1) for x, extra in ((rewards, last), (values, last))]
    whole = gae(*longer, torch.cat([mask, mask.any(dim=1, keepdim=True)], dim=1), gamma, lam)[0]
    close(cut, whole[:, :-1])


@examples
@given(mask=masks(), seed=seeds)
def test_with_lambda_one_the_return_is_the_reward_to_come_and_ignores_the_critic(mask, seed):
    rewards, values = noise(mask.shape, seed), noise(mask.shape, seed + 1)
    close(gae(rewards, values, mask, .9, 1.0)[1], discounted_returns(rewards, mask, .9))


def test_discounted_returns_skip_holes():
    close(discounted_returns(row(1, 50, 2, 4), on(1, 0, 1, 1), .5), [[3, 0, 4, 4]])


def test_the_score_lands_on_the_last_response_token_of_short_and_full_rows():
    """TRL#3750, #5338."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    rewards = token_rewards(torch.tensor([5.0, 6, 7, 8]), mask)
    assert rewards.tolist() == [[0, 5, 0, 0], [0, 0, 0, 6], [0, 0, 7, 0], [0, 0, 0, 0]]
    assert sequence_scores(rewards, mask).tolist() == [5, 6, 7, 0]


def test_scores_and_rows_must_be_equal_in_number():
    with pytest.raises(ValueError, match="3"):
        token_rewards(torch.zeros(2), torch.ones(3, 4, dtype=torch.bool))


@pytest.mark.parametrize(("scale", "expected"), [
    ("sample", [1.5, -.5, -.5, -.5]), ("population", [1.732, -.577, -.577, -.577]), ("none", [.75, -.25, -.25, -.25])])
def test_grpo_vectors(scale, expected):
    close(grpo(torch.tensor([1., 0, 0, 0]), torch.zeros(4, dtype=torch.int64), scale), expected, 4e-4)


def test_rloo_vector():
    close(rloo(torch.tensor([1., 0, 0, 0]), torch.zeros(4, dtype=torch.int64)), [1, -1 / 3, -1 / 3, -1 / 3], 1e-6)


@examples
@given(data=grouped_scores(), scale=st.sampled_from(["population", "sample", "none"]))
def test_grpo_equals_the_loop_for_unequal_and_scattered_groups(data, scale):
    scores, ids = data
    # A spread of less than a millionth is mostly the epsilon's; there the two may differ by rounding.
    close(grpo(scores, ids, scale), slow.grpo(scores.tolist(), ids.tolist(), scale), 1e-6)


@examples
@given(data=grouped_scores())
def test_rloo_equals_the_loop(data):
    scores, ids = data
    close(rloo(scores, ids), slow.rloo(scores.tolist(), ids.tolist()))


@examples
@given(data=grouped_scores(), seed=seeds)
def test_opo_equals_the_loop(data, seed):
    scores, ids = data
    lengths = torch.randint(1, 50, scores.shape, generator=torch.Generator().manual_seed(seed))
    close(opo(scores, ids, lengths), slow.opo(scores.tolist(), ids.tolist(), lengths.tolist()))


@examples
@given(data=grouped_scores(), constant=st.floats(-10, 10), factor=st.floats(0.5, 4))
def test_group_advantages_ignore_a_constant_and_grpo_a_factor(data, constant, factor):
    scores, ids = data
    lengths = torch.ones_like(ids)
    for estimate in (lambda s: grpo(s, ids, "none"), lambda s: rloo(s, ids), lambda s: opo(s, ids, lengths)):
        close(estimate(scores + constant), estimate(scores), 1e-9)
        close(estimate(scores * factor), factor * estimate(scores), 1e-9)
    close(grpo(scores * factor, ids), grpo(scores, ids), 1e-2)


@pytest.mark.parametrize("value", [0.1, 1e-9, 12345.678, -0.3])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_group_of_equal_scores_has_no_advantage_at_any_magnitude(value, size):
    scores, ids = torch.full((size,), value), torch.zeros(size, dtype=torch.int64)
    assert grpo(scores, ids).abs().max() < 1e-6
    assert rloo(scores, ids).abs().max() <= abs(value) * 1e-6


@examples
@given(data=grouped_scores(), seed=seeds)
def test_the_order_in_which_ranks_are_gathered_changes_no_advantage(data, seed):
    scores, ids = data
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    close(grpo(scores[order], ids[order])[order.argsort()], grpo(scores, ids), 1e-7)


def test_a_group_of_one_is_refused_with_its_id():
    for estimate in (grpo, rloo, group_centred, lambda s, i: opo(s, i, torch.ones(3))):
        with pytest.raises(ValueError, match=r"group 7 has 1 response\(s\)"):
            estimate(torch.tensor([1.0, 2, 3]), torch.tensor([4, 4, 7]))


def test_scores_without_an_id_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        grpo(torch.zeros(3), torch.tensor([1, 1]))


def test_remax_is_the_reward_to_come_minus_the_greedy_score():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = torch.tensor([[-.1, 1.0, float("nan")], [-.1, -.2, 0.0]])
    result = remax(rewards, torch.tensor([.5, 1.0]), mask)
    close(result, [[.4, .5, 0], [-1.3, -1.2, -1.0]], 1e-6)


def test_a_response_has_its_advantage_on_each_of_its_tokens():
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert over_tokens(torch.tensor([2.0, 3.0]), mask).tolist() == [[2, 0, 2], [0, 0, 3]]


@examples
@given(data=grouped_scores(min_size=1))
def test_groups_with_spread_are_those_with_two_different_scores(data):
    scores, ids = data
    expected = [len({scores[i].item() for i in slow.members(ids.tolist(), n)}) > 1 for n in range(len(ids))]
    assert groups_with_spread(scores, ids).tolist() == expected


def test_overlong_penalty_falls_linearly_over_the_buffer():
    lengths = torch.tensor([1, 12, 14, 16, 20, 25])
    close(overlong_penalty(lengths, 20, 8), [0, 0, -.25, -.5, -1, -1])
    with pytest.raises(ValueError, match="30"):
        overlong_penalty(lengths, 20, 30)
