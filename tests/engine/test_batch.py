from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import pack


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 120), st.sampled_from([1, 2]))
def test_packing_keeps_every_row_once_neighbours_together_and_the_budget(lengths, budget, together):
    lengths = lengths[: len(lengths) // together * together]
    microbatches = pack(lengths, budget, together)
    assert sorted(row for part in microbatches for row in part) == list(range(len(lengths)))
    for part in microbatches:
        for unit in range(0, len(part), together):
            first = part[unit]
            assert first % together == 0 and part[unit : unit + together] == list(range(first, first + together))
        # A unit over the budget is alone.
        assert len(part) * max(lengths[row] for row in part) <= budget or len(part) == together
