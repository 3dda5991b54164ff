"""Each dataflow on a policy small enough that its expected reward is exact: an enumeration over all responses."""

import pytest

from engine.dataflows import initial_state, iteration_for
from engine.spec.algorithm import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    OPO,
    PPO,
    RLOO,
    AdaptiveKL,
    DynamicSampling,
    FixedKL,
    MaskedImportance,
    ReinforcePP,
    Rejection,
    ReMax,
    SafeRLHF,
    TruncatedImportance,
    TruncationFilter,
    TruncationPenalty,
)
from engine.spec.reward import LengthReward
from tests.engine.dataflows.tiny_roles import END, LIMIT, make_roles, mean_over

PROMPTS = list(range(6))
GROUP = {"samples_per_prompt": 6}
ALGORITHMS = {
    "ppo": PPO(samples_per_prompt=6),
    "ppo_adaptive_kl": PPO(samples_per_prompt=6, kl=AdaptiveKL(initial_coefficient=.01, target=8)),
    "grpo": GRPO(**GROUP),
    "grpo_kl_loss": GRPO(**GROUP, kl=FixedKL(coefficient=.01, place="loss", estimator="k3")),
    "grpo_full_kl_loss": GRPO(**GROUP, kl=FixedKL(coefficient=.01, place="loss", estimator="full")),
    "ppo_full_kl": PPO(samples_per_prompt=6, kl=FixedKL(coefficient=.01, estimator="full")),
    "dr_grpo": GRPO(**GROUP, scale_by_std=False, aggregation="constant"),
    "dapo": DAPO(**GROUP, dynamic_sampling=DynamicSampling(max_rounds=2)),
    "gspo": GSPO(**GROUP), "cispo": CISPO(**GROUP), "rloo": RLOO(**GROUP), "opo": OPO(**GROUP),
    "reinforce_pp": ReinforcePP(samples_per_prompt=6),
    "reinforce_pp_baseline": ReinforcePP(samples_per_prompt=6, group_baseline=True),
    "remax": ReMax(samples_per_prompt=6, loss="reinforce"),
    "truncated": GRPO(**GROUP, mismatch=TruncatedImportance()),
    "masked": GRPO(**GROUP, mismatch=MaskedImportance(level="sequence")),
    "rejected": GRPO(**GROUP, mismatch=Rejection(low=.9, high=1.1)),
    "filter": GRPO(**GROUP, overlong=TruncationFilter()),
}


def wanted_word(prompt, words):
    """Share of slots that hold the prompt's own word (1, 2 or 3 times it fits)."""
    return sum(word == prompt % 3 for word in words) / LIMIT


def unfinished(prompt, words):
    """1 when the limit cut the response off."""
    return float(words[-1] != END)


def train(algorithm, roles, iterations):
    state, iterate = initial_state(algorithm), iteration_for(algorithm)
    return [iterate(roles, PROMPTS, algorithm, state)[1] for _ in range(iterations)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_expected_reward_rises_from_its_start_by_a_third_in_twelve_iterations(name):
    """Chance is near .2; the filter, which never trains on the full length, is held to less."""
    algorithm = ALGORITHMS[name]
    roles = make_roles(algorithm, wanted_word, gap=0.05 if algorithm.mismatch else 0.0)
    before = mean_over(roles.actor.model, wanted_word, PROMPTS)
    metrics = train(algorithm, roles, 12)
    after = mean_over(roles.actor.model, wanted_word, PROMPTS)
    assert after - before > (.1 if name == "filter" else .33)
    assert all(m["alarms/nan"] == 0 for m in metrics)


@pytest.mark.parametrize(("place", "estimator"), [("reward", "k1"), ("loss", "k3"), ("loss", "full")])
def test_a_strong_kl_keeps_the_policy_near_its_reference(place, estimator):
    rises = {}
    for coefficient in (0.0, 2.0):
        algorithm = RLOO(**GROUP, kl=FixedKL(coefficient=coefficient, place=place, estimator=estimator))
        roles = make_roles(algorithm, wanted_word)
        before = mean_over(roles.actor.model, wanted_word, PROMPTS)
        train(algorithm, roles, 12)
        rises[coefficient] = mean_over(roles.actor.model, wanted_word, PROMPTS) - before
    assert rises[2.0] < .5 * rises[0.0]


def test_a_penalty_for_cut_off_responses_teaches_the_policy_to_end():
    algorithm = GRPO(**GROUP, overlong=TruncationPenalty(penalty=2.0))
    roles = make_roles(algorithm, lambda prompt, words: 0.0)
    before = mean_over(roles.actor.model, unfinished, PROMPTS)
    train(algorithm, roles, 12)
    assert mean_over(roles.actor.model, unfinished, PROMPTS) < before - .25


def test_safe_rlhf_keeps_the_expected_cost_under_its_limit_where_ppo_does_not():
    """The reward wants the prompt's word in every slot; a response that never ends costs one."""
    limit, results = 0.3, {}
    for algorithm in (
        PPO(samples_per_prompt=6),
        SafeRLHF(samples_per_prompt=6, costs=[LengthReward()], cost_limit=limit, initial_multiplier=.2,
                 multiplier_lr=1.0, cost_window=2),
    ):
        roles = make_roles(algorithm, wanted_word, cost=unfinished if algorithm.kind == "safe_rlhf" else None)
        metrics = train(algorithm, roles, 30)
        results[algorithm.kind] = [mean_over(roles.actor.model, rule, PROMPTS) for rule in (unfinished, wanted_word)]
    assert results["ppo"][0] > .9
    assert results["safe_rlhf"][0] < limit and results["safe_rlhf"][1] > .4
    assert max(m["cost/multiplier"] for m in metrics) > 1 and "cost_critic/loss" in metrics[-1]
