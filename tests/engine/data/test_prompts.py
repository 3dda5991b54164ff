import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import DataError
from engine.prompts import SCHEMA, PromptCursor, PromptSet, epoch_order


def make_set(size: int, sha256: str = "set") -> PromptSet:
    rows = [{"id": str(i), "task": "t", "text": f"q{i}", "messages": None, "answer": "", "metadata": "{}",
             "token_ids": [i + 1] * (i % 3 + 1)} for i in range(size)]
    return PromptSet(pa.Table.from_pylist(rows, schema=SCHEMA), sha256)


def ids(prompts) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**40), st.lists(st.integers(1, 50), max_size=8))
def test_every_epoch_deals_every_prompt_once_whatever_the_batches(size, seed, counts):
    cursor = PromptCursor(make_set(size), seed)
    dealt = [i for count in counts for i in ids(cursor.take(count))]
    assert len(dealt) == sum(counts)
    for start in range(0, len(dealt), size):
        epoch = dealt[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert epoch == epoch_order(size, seed, start // size).tolist()[: len(epoch)]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 100), st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_a_run_killed_any_number_of_times_sees_the_same_prompts(size, seed, counts, data):
    prompts = make_set(size)
    undisturbed, killed = PromptCursor(prompts, seed), PromptCursor(prompts, seed)
    for count in counts:
        for _ in range(data.draw(st.integers(0, 2))):
            checkpoint = json.dumps(killed.state())
            killed.take(data.draw(st.integers(1, 50)))  # lost with the killed process
            killed = PromptCursor.restore(prompts, json.loads(checkpoint))
        assert ids(killed.take(count)) == ids(undisturbed.take(count))
    assert killed.state() == undisturbed.state()


def test_after_eight_batches_of_128_from_1000_the_second_epoch_is_at_24():
    cursor = PromptCursor(make_set(1000), seed=0)
    for _ in range(8):
        cursor.take(128)
    assert (cursor.state()["epoch"], cursor.state()["position"]) == (1, 24)


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_is_the_one_of_earlier_versions():
    # A change would make every resumed run see other prompts.
    assert epoch_order(8, 5, 2).tolist() == [4, 7, 6, 0, 1, 5, 2, 3]


def test_the_shuffle_is_uniform_enough():
    places = np.array([epoch_order(10, seed, 0) for seed in range(2000)])
    assert np.abs(places.mean(axis=0) - 4.5).max() < 0.3


def test_a_cursor_of_another_prompt_set_is_refused():
    state = PromptCursor(make_set(10, "one"), 0).state()
    with pytest.raises(DataError, match="one.*two"):
        PromptCursor.restore(make_set(10, "two"), state)


def test_a_set_knows_its_longest_prompt_and_its_end():
    prompts = make_set(5)
    assert prompts.max_prompt_tokens == 3 and prompts[4].token_ids == (5, 5) and len(list(prompts)) == 5
    with pytest.raises(IndexError):
        prompts[5]
