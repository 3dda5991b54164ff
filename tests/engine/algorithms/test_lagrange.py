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


def test_one_step_is_gradient_ascent_on_the_logarithm():
    """By finite differences of exp(x) * (cost - limit) at x = log multiplier."""
    multiplier, cost, limit, lr, step = 1.7, 2.5, 2.0, 0.3, 1e-6
    x = math.log(multiplier)
    slope = (math.exp(x + step) - math.exp(x - step)) / (2 * step) * (cost - limit)
    assert update_multiplier(multiplier, cost, limit, lr) == pytest.approx(math.exp(x + lr * slope))


def test_the_multiplier_rises_over_the_limit_falls_under_it_and_stays_positive_and_finite():
    assert update_multiplier(1.0, 3.0, 2.0, .1) > 1 > update_multiplier(1.0, 1.0, 2.0, .1) > 0
    assert update_multiplier(1.0, 2.0, 2.0, .1) == 1.0
    low = high = 1.0
    for _ in range(200):
        low, high = update_multiplier(low, -100.0, 0.0, 1.0), update_multiplier(high, 100.0, 0.0, 1.0)
    assert low > 0 and high <= 1e4 * (1 + 1e-9)


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_not_finite_leaves_the_multiplier(cost):
    assert update_multiplier(1.5, cost, 0.0, .1) == 1.5
