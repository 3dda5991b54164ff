import copy
import dataclasses
import json
import math
import threading

import pytest
import torch

from engine.batch import concat, response_mask
from engine.dataflows import AlgorithmState, initial_state, iteration_for
from engine.dataflows.steps import gather_by_sample
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
    OverlongShaping,
    ReinforcePP,
    Rejection,
    ReMax,
    SafeRLHF,
    TruncatedImportance,
    TruncationFilter,
    TruncationPenalty,
)
from engine.spec.reward import LengthReward
from tests.engine.dataflows.tiny_roles import END, LIMIT, make_roles

PROMPTS = [1, 2, 3, 4]
KL = FixedKL(coefficient=.1, place="reward")
ALGORITHMS = [
    PPO(samples_per_prompt=3, kl=KL), GRPO(samples_per_prompt=3), GRPO(samples_per_prompt=3, scale_by_std=False, kl=KL),
    GSPO(samples_per_prompt=3), CISPO(samples_per_prompt=3), RLOO(samples_per_prompt=3, kl=KL),
    OPO(samples_per_prompt=3, mismatch=Rejection(low=.95, high=1.05)), ReinforcePP(samples_per_prompt=3, kl=KL),
    ReinforcePP(samples_per_prompt=3, group_baseline=True), ReMax(samples_per_prompt=3, kl=KL),
    SafeRLHF(samples_per_prompt=3, kl=KL, costs=[LengthReward()]),
    DAPO(samples_per_prompt=3, dynamic_sampling=DynamicSampling(max_rounds=1)),
]


def rule(prompt, words):
    """Differs between responses, and between prompts."""
    return math.sin(7 * prompt + sum((i + 1) * word for i, word in enumerate(words)))


def cost(prompt, words):
    return float(len(words))


def frozen_roles(algorithm, gap=0.1):
    """Roles whose reference and actor differ, and whose updates do nothing but report."""
    roles = make_roles(algorithm, rule, cost=cost if algorithm.kind == "safe_rlhf" else None, gap=gap)
    if roles.reference is not None:
        with torch.no_grad():
            roles.reference.model.table.add_(torch.randn(roles.reference.model.table.shape,
                                                         generator=torch.Generator().manual_seed(5)))
    for role in (roles.actor, roles.critic, roles.cost_critic):
        if role is not None:
            role.update = lambda batch: {}
    return roles


def iterate(algorithm, roles, state=None):
    return iteration_for(algorithm)(roles, PROMPTS, algorithm, state or initial_state(algorithm))


class ThreadComm:
    """Ranks are threads: the exchange of a data-parallel group without processes."""

    def __init__(self, size):
        self.slots, self.barrier, self.rank = [None] * size, threading.Barrier(size), threading.local()

    def exchange(self, values):
        self.slots[self.rank.number] = values.clone()
        self.barrier.wait(30)
        everyone = list(self.slots)
        self.barrier.wait(30)
        return everyone

    def gather(self, values):
        return torch.cat(self.exchange(values))

    def sum(self, values):
        return sum(self.exchange(values))


