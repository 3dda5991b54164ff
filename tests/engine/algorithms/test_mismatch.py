import math

import pytest
import torch
from hypothesis import given

from engine.algorithms.mismatch import (
    accepted_rows,
    importance_ratio,
    masked_weights,
    mismatch_metrics,
    mismatch_sums,
    truncated_weights,
)
from tests.engine.algorithms.inputs import close, examples, masks, noise, poison, seeds
from tests.engine.algorithms.slow import steps


def pair(mask, seed, scale=0.5):
    rollout = -noise(mask.shape, seed).abs()
    return rollout + noise(mask.shape, seed + 1, scale), rollout


@examples
@given(mask=masks(), seed=seeds)
def test_weights_equal_the_loop_whatever_stands_in_masked_slots(mask, seed):
    old, rollout = pair(mask, seed)
    clean = (poison(old, mask), poison(rollout, mask, 1))
    token, sequence = (importance_ratio(*clean, mask, level) for level in ("token", "sequence"))
    for b, row in enumerate(mask.tolist()):
        product = math.prod(math.exp(old[b, r] - rollout[b, r]) for r in steps(row))
        for r in steps(row):
            ratio = math.exp(old[b, r] - rollout[b, r])
            assert token[b, r].item() == pytest.approx(ratio)
            assert sequence[b, r].item() == pytest.approx(product)
            assert truncated_weights(token, 1.5)[b, r].item() == pytest.approx(min(ratio, 1.5))
            assert masked_weights(token, .5, 1.5)[b, r].item() == pytest.approx(ratio if .5 <= ratio <= 1.5 else 0)
    assert token[~mask].eq(1).all() and sequence[~mask].eq(1).all()


@examples
@given(mask=masks(), seed=seeds)
def test_rows_are_accepted_by_their_geometric_mean_ratio(mask, seed):
    old, rollout = pair(mask, seed)
    accepted = accepted_rows(poison(old, mask), poison(rollout, mask), mask, .9, 1.1)
    for b, row in enumerate(mask.tolist()):
        gap = math.fsum((old[b, r] - rollout[b, r]).item() for r in steps(row))
        assert accepted[b].item() == (.9 <= math.exp(gap / max(len(steps(row)), 1)) <= 1.1)


def test_importance_weights_make_the_mean_under_the_sampler_that_of_the_trainer():
    """Enumeration over four words: without truncation there is no bias, and truncation's is one-sided."""
    old, rollout = noise(4, 1).log_softmax(0), noise(4, 2).log_softmax(0)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    ratio = importance_ratio(old[None], rollout[None], torch.ones(1, 4, dtype=torch.bool), "token")
    close((rollout.exp() * ratio[0] * values).sum(), (old.exp() * values).sum())
    truncated = truncated_weights(ratio, 1.0)[0]
    assert (rollout.exp() * truncated * values).sum() < (old.exp() * values).sum()


@examples
@given(mask=masks(), seed=seeds)
def test_diagnostics_add_up_over_ranks(mask, seed):
    old, rollout = (poison(x, mask) for x in pair(mask, seed))
    whole = mismatch_metrics(mismatch_sums(old, rollout, mask))
    parts = sum(mismatch_sums(*rows) for rows in zip(old.split(1), rollout.split(1), mask.split(1), strict=True))
    assert mismatch_metrics(parts) == pytest.approx(whole)
    if mask.any():
        gap = (old - rollout)[mask]
        assert whole["logprob_gap"] == pytest.approx(gap.abs().mean().item())
        assert whole["mismatch_k1"] == pytest.approx(-gap.mean().item())
        assert whole["mismatch_k3"] == pytest.approx((gap.exp() - 1 - gap).mean().item())
        assert 0 < whole["mismatch_ess"] <= 1 + 1e-9


def test_equal_logprobs_are_no_mismatch():
    mask, same = torch.ones(2, 3, dtype=torch.bool), noise((2, 3), 1)
    assert mismatch_metrics(mismatch_sums(same, same, mask)) == pytest.approx(
        {"logprob_gap": 0, "mismatch_k1": 0, "mismatch_k3": 0, "mismatch_ess": 1})
    assert importance_ratio(same, same, mask, "sequence").eq(1).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_gaps_stay_finite(level):
    mask = torch.ones(1, 3, dtype=torch.bool)
    ratio = importance_ratio(torch.full((1, 3), -1e-3), torch.full((1, 3), -1e3), mask, level)
    assert ratio.isfinite().all()
    assert truncated_weights(ratio, 2.0).eq(2).all()
    assert masked_weights(ratio, .5, 2).eq(0).all()
