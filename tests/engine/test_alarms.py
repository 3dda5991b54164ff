"""What an iteration leaves to the next: controllers, and alarms, counted over the whole run; three in a row end it."""

import json
from types import SimpleNamespace

import pytest
import torch

from engine import train
from engine.algorithms.kl import adapt_coefficient
from engine.algorithms.lagrange import update_multiplier
from engine.errors import EXIT_NUMERICS, NumericsError
from engine.spec import GRPO, AdaptiveKL, LengthReward, SafeRLHF
from engine.train import PolicyLearner


class Clock:
    peak_bytes = {"update": 7}


def learner(rows, algorithm=None):
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
        SimpleNamespace(algorithm=algorithm or GRPO(samples_per_prompt=2), prompts_per_iteration=2),
        None, SimpleNamespace(roles=roles, models={}), Clock())
    made.dataflow = dataflow
    return made, events


def run(made, iterations):
    for iteration in range(iterations):
        made.iterate(iteration)


def resume(first, second, monkeypatch):
    """Give the second what a checkpoint keeps of the first."""
    monkeypatch.setattr(train.PromptCursor, "restore", lambda prompts, state: SimpleNamespace(
        take=lambda count: [], state=lambda: {}, prompts=None))
    second.restore(json.loads(json.dumps(first.state())))


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
    first, _ = learner([1, 1])
    run(first, 2)
    second, _ = learner([1])
    resume(first, second, monkeypatch)
    with pytest.raises(NumericsError, match="3 iterations in a row"):
        second.iterate(2)
    assert second.summary()["alarms/nan"] == 3.0


def controlled(roles, prompts, algorithm, state):
    """An iteration that moves both controllers, by numbers that depend on the iteration; what they were."""
    metrics = {"alarms/nan": 0.0, "kl": state.kl_coefficient, "multiplier": state.multiplier}
    state.kl_coefficient = adapt_coefficient(
        state.kl_coefficient, 3.1 * state.iterations, algorithm.kl.target, 64, algorithm.kl.horizon)
    state.recent_costs = [*state.recent_costs, state.iterations + 1.0][-algorithm.cost_window:]
    cost = sum(state.recent_costs) / len(state.recent_costs)
    state.multiplier = update_multiplier(state.multiplier, cost, algorithm.cost_limit, algorithm.multiplier_lr)
    state.iterations += 1
    return {}, metrics


def test_kl_controller_and_multiplier_go_on_where_they_were(monkeypatch):
    algorithm = SafeRLHF(costs=[LengthReward()], kl=AdaptiveKL(horizon=100), cost_window=3)
    made = [learner([], algorithm)[0] for _ in range(3)]
    for one in made:
        one.dataflow = controlled
    never_stopped, first, second = made
    expected = [never_stopped.iterate(iteration) for iteration in range(6)]
    found = [first.iterate(iteration) for iteration in range(3)]
    resume(first, second, monkeypatch)
    assert found + [second.iterate(iteration) for iteration in range(3, 6)] == expected
    assert second.state() == never_stopped.state()
    assert len({row["kl"] for row in expected}) == len({row["multiplier"] for row in expected}) == 6