def run_on_ranks(algorithm, shares):
    """The batches of ranks that hold the given rows of one batch (numbers of rows, groups broken anywhere)."""
    comm, batches, metrics, errors = ThreadComm(len(shares)), {}, {}, []

    def rank(number):
        comm.rank.number = number
        roles = frozen_roles(algorithm)
        roles.comm, generate = comm, roles.rollout.generate

        def my_rows(prompts, *, greedy=False):
            batch = generate(prompts, greedy=greedy)
            return batch[number::len(shares)] if greedy else batch[torch.tensor(shares[number])]

        roles.rollout.generate = my_rows
        try:
            batches[number], metrics[number] = iterate(algorithm, roles)
        except Exception as error:  # noqa: BLE001 - the test reports it
            errors.append(error)
            comm.barrier.abort()

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    return batches, metrics


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.kind)
def test_groups_broken_over_ranks_have_the_advantages_of_one_rank(algorithm):
    whole, expected = iterate(algorithm, frozen_roles(algorithm))
    rows = len(whole)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    batches, metrics = run_on_ranks(algorithm, [order[:5], order[5:]])
    assert metrics[0] == metrics[1] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    parts = concat(list(batches.values()))
    parts, whole = (batch[batch["sample_ids"].argsort()] for batch in (parts, whole))
    for name in {"advantages", "returns", "importance_weights", "loss_mask"} & set(whole.keys()):
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.kind)
def test_what_stands_in_masked_slots_reaches_no_field_that_is_trained_on(algorithm):
    """The tiny roles put NaN there."""
    batch, metrics = iterate(algorithm, frozen_roles(algorithm))
    assert batch["old_logprobs"].isnan().any()
    mask = response_mask(batch)
    assert batch["advantages"].isfinite().all() and batch["advantages"][~mask].eq(0).all()
    assert metrics["alarms/nan"] == 0 and all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.kind)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_score_skips_the_update_and_names_its_sample(algorithm, bad):
    """verl#747: one row, though its group's and the whole batch's advantages are spoilt as well."""
    roles = make_roles(algorithm, rule, cost=cost if algorithm.kind == "safe_rlhf" else None)
    score = roles.reward.score

    def spoilt(batch):
        batch = score(batch)
        if len(batch) == len(PROMPTS) * algorithm.samples_per_prompt:
            batch["scores"][4] = bad
        return batch

    roles.reward.score = spoilt
    before = copy.deepcopy(roles.actor.model.state_dict())
    batch, metrics = iterate(algorithm, roles)
    assert metrics["alarms/nan"] == 1
    assert batch["sample_ids"][batch["nonfinite"]].tolist() == [4]
    torch.testing.assert_close(roles.actor.model.state_dict(), before, rtol=0, atol=0)


def test_a_bad_logprob_or_value_skips_the_update():
    for name in ("actor", "reference", "critic"):
        algorithm = PPO(samples_per_prompt=3, kl=KL)
        roles = make_roles(algorithm, rule)
        with torch.no_grad():
            getattr(roles, name).model.table[PROMPTS[0]] = math.nan
        if name == "actor":
            roles.rollout.model = copy.deepcopy(make_roles(algorithm, rule).actor.model)
        _, metrics = iterate(algorithm, roles)
        assert metrics["alarms/nan"] == 3, name


def test_after_a_bad_iteration_multiplier_and_kl_coefficient_are_still_numbers():
    algorithm = SafeRLHF(costs=[LengthReward()], kl=AdaptiveKL(), cost_window=3)
    roles, state = make_roles(algorithm, rule, cost=lambda prompt, words: math.nan), initial_state(algorithm)
    with torch.no_grad():
        roles.reference.model.table.fill_(math.nan)
    iterate(algorithm, roles, state)
    assert state.multiplier == 1.0 and state.recent_costs == [] and state.kl_coefficient == .05


@pytest.mark.parametrize("correction", [TruncatedImportance(cap=1.05), MaskedImportance(low=.9, high=1.1), Rejection()])
def test_the_gap_is_measured_every_iteration_and_corrected_when_asked(correction):
    plain, measured = iterate(GRPO(samples_per_prompt=3), frozen_roles(GRPO(samples_per_prompt=3)))
    algorithm = GRPO(samples_per_prompt=3, mismatch=correction)
    batch, metrics = iterate(algorithm, frozen_roles(algorithm))
    mask = response_mask(batch)
    gap = (batch["old_logprobs"] - batch["rollout_logprobs"])[mask]
    assert measured["rollout/logprob_gap"] == metrics["rollout/logprob_gap"] == pytest.approx(gap.abs().mean().item())
    assert "importance_weights" not in plain.keys() and "loss_mask" not in plain.keys()
    if correction.kind == "rejected":
        assert 0 < metrics["rollout/rejected_share"] <= 1
        assert batch["loss_mask"].any(dim=1).float().mean() == pytest.approx(1 - metrics["rollout/rejected_share"])
        return
    weights, ratio = batch["importance_weights"][mask], gap.exp()
    kept = ratio.clamp(max=1.05) if correction.kind == "truncated" else ratio * ((ratio >= .9) & (ratio <= 1.1))
    torch.testing.assert_close(weights, kept)
    assert metrics["rollout/importance_clip_share"] == pytest.approx((kept != ratio).float().mean().item())


