import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.losses import (
    Sampled,
    cispo_loss,
    entropy_bonus,
    gspo_loss,
    loss_denominator,
    ppo_loss,
    reinforce_loss,
    token_weights,
    value_loss,
)
from tests.engine.algorithms import slow
from tests.engine.algorithms.inputs import close, examples, masks, noise, poison, seeds

LOW, HIGH, DUAL, MAX_TOKENS = 0.2, 0.28, 3.0, 7

LOSSES = {
    "clip": lambda logprobs, sampled: ppo_loss(logprobs, sampled, LOW, HIGH),
    "dual": lambda logprobs, sampled: ppo_loss(logprobs, sampled, LOW, HIGH, DUAL),
    "sequence_clip": lambda logprobs, sampled: gspo_loss(logprobs, sampled, LOW, HIGH),
    "weight_clip": lambda logprobs, sampled: cispo_loss(logprobs, sampled, LOW, HIGH),
    "reinforce": reinforce_loss,
}
aggregations = st.sampled_from(["token", "sequence", "constant"])


def draw_tokens(mask, seed, scale=0.5):
    """(logprobs, old_logprobs, advantages), ratios on both sides of the clip range."""
    old = -noise(mask.shape, seed).abs() - 0.1
    return old + noise(mask.shape, seed + 1, scale), old, noise(mask.shape, seed + 2, 2.0)


def weights_of(mask, aggregation):
    return token_weights(mask, aggregation, loss_denominator(mask, aggregation, MAX_TOKENS))


def slow_loss(kind, tokens, mask, weights):
    clip = (LOW, HIGH, DUAL if kind == "dual" else None)
    kind = "clip" if kind == "dual" else kind
    return slow.policy_loss(kind, [x.tolist() for x in tokens], mask.tolist(), weights.double().tolist(), clip)


@examples
@given(mask=masks(), aggregation=aggregations)
def test_weights_equal_the_loop(mask, aggregation):
    close(weights_of(mask, aggregation), slow.weights(mask.tolist(), aggregation, MAX_TOKENS), 1e-6)


@pytest.mark.parametrize("kind", LOSSES)
@examples
@given(mask=masks(), seed=seeds, aggregation=aggregations)
def test_policy_losses_equal_the_loop_whatever_stands_in_masked_slots(kind, mask, seed, aggregation):
    tokens, weights = draw_tokens(mask, seed), weights_of(mask, aggregation)
    logprobs, old, advantages = (poison(x, mask, i) for i, x in enumerate(tokens))
    loss, sums = LOSSES[kind](logprobs, Sampled(old, advantages, mask, weights))
    close(loss, slow_loss(kind, tokens, mask, weights), 1e-6)
    gaps = (tokens[0] - tokens[1])[mask].tolist()
    close(sums["kl_to_old"], sum(math.exp(gap) - 1 - gap for gap in gaps), 1e-9)
    assert sums["tokens"] == mask.sum()


