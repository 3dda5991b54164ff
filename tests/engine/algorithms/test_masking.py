import pytest
import torch
from hypothesis import given

from engine.algorithms.advantages import token_rewards
from engine.algorithms.masking import check_shapes, moment_sums, nonfinite_rows, row_means, whiten
from engine.batch import Sample, make_batch, response_mask
from tests.engine.algorithms import slow
from tests.engine.algorithms.inputs import close, examples, masks, noise, poison, scales, seeds


@examples
@given(mask=masks(), seed=seeds, scale=scales)
def test_whitening_equals_the_loop_whatever_stands_in_masked_slots(mask, seed, scale):
    values = noise(mask.shape, seed, scale) + 3
    result = whiten(poison(values, mask), mask, moment_sums(poison(values, mask), mask))
    # Where all values are equal up to rounding, both are 0 up to what the epsilon lets through.
    close(result, slow.whiten(values.tolist(), mask.tolist()), 1e-5)


@examples
@given(mask=masks(), seed=seeds)
def test_whitening_does_not_depend_on_how_rows_are_split_over_ranks(mask, seed):
    values = poison(noise(mask.shape, seed), mask)
    whole = whiten(values, mask, moment_sums(values, mask))
    moments = sum(moment_sums(v, m) for v, m in zip(values.split(1), mask.split(1), strict=True))
    parts = [whiten(v, m, moments) for v, m in zip(values.split(1), mask.split(1), strict=True)]
    close(torch.cat(parts), whole.double())


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_whitening_few_tokens_neither_raises_nor_makes_nan(tokens):
    """ROLL#475."""
    mask = torch.tensor([[r < tokens for r in range(3)], [False] * 3])
    values = torch.full((2, 3), float("nan")).masked_fill(mask, 2.5)
    result = whiten(values, mask, moment_sums(values, mask))
    assert result.eq(0).all()


@pytest.mark.parametrize("value", [1e-8, 0.1, 12345.678, -1e6])
def test_whitening_equal_values_gives_zero_at_any_magnitude(value):
    mask = torch.ones(3, 7, dtype=torch.bool)
    values = torch.full((3, 7), value, dtype=torch.float64)
    assert whiten(values, mask, moment_sums(values, mask)).abs().max() < 1e-4


@pytest.mark.parametrize("end", [0, 9])
def test_an_end_token_that_is_also_the_padding_token_counts_as_sampled(end):
    """TRL#6357: rows are padded with 0, and with 0 as the end token the mask and the reward's place are the same."""
    samples = [Sample(0, [end, 5], [7, end, end], [-1.0] * 3, False), Sample(1, [5], [end], [-1.0], False)]
    mask = response_mask(make_batch(samples, 0))
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert token_rewards(torch.tensor([2.0, 3.0]), mask).tolist() == [[0, 0, 2], [3, 0, 0]]


def test_a_row_without_tokens_has_mean_zero():
    mask = torch.tensor([[False, False], [True, False]])
    assert row_means(torch.tensor([[9.0, 9.0], [4.0, 9.0]]), mask).tolist() == [0, 4]


def test_nonfinite_rows_are_named_only_for_unmasked_slots():
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([[nan, 1], [1, nan], [-inf, 0], [0, 0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    assert nonfinite_rows(values, mask).tolist() == [True, False, True, False]


def test_mismatched_shapes_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"values has shape \(2, 3\), the mask has \(2, 4\)"):
        check_shapes(torch.ones(2, 4, dtype=torch.bool), values=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="torch.int64"):
        check_shapes(torch.ones(2, 4, dtype=torch.int64))