def test_the_end_token_in_the_prompt_does_not_excuse_an_unfinished_response():
    """TRL#6805: cut off is what the sampler says, whatever tokens the prompt holds."""
    algorithm = GRPO(samples_per_prompt=3, scale_by_std=False, overlong=TruncationPenalty(penalty=2.0))
    roles = make_roles(algorithm, lambda prompt, words: 1.0)
    batch, _ = iteration_for(algorithm)(roles, [END] * 4, algorithm, initial_state(algorithm))
    assert batch["input_ids"][:, 0].eq(END).all() and 0 < batch["truncated"].sum() < len(batch)
    rewards = batch["token_rewards"].sum(dim=1)
    assert rewards.tolist() == [-1.0 if cut else 1.0 for cut in batch["truncated"].tolist()]


def test_overlong_shaping_lowers_the_reward_by_length_and_leaves_the_score_as_it_is_logged():
    algorithm = GRPO(samples_per_prompt=3, overlong=OverlongShaping(buffer_tokens=2, penalty=.5))
    batch, _ = iterate(algorithm, make_roles(algorithm, lambda prompt, words: 1.0))
    expected = {1: 1.0, 2: .75, LIMIT: .5}
    rewards = batch["token_rewards"].sum(dim=1).tolist()
    assert rewards == [expected[n] for n in batch["response_lengths"].tolist()]
    assert batch["scores"].eq(1).all()


def test_the_filter_keeps_cut_off_responses_out_of_the_loss_and_in_the_baseline():
    algorithm = GRPO(samples_per_prompt=3, overlong=TruncationFilter(), scale_by_std=False)
    batch, _ = iterate(algorithm, frozen_roles(algorithm))
    assert batch["loss_mask"].any(dim=1).tolist() == [not cut for cut in batch["truncated"].tolist()]
    scores = batch["scores"].view(-1, 3)
    torch.testing.assert_close(batch["advantages"][:, 0], (scores - scores.mean(1, keepdim=True)).flatten())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_that_is_logged_is_the_kl_that_is_penalised(estimator):
    """TRL#1161."""
    algorithm = PPO(samples_per_prompt=3, kl=FixedKL(coefficient=.5, estimator=estimator))
    batch, metrics = iterate(algorithm, frozen_roles(algorithm))
    mask = response_mask(batch)
    penalty = batch["scores"].sum() - batch["token_rewards"][mask].sum()
    assert metrics["actor/kl_to_reference"] == pytest.approx(penalty.item() / .5 / mask.sum().item(), rel=1e-4)
    assert metrics["actor/kl_coefficient"] == .5


def test_an_adaptive_coefficient_moves_after_its_use_with_the_kl_of_a_sequence():
    fixed = PPO(samples_per_prompt=3, kl=FixedKL(coefficient=.1))
    batch, metrics = iterate(fixed, frozen_roles(fixed))
    per_sequence = metrics["actor/kl_to_reference"] * response_mask(batch).sum().item() / len(batch)
    algorithm = PPO(samples_per_prompt=3, kl=AdaptiveKL(initial_coefficient=.1, target=per_sequence / 1.1, horizon=100))
    state = initial_state(algorithm)
    assert iterate(algorithm, frozen_roles(algorithm), state)[1]["actor/kl_coefficient"] == .1
    assert state.kl_coefficient == pytest.approx(.1 * (1 + .1 * len(batch) / 100))


