import pytest
import torch

from engine.algorithms.masking import zero_masked
from engine.batch import make_batch, response_mask
from engine.dataflows.objectives import ActorObjective, CriticObjective, trained_mask
from engine.dataflows.steps import leave_out
from engine.spec.algorithm import CISPO, DAPO, GRPO, GSPO, PPO, FixedKL
from tests.engine.algorithms.inputs import noise, poison
from tests.engine.dataflows.tiny_roles import LIMIT, Sample

KL_LOSS = FixedKL(coefficient=0.3, place="loss", estimator="k3")
FULL_KL = FixedKL(coefficient=0.3, place="loss", estimator="full")
ALGORITHMS = {
    "ppo": PPO(entropy_coefficient=0.1, dual_clip=2.0),
    "grpo": GRPO(kl=KL_LOSS, entropy_coefficient=0.1),
    "dr_grpo": GRPO(scale_by_std=False, aggregation="constant", kl=KL_LOSS),
    "full_kl": GRPO(kl=FULL_KL),
    "dapo": DAPO(), "gspo": GSPO(), "cispo": CISPO(kl=KL_LOSS), "reinforce": PPO(loss="reinforce"),
}
LENGTHS = (1, 3, 2, 3, 1)


def make_fields(seed=0, rows_left_out=(3,)):
    """A batch as a dataflow leaves it: garbage in masked slots, importance weights, one row left out of the loss."""
    batch = make_batch([Sample(i, [1], [0] * n, [-1.0] * n, False) for i, n in enumerate(LENGTHS)], 0)
    mask = response_mask(batch)
    names = ("old_logprobs", "advantages", "ref_logprobs", "values", "returns")
    for i, name in enumerate(names):
        batch[name] = poison(noise(mask.shape, seed + i, 0.5).float(), mask, i)
    batch["importance_weights"] = noise(mask.shape, seed + 9).abs().float()
    leave_out(batch, torch.tensor([i in rows_left_out for i in range(len(LENGTHS))]))
    logprobs = poison(noise(mask.shape, seed + 7, 0.5).float(), mask)
    entropies = poison(noise(mask.shape, seed + 8).abs().float(), mask)
    return batch, logprobs, entropies


