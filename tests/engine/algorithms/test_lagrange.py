import math

import pytest
import torch

from engine.algorithms.lagrange import lagrangian_advantages, update_multiplier


def test_the_advantage_weighs_cost_with_the_multiplier_and_keeps_its_scale():
    reward, cost = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -2.0]])
    assert lagrangian_advantages(reward, cost, 0.0).tolist() == [[1, 2]]
    assert lagrangian_advantages(reward, cost, 1.0).tolist() == [[0, 2]]
    assert lagrangian_advantages(reward, cost, 3.0).tolist() == [[-.5, 2]]


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(2,\)"):
        lagrangian_advantages(torch.zeros(1, 2), torch.zeros(2), 1.0)


def test_each_unit_over_the_limit_multiplies_by_exp_lr_at_any_magnitude():
    for multiplier in (1e-3, 1.0, 100.0):
        assert update_multiplier(multiplier, 3.0, 2.0, .1) == pytest.approx(multiplier * math.exp(.1))
        assert update_multiplier(multiplier, 0.0, 2.0, .1) == pytest.approx(multiplier * math.exp(-.2))
        assert update_multiplier(multiplier, 2.0, 2.0, .1) == pytest.approx(multiplier)


def test_after_the_worst_costs_it_can_come_back():
    low = high = 1.0
    for _ in range(200):
        low, high = update_multiplier(low, -100.0, 0.0, 1.0), update_multiplier(high, 100.0, 0.0, 1.0)
    assert low == pytest.approx(1e-4) and high == pytest.approx(1e4)
    assert update_multiplier(low, 1.0, 0.0, 1.0) > low


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_not_finite_leaves_the_multiplier(cost):
    assert update_multiplier(1.5, cost, 0.0, .1) == 1.5