def test_a_kl_loss_leaves_the_reward_alone():
    algorithm = GRPO(samples_per_prompt=3, kl=FixedKL(coefficient=.5, place="loss", estimator="k3"))
    batch, metrics = iterate(algorithm, frozen_roles(algorithm))
    torch.testing.assert_close(batch["token_rewards"].sum(dim=1), batch["scores"])
    assert metrics["actor/kl_to_reference"] > 0


def test_without_a_kl_no_reference_is_asked():
    algorithm = GRPO(samples_per_prompt=3)
    batch, metrics = iterate(algorithm, frozen_roles(algorithm))
    assert "ref_logprobs" not in batch.keys() and "actor/kl_to_reference" not in metrics


def test_ppo_whitens_over_all_tokens_and_returns_stay_in_reward_units():
    white, plain = (iterate(a, frozen_roles(a))[0] for a in (
        PPO(samples_per_prompt=3), PPO(samples_per_prompt=3, whiten_advantages=False)))
    mask = response_mask(white)
    assert white["advantages"][mask].mean().abs() < 1e-6
    assert white["advantages"][mask].std(unbiased=False).item() == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(white["returns"], plain["returns"])
    torch.testing.assert_close(plain["returns"], (plain["advantages"] + plain["values"]) * mask)


def test_remax_subtracts_the_greedy_response_to_the_same_prompt():
    algorithm = ReMax(samples_per_prompt=3)
    roles, scored = frozen_roles(algorithm), []
    score = roles.reward.score
    roles.reward.score = lambda batch: scored.append(batch["sample_ids"] // 3) or score(batch)
    batch, _ = iterate(algorithm, roles)
    # A reward finds the row's prompt by its sample id, in the greedy batch as in the other.
    assert scored[1].tolist() == [0, 1, 2, 3]
    assert [greedy for _, greedy in roles.rollout.calls] == [False, True]
    greedy = roles.reward.score(roles.rollout.generate(PROMPTS, greedy=True))["scores"]
    expected = batch["scores"] - greedy[batch["sample_ids"] // 3]
    torch.testing.assert_close(batch["advantages"][:, 0], expected)


def test_safe_rlhf_weighs_the_two_advantages_with_the_moved_multiplier():
    algorithm = SafeRLHF(samples_per_prompt=3, costs=[LengthReward()], cost_limit=1.0, multiplier_lr=.1, kl=KL,
                         whiten_advantages=False, gae_lambda=1.0)
    roles, state = frozen_roles(algorithm), initial_state(algorithm)
    batch, metrics = iterate(algorithm, roles, state)
    for name, critic in (("values", roles.critic), ("cost_values", roles.cost_critic)):
        torch.testing.assert_close(batch[name], critic.values(batch.copy())["values"])
    mean_cost = batch["response_lengths"].float().mean().item()
    assert metrics["cost/mean"] == pytest.approx(mean_cost)
    assert state.multiplier == metrics["cost/multiplier"] == pytest.approx(math.exp(.1 * (mean_cost - 1.0)))
    # With lambda 1 each advantage is the reward to come minus its own critic's value; the KL weighs .1 in the sum.
    m, mask = state.multiplier, response_mask(batch)
    kl = torch.where(mask, batch["old_logprobs"] - batch["ref_logprobs"], 0.0)
    to_come = .1 * kl.flip(1).cumsum(1).flip(1)
    reward = batch["scores"][:, None] - to_come - batch["values"]
    dearness = batch["costs"][:, None] + to_come - batch["cost_values"]
    expected = torch.where(mask, (reward - m * dearness) / (1 + m), 0.0)
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-4, atol=1e-5)


def test_the_multiplier_waits_for_its_delay_and_averages_its_window():
    algorithm = SafeRLHF(costs=[LengthReward()], cost_limit=0.0, multiplier_delay=2, cost_window=2, multiplier_lr=.1)
    roles, state = frozen_roles(algorithm), initial_state(algorithm)
    costs, multipliers = iter([1.0, 2.0, 4.0]), []
    for level in costs:
        roles.cost.rule = lambda prompt, words, level=level: level
        iterate(algorithm, roles, state)
        multipliers.append(state.multiplier)
    assert multipliers == pytest.approx([1.0, 1.0, math.exp(.1 * 3.0)])
    assert state.recent_costs == [2.0, 4.0] and state.iterations == 3


class Spread:
    """A reward that is equal within a group for the given numbers of calls, then different."""

    def __init__(self, flat_prompts_by_round):
        self.flat, self.round = flat_prompts_by_round, 0

    def score(self, batch):
        flat = self.flat[self.round]
        self.round += 1
        groups, members = batch["sample_ids"] // 3, batch["sample_ids"] % 3
        batch["scores"] = torch.where(torch.isin(groups, torch.tensor(flat)), 1.0, members.float())
        return batch


def sample_dynamically(flat_by_round, max_rounds):
    algorithm = DAPO(samples_per_prompt=3, dynamic_sampling=DynamicSampling(max_rounds=max_rounds))
    roles = frozen_roles(algorithm)
    roles.reward = Spread(flat_by_round)
    batch, metrics = iterate(algorithm, roles)
    trained = batch["loss_mask"].any(dim=1)
    return roles, batch, metrics, (batch["sample_ids"][trained] // 3).unique().tolist()


def test_groups_without_spread_are_replaced_by_groups_of_the_next_prompts():
    roles, batch, metrics, trained = sample_dynamically([[1, 3], [0]], max_rounds=3)
    assert trained == [0, 2, 5, 6] and len(batch) == 12
    assert roles.refills == 1 and metrics["rollout/rounds"] == 2 and metrics["rollout/spread_share"] == 1
    assert len(batch["sample_ids"].unique()) == 12


def test_the_budget_of_rounds_is_kept_and_the_batch_stays_full_with_groups_that_do_not_train():
    roles, batch, metrics, trained = sample_dynamically([[0, 1, 3], [0, 1, 2, 3]], max_rounds=2)
    assert trained == [2] and len(batch) == 12
    assert roles.refills == 1 and metrics["rollout/rounds"] == 2 and metrics["rollout/spread_share"] == .25


def test_nothing_is_refilled_when_every_group_has_spread():
    roles, batch, metrics, trained = sample_dynamically([[]], max_rounds=3)
    assert trained == [0, 1, 2, 3] and roles.refills == 0 and metrics["rollout/rounds"] == 1


def test_a_batch_without_any_spread_has_no_gradient_and_no_nan():
    algorithm = DAPO(samples_per_prompt=3, dynamic_sampling=DynamicSampling(max_rounds=1))
    roles = make_roles(algorithm, lambda prompt, words: 1.0)
    before = copy.deepcopy(roles.actor.model.state_dict())
    _, metrics = iterate(algorithm, roles)
    assert metrics["alarms/nan"] == 0 and metrics["actor/loss"] == 0
    torch.testing.assert_close(roles.actor.model.state_dict(), before, rtol=0, atol=0)


def test_state_survives_json():
    algorithm = SafeRLHF(costs=[LengthReward()], kl=AdaptiveKL(initial_coefficient=.3), initial_multiplier=.7)
    state = initial_state(algorithm)
    assert (state.kl_coefficient, state.multiplier) == (.3, .7)
    iterate(algorithm, frozen_roles(algorithm), state)
    assert AlgorithmState(**json.loads(json.dumps(dataclasses.asdict(state)))) == state


def test_rows_of_all_ranks_come_in_the_order_of_their_ids():
    class Two:
        def gather(self, values):
            return torch.cat([values, values + 10])

    ids, (column,), mine = gather_by_sample(Two(), torch.tensor([7, 1, 4]), torch.tensor([70.0, 10.0, 40.0]))
    assert ids.tolist() == [1, 4, 7, 11, 14, 17]
    assert column.tolist() == [10, 40, 70, 20, 50, 80]
    assert mine.tolist() == [2, 0, 1]
