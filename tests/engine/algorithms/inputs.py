"""Hypothesis strategies: token tensors with garbage in every masked slot, and groups in any arrangement."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

examples = settings(max_examples=60, deadline=None)
"""No deadline: these machines are shared."""

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)


@st.composite
def masks(draw, max_rows=4, max_tokens=6):
    """[B, R] bool: empty rows, one token, holes, all."""
    rows, tokens = draw(st.integers(1, max_rows)), draw(st.integers(1, max_tokens))
    row = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


def noise(shape, seed, scale=1.0):
    """float64 normal numbers."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def poison(values, mask, seed=0):
    """The values with NaN, infinities and huge numbers in masked slots."""
    garbage = torch.tensor(GARBAGE, dtype=values.dtype)
    picks = torch.randint(len(GARBAGE), mask.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, values, garbage[picks])


seeds = st.integers(0, 2**31 - 1)
scales = st.sampled_from([1e-3, 1.0, 30.0])


@st.composite
def grouped_scores(draw, min_size=2):
    """(scores [N] float64, group ids [N]): groups of unequal sizes, rows of a group scattered."""
    sizes = draw(st.lists(st.integers(min_size, 5), min_size=1, max_size=4))
    ids = [17 * g + 3 for g, size in enumerate(sizes) for _ in range(size)]
    ids = draw(st.permutations(ids))
    value = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -5.0]), st.floats(-100, 100).map(lambda x: round(x, 3)))
    scores = draw(st.lists(value, min_size=len(ids), max_size=len(ids)))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(ids)


def close(actual, expected, tolerance=1e-9):
    """Assert equality within a tolerance relative to the magnitude."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
