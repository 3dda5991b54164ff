import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithms.finetuning import PairLogprobs, bradley_terry_loss, dpo_loss, ipo_loss, sft_loss
from engine.algorithms.losses import loss_denominator, token_weights
from tests.engine.algorithms import slow
from tests.engine.algorithms.inputs import close, examples, masks, noise, poison, scales, seeds

BETA, SMOOTHING, MARGIN, CENTERING = 0.3, 0.1, 0.7, 0.05
numbers_of_pairs = st.integers(1, 6)

# name: (columns, loss of [columns, N] scores, the loop)
PAIRWISE = {
    "bradley_terry": (
        2, lambda x, n: bradley_terry_loss(x[0], x[1], n), lambda pairs: slow.bradley_terry_loss(pairs, 0.0, 0.0)),
    "margin_and_centering": (
        2, lambda x, n: bradley_terry_loss(x[0], x[1], n, MARGIN, CENTERING),
        lambda pairs: slow.bradley_terry_loss(pairs, MARGIN, CENTERING)),
    "dpo": (4, lambda x, n: dpo_loss(PairLogprobs(*x), n, BETA), lambda pairs: slow.dpo_loss(pairs, BETA, 0.0)),
    "smoothed_dpo": (
        4, lambda x, n: dpo_loss(PairLogprobs(*x), n, BETA, SMOOTHING),
        lambda pairs: slow.dpo_loss(pairs, BETA, SMOOTHING)),
    "ipo": (4, lambda x, n: ipo_loss(PairLogprobs(*x), n, BETA), lambda pairs: slow.ipo_loss(pairs, BETA)),
}


def as_pairs(scores):
    return scores.T.tolist()


@examples
@given(mask=masks(), seed=seeds)
def test_the_sft_loss_is_the_mean_over_all_tokens_whatever_stands_in_masked_slots(mask, seed):
    logprobs = -noise(mask.shape, seed).abs()
    weights = token_weights(mask, "token", loss_denominator(mask, "token", 1))
    poisoned = poison(logprobs, mask).requires_grad_()
    loss, sums = sft_loss(poisoned, mask, weights)
    expected = slow.sft_loss(logprobs.tolist(), mask.tolist())
    close(loss, expected, 1e-6)
    close(sums["nll"], expected * int(mask.sum()))
    assert sums["tokens"] == mask.sum()
    loss.backward()
    # d(-mean)/d(logprob) is minus one over the number of tokens.
    close(poisoned.grad, torch.where(mask, -1 / mask.sum().clamp(min=1), 0), 1e-6)


@examples
@given(mask=masks(max_rows=6), seed=seeds, cut=st.integers(1, 4))
def test_any_split_has_the_sft_loss_of_the_whole(mask, seed, cut):
    """Means of microbatch means would weigh tokens of short rows more (TRL#7206)."""
    logprobs = -noise(mask.shape, seed).abs()
    denominator = sum(loss_denominator(part, "token", 1) for part in mask.split(cut))
    parts = [sft_loss(x, m, token_weights(m, "token", denominator))[0]
             for x, m in zip(logprobs.split(cut), mask.split(cut), strict=True)]
    close(sum(parts), slow.sft_loss(logprobs.tolist(), mask.tolist()), 1e-6)


@pytest.mark.parametrize("name", PAIRWISE)
@examples
@given(count=numbers_of_pairs, seed=seeds, scale=scales)
def test_losses_of_pairs_equal_the_loop(name, count, seed, scale):
    columns, loss_of, loop = PAIRWISE[name]
    scores = noise((columns, count), seed, scale)
    close(loss_of(scores, count)[0], loop(as_pairs(scores)))


@pytest.mark.parametrize("name", PAIRWISE)
@examples
@given(count=st.integers(1, 3), seed=seeds)
def test_gradients_of_pairs_equal_finite_differences(name, count, seed):
    columns, loss_of, loop = PAIRWISE[name]
    scores = noise((columns, count), seed).requires_grad_()
    loss_of(scores, count)[0].backward()
    step = 1e-6
    for place in torch.ones(columns, count).nonzero().tolist():
        moved = [scores.detach().clone() for _ in range(2)]
        for sign, copy in zip((1, -1), moved, strict=True):
            copy[tuple(place)] += sign * step
        difference = (loop(as_pairs(moved[0])) - loop(as_pairs(moved[1]))) / (2 * step)
        assert scores.grad[tuple(place)].item() == pytest.approx(difference, abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("name", PAIRWISE)
@examples
@given(count=numbers_of_pairs, seed=seeds, cut=st.integers(1, 3))
def test_any_split_of_pairs_has_the_loss_and_the_sums_of_the_whole(name, count, seed, cut):
    columns, loss_of, _ = PAIRWISE[name]
    scores = noise((columns, count), seed)
    whole, sums = loss_of(scores, count)
    parts = [loss_of(part, count) for part in scores.split(cut, dim=1)]
    close(sum(loss for loss, _ in parts), whole)
    for key, value in sums.items():
        close(sum(part[key] for _, part in parts), value)


@pytest.mark.parametrize("name", PAIRWISE)
def test_losses_stay_finite_for_huge_scores(name):
    columns, loss_of, _ = PAIRWISE[name]
    for sign in (1, -1):
        scores = torch.full((columns, 1), 1e4)
        scores[0] *= sign
        scores.requires_grad_()
        loss, _ = loss_of(scores, 1)
        loss.backward()
        assert loss.isfinite() and scores.grad.isfinite().all()


def test_vectors_by_hand():
    zero = torch.zeros(1)
    loss, sums = bradley_terry_loss(zero, zero, 1)
    assert loss.item() == pytest.approx(math.log(2))
    assert sums["correct"] == 0.5, "a tie is neither right nor wrong"
    # Lead 2 at odds of e^2: -log sigmoid(2).
    loss, sums = bradley_terry_loss(torch.tensor([1.5, -3.0]), torch.tensor([-0.5, -1.0]), 2)
    assert loss.item() == pytest.approx((math.log1p(math.exp(-2)) + math.log1p(math.exp(2))) / 2)
    assert sums["correct"] == 1 and sums["pairs"] == 2
    # The policy that is the reference has the loss log 2; IPO's minimum is a gap of 1 / (2 beta).
    same = PairLogprobs(*torch.tensor([[-3.0], [-4.0], [-3.0], [-4.0]]))
    assert dpo_loss(same, 1, BETA)[0].item() == pytest.approx(math.log(2))
    best = PairLogprobs(*torch.tensor([[1 / (2 * BETA)], [0.0], [0.0], [0.0]]))
    assert ipo_loss(best, 1, BETA)[0].item() == pytest.approx(0.0, abs=1e-9)


def test_an_equal_shift_of_both_scores_changes_the_bradley_terry_loss_only_through_centering():
    chosen, rejected = noise(4, 0), noise(4, 1)
    plain = bradley_terry_loss(chosen, rejected, 4)[0]
    close(bradley_terry_loss(chosen + 5, rejected + 5, 4)[0], plain)
    assert bradley_terry_loss(chosen + 5, rejected + 5, 4, 0.0, CENTERING)[0] > plain + 1


def test_pairs_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"chosen.*\(2,\).*rejected.*\(3,\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(3), 2)
    with pytest.raises(ValueError, match="vectors of one length"):
        PairLogprobs(*torch.zeros(4, 2, 2))
