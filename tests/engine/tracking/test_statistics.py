"""engine.statistics against scipy, closed forms and its own meaning."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.spec import PromptScores
from engine.statistics import (
    PairedTest,
    detectable_difference,
    holm,
    mean_interval,
    paired_tests,
    prompt_scores,
    sign_test,
    student_cdf,
    student_quantile,
    summarise,
)


@pytest.mark.parametrize("dof", [1, 2, 5, 30, 1000, 100_000])
def test_students_t_agrees_with_scipy(dof):
    for probability in (0.6, 0.95, 0.975, 0.999):
        assert student_quantile(probability, dof) == pytest.approx(stats.t.ppf(probability, dof), rel=1e-6)
    for value in (-30.0, -2.0, -0.1, 0.0, 0.7, 4.0):
        assert student_cdf(value, dof) == pytest.approx(stats.t.cdf(value, dof), abs=1e-9)


def test_mean_interval_is_scipys_t_interval():
    values = np.random.default_rng(0).normal(3, 2, 25)
    expected = stats.t.interval(0.95, 24, loc=values.mean(), scale=stats.sem(values))
    interval = mean_interval(values)
    assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-9)
    assert interval.mean == pytest.approx(values.mean())


def test_a_cluster_counts_as_one_however_often_its_prompt_is_repeated():
    values = np.random.default_rng(1).normal(0, 1, 20)
    once = mean_interval(values)
    repeated = mean_interval(np.repeat(values, 7), clusters=[str(i) for i in np.repeat(np.arange(20), 7)])
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high))


def test_the_interval_of_clustered_values_covers_the_mean_as_stated():
    rng = np.random.default_rng(2)
    labels = [str(i // 5) for i in range(200)]
    covered = 0
    for _ in range(400):
        values = np.repeat(rng.normal(0, 1, 40), 5) + rng.normal(0, 0.5, 200)
        interval = mean_interval(values, clusters=labels)
        covered += interval.low <= 0 <= interval.high
    assert stats.binom.cdf(covered, 400, 0.95) > 0.001  # naive intervals cover about 66 %


def test_one_value_has_a_mean_and_no_interval():
    interval = mean_interval([0.5])
    assert interval.mean == 0.5 and math.isnan(interval.low) and math.isnan(interval.high)
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])


@given(wins=st.integers(0, 300), losses=st.integers(0, 300))
@settings(max_examples=60)
def test_sign_test_is_scipys_exact_binomial_test(wins, losses):
    expected = stats.binomtest(wins, wins + losses, alternative="greater").pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_rule_rejects(p_values):
    alpha, rejected = 0.05, set()
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] * (len(p_values) - rank) > alpha:
            break
        rejected.add(int(index))
    assert {i for i, p in enumerate(holm(p_values)) if p <= alpha} == rejected


def test_the_bootstrap_agrees_with_the_t_test_where_that_is_right():
    differences = np.random.default_rng(3).normal(0.2, 1, (100, 1))
    for margin in (0.0, 0.1, 0.3):
        result = paired_tests(differences, [margin], PairedTest(resamples=40_000))[0]
        expected = stats.ttest_1samp(differences[:, 0], margin, alternative="greater").pvalue
        assert result.p_bootstrap == pytest.approx(expected, rel=0.1, abs=0.003)
    t_bound = differences.mean() - stats.t.ppf(0.95, 99) * stats.sem(differences[:, 0])
    assert result.low == pytest.approx(t_bound, abs=0.01)


@given(shift=st.floats(-0.5, 0.5), scale=st.floats(0.1, 10))
@settings(max_examples=20, deadline=None)
def test_the_bound_and_the_p_value_say_the_same(shift, scale):
    differences = (np.random.default_rng(4).normal(0, 1, (60, 1)) + shift) * scale
    result = paired_tests(differences, [0.0], PairedTest(resamples=4000))[0]
    if abs(result.low) > 0.02 * scale:  # nearer, resampling noise decides
        assert (result.low > 0) == (result.p_bootstrap < 0.05)


def test_equal_evidence_gives_equal_results_and_another_seed_another_bootstrap():
    differences = np.random.default_rng(5).normal(0.1, 1, (80, 1))
    first = paired_tests(differences, [0.0], PairedTest(resamples=1000, seed=1))
    assert first == paired_tests(differences, [0.0], PairedTest(resamples=1000, seed=1))
    assert first != paired_tests(differences, [0.0], PairedTest(resamples=1000, seed=2))


def test_testing_side_by_side_is_testing_one_by_one():
    differences = np.random.default_rng(6).integers(-1, 2, (70, 3)).astype(float)
    clusters = [str(i // 2) for i in range(70)]
    test = PairedTest(resamples=2000)
    together = paired_tests(differences, [0.0, 0.05, 0.1], test, clusters)
    apart = [paired_tests(differences[:, k : k + 1], [m], test, clusters)[0] for k, m in enumerate((0.0, 0.05, 0.1))]
    assert together == apart


def test_rounding_noise_is_a_tie():
    differences = np.array([[0.1 + 0.2 - 0.3]] * 40 + [[1.0]])
    result = paired_tests(differences, [0.0], PairedTest(resamples=1000))[0]
    assert (result.wins, result.losses) == (1, 0)


def test_a_difference_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="2 paired differences are not finite"):
        paired_tests(np.array([[1.0], [math.nan], [math.inf]]), [0.0], PairedTest())
    with pytest.raises(ValueError, match="at least 2"):
        paired_tests(np.ones((3, 1)), [0.0], PairedTest(), clusters=["a", "a", "a"])


def _normal_world(rng, rise, num_prompts, repeats):
    return rng.normal(rise, 1, (num_prompts, repeats))


def _binary_world(rng, rise, num_prompts, repeats):
    changed = rng.random((num_prompts, repeats)) < 0.3
    return np.where(changed, np.where(rng.random((num_prompts, repeats)) < 0.5 + rise / 0.6, 1.0, -1.0), 0.0)


def _sampled_world(rng, rise, num_prompts, repeats):
    chance = rng.beta(2, 2, (num_prompts, 1))
    new = np.clip(chance + rise, 0, 1)
    shape = (num_prompts, repeats)
    return (rng.binomial(8, new, shape) - rng.binomial(8, chance, shape)) / 8


@pytest.mark.parametrize("world", [_normal_world, _binary_world, _sampled_world])
def test_a_rise_of_the_detectable_size_is_detected_as_often_as_stated(world):
    rng = np.random.default_rng(7)
    stated = np.median([detectable_difference(world(rng, 0.0, 150, 1)[:, 0], margin=0, alpha=0.05, power=0.8)
                        for _ in range(15)])
    results = paired_tests(world(rng, stated, 150, 2000), [0.0] * 2000, PairedTest(resamples=1000))
    detected = np.mean([r.p_value <= 0.05 for r in results])
    assert 0.74 < detected < 0.90


def test_the_detectable_difference_grows_with_the_margin_and_falls_with_more_prompts():
    differences = _normal_world(np.random.default_rng(8), 0.0, 400, 1)[:, 0]
    small = detectable_difference(differences, margin=0, alpha=0.05, power=0.8)
    assert detectable_difference(differences, margin=0.1, alpha=0.05, power=0.8) > small
    assert detectable_difference(differences[:100], margin=0, alpha=0.05, power=0.8) > 1.5 * small
    assert detectable_difference(differences, margin=0, alpha=0.05, power=0.95) > small
    assert detectable_difference(differences * 100, margin=0, alpha=0.05, power=0.8) == pytest.approx(100 * small)


def test_a_set_on_which_nothing_changes_detects_nothing():
    assert detectable_difference(np.zeros(100), margin=0, alpha=0.05, power=0.8) == math.inf
    assert detectable_difference(np.eye(100)[0], margin=0, alpha=0.05, power=0.8) == math.inf


def _prompt(name, greedy, sampled, task="sum"):
    return PromptScores(id=name, task=task, greedy=greedy, sampled=sampled, lengths=[4, 6, 8], format_errors=1)


def test_a_summary_worked_by_hand():
    prompts = [_prompt("a", 1.0, [1.0, 0.0]), _prompt("b", 0.2, [0.2, 0.4]), _prompt("c", 1.0, [1.0, 1.0], "product")]
    metrics = summarise(prompts, pass_threshold=1.0)
    assert metrics["mean_reward"] == pytest.approx((0.5 + 0.3 + 1.0) / 3)
    assert metrics["pass_at_1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert metrics["greedy_reward"] == pytest.approx(2.2 / 3)
    assert metrics["greedy_pass"] == pytest.approx(2 / 3)
    assert metrics["task/product/mean_reward"] == 1.0
    assert metrics["response_tokens"] == 6.0
    assert metrics["format_error_share"] == pytest.approx(3 / 9)
    assert metrics["num_prompts"] == 3
    assert metrics["mean_reward_low"] < metrics["mean_reward"] < metrics["mean_reward_high"]


def test_without_samples_the_sampled_scores_are_absent_and_asking_for_one_is_an_error():
    prompts = [_prompt("a", 1.0, []), _prompt("b", 0.0, [])]
    assert "mean_reward" not in summarise(prompts, 1.0) and "greedy_pass" in summarise(prompts, 1.0)
    with pytest.raises(ValueError, match="prompt a has no sampled responses"):
        prompt_scores(prompts, "pass_at_1", 1.0)


def test_nan_survives_the_summary_and_the_file():
    prompts = [_prompt("a", math.nan, [math.nan]), _prompt("b", 0.0, [1.0])]
    again = [PromptScores.model_validate_json(p.model_dump_json()) for p in prompts]
    for score in ("mean_reward", "pass_at_1", "greedy_reward", "greedy_pass"):
        assert math.isnan(summarise(again, 1.0)[score])
