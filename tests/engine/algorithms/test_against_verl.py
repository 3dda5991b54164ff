"""Our functions against those of verl's `core_algos` on random batches; development only.

verl is no dependency. To run this: pip install --no-deps --target DIR verl==0.9.1, then PYTHONPATH=DIR.
Its package imports Ray, Hydra and more, so the one file is loaded with stand-ins for what it does not use here.
"""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from engine.algorithms.advantages import (
    discounted_returns,
    gae,
    group_centred,
    grpo,
    opo,
    over_tokens,
    remax,
    rloo,
    token_rewards,
)
from engine.algorithms.kl import adapt_coefficient, estimate_kl, kl_loss
from engine.algorithms.losses import (
    Sampled,
    cispo_loss,
    gspo_loss,
    loss_denominator,
    ppo_loss,
    token_weights,
    value_loss,
)
from engine.algorithms.masking import moment_sums, whiten
from tests.engine.algorithms.inputs import noise

SPEC = importlib.util.find_spec("verl")
if SPEC is None:
    pytest.skip("verl is not installed: pip install --no-deps --target DIR verl==0.9.1, then PYTHONPATH=DIR (issue 4)",
                allow_module_level=True)
SEEDS = range(4)
AGGREGATIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


class Config(types.SimpleNamespace):
    """What the policy losses read of verl's actor config."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def stand_in(name, path=None, **attributes):
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    if path is not None:
        module.__path__ = [str(path)]
    return module


@pytest.fixture(scope="module")
def verl():
    root = Path(SPEC.submodule_search_locations[0])
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            stand_in("verl", root), stand_in("verl.utils", root / "utils", as_torch_index=None, group_mean_std=None),
            stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch),
            stand_in("verl.trainer", root / "trainer"), stand_in("verl.trainer.ppo", root / "trainer" / "ppo"),
            stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {})),
            stand_in("verl.workers", root / "workers"), stand_in("verl.workers.config", ActorConfig=Config),
            stand_in("omegaconf", DictConfig=dict),
        ):
            patch.setitem(sys.modules, module.__name__, module)
        yield importlib.import_module("verl.trainer.ppo.core_algos")
    for name in [n for n in sys.modules if n.startswith("verl.")]:
        del sys.modules[name]


def batch(seed):
    """(mask with an empty tail and a hole, its float copy, scores, token rewards, group ids)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 8, (12, 1), generator=generator)
    mask = torch.arange(8) < lengths
    mask[0, 1] = False
    scores = noise(12, seed).float()
    return mask, mask.float(), scores, token_rewards(scores, mask), torch.arange(12) // 4


def tokens(seed, mask):
    old = -noise(mask.shape, seed).abs().float()
    return old + noise(mask.shape, seed + 1, .4).float(), old, noise(mask.shape, seed + 2).float()