def run(objective, fields, parts):
    """(loss, gradients of logprobs and entropies, metrics) with the batch in the given parts."""
    batch, logprobs, entropies = fields
    logprobs, entropies = logprobs.clone().requires_grad_(), entropies.clone().requires_grad_()
    denominator = sum(objective.denominator(batch[rows]) for rows in parts)
    total, totals = 0.0, {}
    for rows in parts:
        mask = response_mask(batch[rows])
        full_kl = torch.where(mask, zero_masked(logprobs[rows], mask).square(), torch.nan)
        outputs = {"logprobs": logprobs[rows], "entropy": entropies[rows], "full_kl": full_kl}
        loss, sums = objective.loss(batch[rows], outputs, denominator)
        loss.backward()
        total += loss.item()
        totals = {name: totals.get(name, 0) + value.item() for name, value in sums.items()}
    return total, logprobs.grad, entropies.grad, objective.metrics(totals)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_split_into_microbatches_and_ranks_has_the_same_loss_gradient_and_metrics(name):
    objective = ActorObjective(ALGORITHMS[name], LIMIT)
    fields, rows = make_fields(), torch.arange(len(LENGTHS))
    whole = run(objective, fields, [rows])
    for parts in (rows.split(1), rows.split(2), [rows[[4, 0]], rows[[2, 3, 1]]], [rows[:3], rows[3:4], rows[4:]]):
        split = run(objective, fields, parts)
        assert split[0] == pytest.approx(whole[0], abs=1e-6)
        for actual, expected in zip(split[1:3], whole[1:3], strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
        assert split[3] == pytest.approx(whole[3], abs=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_left_out_is_as_if_it_were_not_there(name):
    objective = ActorObjective(ALGORITHMS[name], LIMIT)
    rows = torch.arange(len(LENGTHS))
    loss, gradient, _, metrics = run(objective, make_fields(), [rows])
    without = run(objective, make_fields(), [rows[[0, 1, 2, 4]]])
    assert loss == pytest.approx(without[0], abs=1e-6)
    assert metrics == pytest.approx(without[3], abs=1e-6)
    assert gradient[3].eq(0).all()


def test_importance_weights_scale_the_policy_gradient_and_not_the_entropy():
    objective = ActorObjective(PPO(entropy_coefficient=0.1, loss="reinforce"), LIMIT)
    batch, logprobs, entropies = make_fields()
    rows = [torch.arange(len(LENGTHS))]
    once = run(objective, (batch, logprobs, entropies), rows)
    batch["importance_weights"] = 2 * batch["importance_weights"]
    twice = run(objective, (batch, logprobs, entropies), rows)
    torch.testing.assert_close(twice[1], 2 * once[1])
    torch.testing.assert_close(twice[2], once[2])
    mask = trained_mask(batch)
    torch.testing.assert_close(once[2], -0.1 * mask / mask.sum())


@pytest.mark.parametrize("kl", [KL_LOSS, FULL_KL], ids=lambda kl: kl.estimator)
def test_the_kl_that_is_logged_is_the_kl_that_is_trained(kl):
    """TRL#1161: same estimator in both, and neither is ever negative."""
    coefficient = 0.3
    rows = [torch.arange(len(LENGTHS))]
    fields = make_fields(rows_left_out=())
    fields[0]["importance_weights"] = torch.ones_like(fields[1])
    plain = run(ActorObjective(GRPO(aggregation="token"), LIMIT), fields, rows)
    with_kl = run(ActorObjective(GRPO(aggregation="token", kl=kl), LIMIT), fields, rows)
    logged = with_kl[3]["actor/kl_loss"]
    assert logged > 0
    assert with_kl[0] - plain[0] == pytest.approx(coefficient * logged, rel=1e-5)


def test_entropies_are_asked_for_when_the_spec_wants_a_bonus():
    batch, logprobs, _ = make_fields()
    with pytest.raises(ValueError, match=r"entropy_coefficient 0\.1"):
        ActorObjective(PPO(entropy_coefficient=0.1), LIMIT).loss(batch, {"logprobs": logprobs}, 1.0)
    assert ActorObjective(PPO(), LIMIT).loss(batch, {"logprobs": logprobs}, 1.0)[0].isfinite()


def test_the_critic_is_trained_on_all_tokens_and_split_does_not_matter():
    objective = CriticObjective(PPO(value_clip=0.2))
    batch, _, _ = make_fields()
    rows, values = torch.arange(len(LENGTHS)), noise(batch["values"].shape, 3).float()

    def total(parts):
        trained = values.clone().requires_grad_()
        denominator = sum(objective.denominator(batch[p]) for p in parts)
        loss = sum(objective.loss(batch[p], trained[p], denominator)[0] for p in parts)
        loss.backward()
        return loss.item(), trained.grad

    whole, split = total([rows]), total(rows.split(2))
    assert split[0] == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(split[1], whole[1], atol=1e-6, rtol=1e-6)
    assert whole[1][response_mask(batch)].ne(0).sum() > trained_mask(batch).sum()


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    objective = CriticObjective(PPO())
    batch, _, _ = make_fields()
    mask = response_mask(batch)
    for old, expected in ((batch["returns"], 1.0), (torch.full_like(batch["returns"], 0.5), 0.0)):
        batch["values"] = old
        _, sums = objective.loss(batch, torch.zeros_like(old), mask.sum())
        metrics = objective.metrics({name: value.item() for name, value in sums.items()})
        assert metrics["critic/explained_variance"] == pytest.approx(expected, abs=1e-5)
