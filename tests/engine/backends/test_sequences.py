"""Sequences that hold several responses: every row once, no more tokens or attention than apart, a true tree."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.megatron.sequences import divide, microbatch
from engine.batch import Sample, make_batch, pack, total_lengths


def batch_of(groups):
    """groups: [(prompt length, [response lengths])]; every prompt has its own tokens."""
    samples = []
    for number, (prompt, responses) in enumerate(groups):
        for length in responses:
            first = 1000 * (len(samples) + 1)
            samples.append(Sample(len(samples), [number] * prompt, range(first, first + length), [0.0] * length, False))
    return make_batch(samples, 0)


GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=6)),
                  min_size=1, max_size=5)


@given(GROUPS, st.integers(1, 120))
def test_every_row_is_in_one_sequence_with_its_own_prompt_and_nothing_gets_dearer(groups, budget):
    batch = batch_of(groups)
    lengths, prompts = total_lengths(batch).tolist(), batch["input_ids"][:, 0].tolist()
    prompt_lengths = batch["prompt_lengths"].tolist()
    parts = divide(batch, budget)
    assert sorted(row for part in parts for sequence in part for row in sequence) == list(range(len(batch)))
    for part in parts:
        widths = []
        for sequence in part:
            assert len({prompts[row] for row in sequence}) == 1
            shared = prompt_lengths[sequence[0]]
            width = shared + sum(lengths[row] - shared for row in sequence)
            assert width**2 <= sum(lengths[row] ** 2 for row in sequence)
            widths.append(width)
        assert len(part) * max(widths) <= budget or part == [[part[0][0]]]
    longest = [max(lengths[row] for row in rows) for rows in pack(lengths, budget)]
    assert len(parts) <= len(longest)


def test_a_long_prompt_is_computed_once_and_a_short_one_is_not_shared():
    assert divide(batch_of([(60, [15] * 8)]), 4096) == [[list(range(8))]]
    assert divide(batch_of([(10, [100] * 4)]), 4096) == [[[0], [1], [2], [3]]]
    assert [len(part) for part in divide(batch_of([(60, [15] * 8)]), 100)] == [1] * 4, "no more than the budget"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
       st.integers(1, 120))
def test_a_preference_pair_is_one_sequence_in_its_order(pairs, budget):
    batch = batch_of([(prompt, [chosen, rejected]) for prompt, chosen, rejected in pairs])
    batch["pair_ids"] = torch.arange(len(batch)) // 2
    found = sorted(sequence for part in divide(batch, budget) for sequence in part)
    assert found == [[2 * n, 2 * n + 1] for n in range(len(pairs))]


@given(GROUPS, st.sampled_from([1, 4]))
def test_each_response_sees_its_prompt_and_itself_and_stands_where_it_would_alone(groups, multiple):
    batch = batch_of(groups)
    for sequences in divide(batch, 200):
        part = microbatch(batch, sequences, multiple, torch.device("cpu"))
        assert part.input_ids.shape[1] % multiple == 0
        for row in range(len(part.rows)):
            prompt, length = int(part.rows["prompt_lengths"][row]), int(part.rows["response_lengths"][row])
            sequence, start = int(part.rows["sequence_ids"][row]), int(part.rows["response_starts"][row])
            own = [*range(prompt), *range(start, start + length)]
            ids = part.rows["input_ids"][row, : prompt + length]
            assert part.input_ids[sequence, own].tolist() == ids.tolist()
            if part.tree is None:
                assert own == list(range(prompt + length))
                continue
            assert part.tree.positions[sequence, own].tolist() == list(range(prompt + length))
            for place, token in enumerate(own):
                assert part.tree.mask[sequence, 0, token].nonzero().flatten().tolist() == own[: place + 1]
        if part.tree is not None:
            assert part.tree.mask.any(-1).all(), "a token that sees nothing would be NaN"
