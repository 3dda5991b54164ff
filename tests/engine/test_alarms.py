"""Iterations whose numbers are not finite: counted over the whole run, which ends after three of them in a row."""

from types import SimpleNamespace

import pytest
import torch

from engine import train
from engine.errors import EXIT_NUMERICS, NumericsError
from engine.spec import GRPO
from engine.train import PolicyLearner


class Clock:
    peak_bytes = {"update": 7}


def learner(rows):
    """One whose iterations have so many rows with NaN; the events that it reports."""
    events, left = [], iter(rows)

    def dataflow(*_):
        count = next(left)
        nonfinite = torch.arange(4) < count
        return {"sample_ids": torch.arange(4), "nonfinite": nonfinite}, {"alarms/nan": float(count)}

    roles = SimpleNamespace(rollout=SimpleNamespace(), cursor=SimpleNamespace(
        take=lambda count: [], state=lambda: {}, prompts=None))
    made = PolicyLearner(
        SimpleNamespace(event=lambda name, **fields: events.append((name, fields))),
        SimpleNamespace(algorithm=GRPO(samples_per_prompt=2), prompts_per_iteration=2),
        None, SimpleNamespace(roles=roles, models={}), Clock())
    made.dataflow = dataflow
    return made, events


def run(made, iterations):
    for iteration in range(iterations):
        made.iterate(iteration)


def test_a_result_counts_the_alarms_of_all_iterations_not_of_the_last():
    made, events = learner([0, 2, 1, 0])
    run(made, 4)
    assert made.summary() == {"alarms/nan": 3.0, "memory/update_bytes": 7.0}
    assert [(name, fields["iteration"], fields["samples"]) for name, fields in events] == [
        ("alarm", 2, [0, 1]), ("alarm", 3, [0])]


def test_three_iterations_in_a_row_end_the_run_and_two_do_not():
    made, _ = learner([1, 1, 0, 1, 1, 1])
    run(made, 5)
    with pytest.raises(NumericsError, match="3 iterations in a row") as ended:
        made.iterate(5)
    assert ended.value.exit_code == EXIT_NUMERICS


def test_both_counts_go_on_after_a_resume_and_in_the_next_stage(monkeypatch):
    monkeypatch.setattr(train.PromptCursor, "restore", lambda prompts, state: SimpleNamespace(take=lambda count: []))
    first, _ = learner([1, 1])
    run(first, 2)
    second, _ = learner([1])
    second.restore(first.state())
    with pytest.raises(NumericsError, match="3 iterations in a row"):
        second.iterate(2)
    assert second.summary()["alarms/nan"] == 3.0