def same(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def bessel(mask):
    """verl whitens with the sample's variance, we with the population's: the whole batch is the population."""
    return ((mask.sum() - 1) / mask.sum()).sqrt()


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_its_whitening(verl, seed):
    mask, floats, _, rewards, _ = batch(seed)
    values = noise(mask.shape, seed + 5).float()
    expected, returns = verl.compute_gae_advantage_return(rewards, values, floats, .99, .95)
    advantages, ours = gae(rewards, values, mask, .99, .95)
    same(whiten(advantages, mask, moment_sums(advantages, mask)) * bessel(mask), expected * floats)
    # verl leaves the next token's return in masked slots, we leave 0.
    same(ours, returns * floats)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_estimators(verl, seed):
    mask, floats, scores, rewards, ids = batch(seed)
    index = ids.numpy()
    # verl's GRPO divides by the sample's standard deviation; ours does on request.
    same(over_tokens(grpo(scores, ids, "sample"), mask),
         verl.compute_grpo_outcome_advantage(rewards.clone(), floats, index)[0])
    same(over_tokens(grpo(scores, ids, "none"), mask),
         verl.compute_grpo_outcome_advantage(rewards.clone(), floats, index, norm_adv_by_std_in_grpo=False)[0])
    same(over_tokens(rloo(scores, ids), mask), verl.compute_rloo_outcome_advantage(rewards.clone(), floats, index)[0])
    same(over_tokens(opo(scores, ids, mask.sum(1)), mask),
         verl.compute_opo_outcome_advantage(rewards.clone(), floats, index)[0])
    centred = over_tokens(group_centred(scores, ids), mask)
    same(whiten(centred, mask, moment_sums(centred, mask)) * bessel(mask),
         verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards.clone(), floats, ids.tolist())[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_and_remax(verl, seed):
    mask, floats, _, rewards, _ = batch(seed)
    rewards = rewards + .1 * noise(mask.shape, seed + 3).float() * floats
    returns = discounted_returns(rewards, mask, .9)
    expected = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, floats, Config(gamma=.9))[0]
    same(whiten(returns, mask, moment_sums(returns, mask)) * bessel(mask), expected)
    greedy = noise(12, seed + 4).float()
    # In a hole verl leaves the reward to come, we leave 0.
    same(remax(rewards, greedy, mask), verl.compute_remax_outcome_advantage(rewards, greedy, floats)[0] * floats)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_losses_and_their_gradients(verl, seed, name, aggregation):
    mask, floats, *_ = batch(seed)
    logprobs, old, advantages = tokens(seed, mask)
    if name == "gspo":
        # One advantage a sequence, as the paper has it: verl's gradient is that of its token variant.
        advantages = over_tokens(advantages[:, 0], mask)
    config = Config(clip_ratio=.2, clip_ratio_low=.2, clip_ratio_high=.28, clip_ratio_c=3.0, global_batch_info={})
    theirs = {"clip": verl.compute_policy_loss_vanilla, "gspo": verl.compute_policy_loss_gspo,
              "cispo": verl.compute_policy_loss_cispo}[name]
    ours = {"clip": lambda *a: ppo_loss(*a, dual_clip=3.0), "gspo": gspo_loss, "cispo": cispo_loss}[name]
    weights = token_weights(mask, aggregation, loss_denominator(mask, aggregation, mask.shape[1]))
    results = []
    for loss_of in (
        lambda x: ours(x, Sampled(old, advantages, mask, weights), .2, .28)[0],
        lambda x: theirs(old, x, advantages, floats, AGGREGATIONS[aggregation], config)[0],
    ):
        trained = logprobs.clone().requires_grad_()
        loss = loss_of(trained)
        loss.backward()
        results.append((loss.detach(), trained.grad))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(verl, seed):
    mask, floats, *_ = batch(seed)
    values, old, returns = (noise(mask.shape, seed + i).float() for i in range(3))
    weights = token_weights(mask, "token", mask.sum())
    same(value_loss(values, old, returns, weights, .2)[0], verl.compute_value_loss(values, returns, old, floats, .2)[0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates(verl, estimator):
    mask = torch.ones(3, 5, dtype=torch.bool)
    # Gaps stay small here: verl also cuts k3 off at 10, which hides how far a policy has gone; we do not.
    logprobs, ref, _ = tokens(1, mask)
    same(estimate_kl(logprobs, ref, mask, estimator), verl.kl_penalty_forward(logprobs, ref, estimator))


def test_on_policy_the_kl_loss_has_the_gradient_of_their_straight_through_estimator(verl):
    mask = torch.ones(3, 5, dtype=torch.bool)
    logprobs, ref, _ = tokens(2, mask)
    gradients = []
    for loss_of in (lambda x: kl_loss(x, ref, logprobs, mask, "k3"), lambda x: verl.kl_penalty(x, ref, "k3+")):
        trained = logprobs.clone().requires_grad_()
        loss_of(trained).sum().backward()
        gradients.append(trained.grad)
    same(*gradients)


def test_the_adaptive_controller(verl):
    controller = verl.AdaptiveKLController(.2, 6.0, 10_000)
    controller.update(12.0, 256)
    assert adapt_coefficient(.2, 12.0, 6.0, 256, 10_000) == pytest.approx(controller.value)