@pytest.mark.parametrize("kind", LOSSES)
@examples
@given(mask=masks(max_rows=2, max_tokens=3), seed=seeds, aggregation=aggregations)
def test_gradients_equal_finite_differences_and_are_zero_in_masked_slots(kind, mask, seed, aggregation):
    """NaN in a masked slot leaves loss and gradient finite (OpenRLHF#1240)."""
    tokens, weights = draw_tokens(mask, seed), weights_of(mask, aggregation)
    sampled = Sampled(poison(tokens[1], mask), poison(tokens[2], mask), mask, weights)
    logprobs = poison(tokens[0], mask).requires_grad_()
    LOSSES[kind](logprobs, sampled)[0].backward()
    assert logprobs.grad[~mask].eq(0).all()
    step = 1e-6
    for b, r in mask.nonzero().tolist():
        difference = 0.0
        for sign in (1, -1):
            moved = tokens[0].clone()
            moved[b, r] += sign * step
            if kind == "weight_clip":
                # CISPO's weight is a constant: only the logprob moves.
                ratio = (tokens[0] - tokens[1]).exp().clamp(1 - LOW, 1 + HIGH)
                value = -(weights.double() * ratio * tokens[2] * moved)[mask].sum().item()
            else:
                value = slow_loss(kind, (moved, *tokens[1:]), mask, weights)
            difference += sign * value / (2 * step)
        assert logprobs.grad[b, r].item() == pytest.approx(difference, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("kind", LOSSES)
@examples
@given(mask=masks(max_rows=5), seed=seeds, aggregation=aggregations, cut=st.integers(1, 4))
def test_any_split_into_microbatches_has_the_loss_and_gradient_of_the_whole(kind, mask, seed, aggregation, cut):
    """verl#3332, TRL#3021, and rows of padding (rllm#508)."""
    tokens = draw_tokens(mask, seed)
    denominator = sum(loss_denominator(part, aggregation, MAX_TOKENS) for part in mask.split(cut))

    def run(parts):
        logprobs = tokens[0].float().requires_grad_()
        total = 0.0
        for rows in parts:
            weights = token_weights(mask[rows], aggregation, denominator)
            sampled = Sampled(tokens[1][rows].float(), tokens[2][rows].float(), mask[rows], weights)
            loss, _ = LOSSES[kind](logprobs[rows], sampled)
            loss.backward()
            total += loss.item()
        return total, logprobs.grad

    rows = torch.arange(len(mask))
    whole, gradient = run([rows])
    split, split_gradient = run(rows.split(cut))
    assert split == pytest.approx(whole, abs=1e-6, rel=1e-6)
    close(split_gradient, gradient.double(), 1e-6)
    # Rows without a token, in a microbatch of their own, change nothing.
    empty = torch.zeros_like(mask)
    assert loss_denominator(torch.cat([mask, empty]), aggregation, MAX_TOKENS) == denominator


def test_the_mean_over_microbatches_is_over_tokens_not_over_means():
    """TRL#7206, #7249: 100 tokens at loss 2.0 and 900 at 0.5 is .65, not 1.25."""
    parts = [(torch.ones(10, 10, dtype=torch.bool), 2.0), (torch.ones(90, 10, dtype=torch.bool), 0.5)]
    denominator = sum(loss_denominator(mask, "token", 10) for mask, _ in parts)
    total = sum((token_weights(mask, "token", denominator) * level).sum() for mask, level in parts)
    assert total.item() == pytest.approx(.65, abs=1e-6)


def test_each_aggregation_is_the_documented_one():
    """TRL#5375: lengths 2 and 8, token losses 1 and 2; the limit is 16."""
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    losses = torch.tensor([[1.0], [2.0]]).expand(2, 8)
    expected = {"token": (2 * 1 + 8 * 2) / 10, "sequence": (1 + 2) / 2, "constant": (2 * 1 + 8 * 2) / (2 * 16)}
    for aggregation, value in expected.items():
        weights = token_weights(mask, aggregation, loss_denominator(mask, aggregation, 16))
        assert (weights * losses).sum().item() == pytest.approx(value, rel=1e-6)


def test_dual_clip_vector():
    """c 3, eps .2, advantages [1, -1, -4], ratios [.5, 1, 10]: losses [-.5, 1, 12] (NeMo-RL)."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    for slot, expected in enumerate((-.5, 1.0, 12.0)):
        weights = torch.nn.functional.one_hot(torch.tensor([slot]), 3).float()
        sampled = Sampled(torch.zeros(1, 3), torch.tensor([[1.0, -1, -4]]), mask, weights)
        loss, sums = ppo_loss(torch.tensor([[.5, 1, 10]]).log(), sampled, .2, .2, 3.0)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        assert sums["clipped_tokens"] == 1


def test_clip_higher_lets_a_good_token_grow_further_and_counts_what_it_clips():
    mask = torch.ones(1, 4, dtype=torch.bool)
    logprobs = torch.tensor([[1.25, 1.35, .85, .75]]).log().requires_grad_()
    sampled = Sampled(torch.zeros(1, 4), torch.tensor([[1.0, 1, -1, -1]]), mask, torch.full((1, 4), .25))
    loss, sums = ppo_loss(logprobs, sampled, .2, .28)
    loss.backward()
    assert logprobs.grad[0].ne(0).tolist() == [True, False, True, False]
    assert sums["clipped_tokens"] == 2


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    mask = torch.ones(1, 1, dtype=torch.bool)
    logprobs = torch.tensor([[math.log(9.0)]], requires_grad=True)
    sampled = Sampled(torch.zeros(1, 1), torch.ones(1, 1), mask, torch.ones(1, 1))
    loss, sums = cispo_loss(logprobs, sampled, 1.0, 4.0)
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(-5.0)
    assert sums["clipped_tokens"] == 1


def test_the_ratio_of_a_gspo_sequence_is_the_geometric_mean():
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[math.log(4.0), math.log(.25), 50.0]], requires_grad=True)
    loss, sums = gspo_loss(logprobs, Sampled(torch.zeros(1, 3), torch.ones(1, 3), mask, mask / 2), 3e-4, 4e-4)
    assert loss.item() == pytest.approx(-1.0)
    assert sums["clipped_tokens"] == 0


@pytest.mark.parametrize("kind", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(kind):
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    old, advantages = noise(mask.shape, 1).float(), noise(mask.shape, 2).float()
    advantages = advantages[:, :1].expand_as(mask)
    logprobs = old.clone().requires_grad_()
    weights = weights_of(mask, "sequence")
    LOSSES[kind](logprobs, Sampled(old, advantages, mask, weights))[0].backward()
    close(logprobs.grad, (-weights * advantages).double(), 1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_extreme_ratios_stay_finite(kind):
    mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs = torch.tensor([[-1e4, -1e-4]], requires_grad=True)
    sampled = Sampled(torch.tensor([[-1e-4, -1e4]]), torch.tensor([[1.0, -1.0]]), mask, torch.full((1, 2), .5))
    loss, sums = LOSSES[kind](logprobs, sampled)
    loss.backward()
    assert loss.isfinite() and logprobs.grad.isfinite().all() and all(x.isfinite() for x in sums.values())


@pytest.mark.parametrize("kind", LOSSES)
def test_a_nan_in_a_trained_slot_is_not_hidden(kind):
    """An alarm must see it (verl#747)."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    sampled = Sampled(torch.zeros(1, 2), torch.ones(1, 2), mask, torch.full((1, 2), .5))
    assert LOSSES[kind](torch.tensor([[float("nan"), -1.0]]), sampled)[0].isnan()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_batch_without_tokens_has_loss_zero(kind, aggregation):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    nan = torch.full((2, 3), float("nan"))
    logprobs = nan.clone().requires_grad_()
    loss, _ = LOSSES[kind](logprobs, Sampled(nan, nan, mask, weights_of(mask, aggregation)))
    loss.backward()
    assert loss == 0 and logprobs.grad.eq(0).all()


def test_tokens_of_other_shapes_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 1\)"):
        Sampled(torch.zeros(2, 3), torch.zeros(2, 1), mask, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"logprobs has shape \(2, 4\)"):
        reinforce_loss(torch.zeros(2, 4), Sampled(*[torch.zeros(2, 3)] * 2, mask, torch.zeros(2, 3)))


@examples
@given(mask=masks(), seed=seeds, clip=st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_equals_the_loop_and_its_gradient_is_zero_in_masked_slots(mask, seed, clip):
    values, old, returns = (noise(mask.shape, seed + i) for i in range(3))
    weights = weights_of(mask, "token")
    trained = poison(values, mask).requires_grad_()
    loss, sums = value_loss(trained, poison(old, mask), poison(returns, mask), weights, clip)
    loss.backward()
    close(loss, slow.value_loss(values.tolist(), old.tolist(), returns.tolist(), mask.tolist(), clip), 1e-6)
    assert trained.grad.isfinite().all() and trained.grad[~mask].eq(0).all()
    close(sums["errors"], (returns - old)[mask].sum())
    close(sums["returns_squared"], returns[mask].square().sum())


def test_a_clipped_value_has_no_gradient():
    values = torch.tensor([[1.5, 0.1]], requires_grad=True)
    loss, sums = value_loss(values, torch.zeros(1, 2), torch.tensor([[1.4, 1.0]]), torch.full((1, 2), .5), .2)
    loss.backward()
    assert values.grad[0, 0] == 0 and values.grad[0, 1] != 0
    assert sums["clipped_tokens"] == 1


@examples
@given(mask=masks(), seed=seeds)
def test_entropy_bonus_is_the_weighted_mean_whatever_stands_in_masked_slots(mask, seed):
    entropies = noise(mask.shape, seed).abs()
    trained = poison(entropies, mask).requires_grad_()
    bonus, sums = entropy_bonus(trained, mask, weights_of(mask, "token"))
    bonus.backward()
    close(bonus, entropies[mask].mean() if mask.any() else 0.0, 1e-6)
    close(sums["entropy"], entropies[mask].sum())
    assert trained.grad[~mask].eq(0).all()
