"""One iteration of every algorithm on Megatron: the same loss, gradient and step however it is divided."""

from types import SimpleNamespace

import pytest
import torch

from engine.batch import Sample, make_batch, shard
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
    ReMax,
    SafeRLHF,
    TruncatedImportance,
)
from engine.spec.reward import LengthReward
from tests.engine.backends.megatron_cases import assemble, largest_difference
from tests.engine.multiprocess import shared_ranks
from tests.engine.resharding.hf_models import make_model

PROMPTS, SAMPLES, LIMIT, VOCAB = 4, 4, 9, 101
GROUP = {"samples_per_prompt": SAMPLES, "entropy_coefficient": 0.01}
ALGORITHMS = {
    "ppo": PPO(**GROUP, kl=AdaptiveKL()),
    "safe_rlhf": SafeRLHF(**GROUP, costs=[LengthReward()], cost_limit=0.2),
    "grpo": GRPO(**GROUP, kl=FixedKL(coefficient=0.1, place="loss", estimator="k3")),
    "full_kl_loss": GRPO(**GROUP, kl=FixedKL(coefficient=0.1, place="loss", estimator="full")),
    "full_kl_reward": PPO(**GROUP, kl=FixedKL(coefficient=0.1, estimator="full")),
    "dr_grpo": GRPO(**GROUP, scale_by_std=False, aggregation="constant"),
    "dapo": DAPO(**GROUP, dynamic_sampling=DynamicSampling(max_rounds=1)),
    "gspo": GSPO(**GROUP), "cispo": CISPO(**GROUP), "rloo": RLOO(**GROUP), "opo": OPO(**GROUP),
    "reinforce_pp": ReinforcePP(**GROUP), "reinforce_pp_baseline": ReinforcePP(**GROUP, group_baseline=True),
    "remax": ReMax(**GROUP, loss="reinforce"),
    "truncated": GRPO(**GROUP, mismatch=TruncatedImportance()),
    "masked": GRPO(**GROUP, mismatch=MaskedImportance(level="sequence")),
}


def samples(greedy):
    """Responses of 1 to 9 tokens; long prompts, so that some share their tokens."""
    generator = torch.Generator().manual_seed(int(greedy))
    made = []
    for prompt in range(PROMPTS):
        words = torch.randint(0, VOCAB, (6 * prompt + 3,), generator=torch.Generator().manual_seed(prompt)).tolist()
        for index in range(1 if greedy else SAMPLES):
            length = int(torch.randint(1, LIMIT + 1, (), generator=generator))
            response = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            number = prompt if greedy else prompt * SAMPLES + index
            # What a sampler a little beside the trainer would say of a nearly uniform policy.
            logprobs = (torch.randn(length, generator=generator) * 0.1 - 4.6).tolist()
            made.append(Sample(number, words, response, logprobs, length == LIMIT))
    return made


class Judge:
    """Scores rows by their tokens: the share of words below a bound, which no layout changes."""

    def __init__(self, bound):
        self.bound = bound

    def score(self, batch):
        starts, ends = batch["prompt_lengths"], batch["prompt_lengths"] + batch["response_lengths"]
        batch["scores"] = torch.stack([
            (ids[start:end] < self.bound).float().mean()
            for ids, start, end in zip(batch["input_ids"], starts, ends, strict=True)])
        return batch


def iterate_all(model_dir, layout, budget):
    """On a rank, for every algorithm: metrics, then what this rank holds of the actor after its step."""
    from engine.backends.megatron.parallel import start_world
    from engine.backends.megatron.trainer import Model, TrainedModel, load_network
    from engine.controller.comm import DataParallelComm
    from engine.dataflows.objectives import ActorObjective, CriticObjective
    from engine.layout import ParallelLayout, read_model_shape
    from engine.resharding.megatron import MegatronSharding
    from engine.spec.train import OptimizerSpec
    from engine.workers.actor import Actor
    from engine.workers.critic import Critic
    from engine.workers.reference import Reference

    world = start_world(ParallelLayout(**layout))
    comm = DataParallelComm(world.groups.dp)

    def trained(head):
        # Epsilon 1 makes the step a smooth function of the gradient.
        return TrainedModel(world, load_network(model_dir, world, head), budget, OptimizerSpec(lr=0.5, epsilon=1.0), 1)

    def mine(batch):
        return shard(batch, 1, world.dp_size, world.dp_rank, 0)

    results = {}
    for name, algorithm in ALGORITHMS.items():
        actor = trained("logprobs")
        safe = isinstance(algorithm, SafeRLHF)
        reference = Reference(Model(world, load_network(model_dir, world, "logprobs"), budget), temperature=0.7,
                              whole=algorithm.needs_full_kl) if algorithm.needs_reference else None
        roles = SimpleNamespace(
            rollout=SimpleNamespace(generate=lambda prompts, greedy=False: mine(make_batch(samples(greedy), 0))),
            actor=Actor(actor, ActorObjective(algorithm, LIMIT), temperature=1.0, epochs=1,
                        reference=reference and reference.policy),
            reference=reference,
            critic=Critic(trained("values"), CriticObjective(algorithm), epochs=1) if algorithm.needs_critic else None,
            cost_critic=Critic(trained("values"), CriticObjective(algorithm), epochs=1) if safe else None,
            reward=Judge(50), cost=Judge(30) if safe else None, comm=comm,
            max_response_tokens=LIMIT, redistribute=lambda batch: mine(comm.gather_batch(batch)))
        _, metrics = iteration_for(algorithm)(roles, range(PROMPTS), algorithm, initial_state(algorithm))
        holdings = MegatronSharding(read_model_shape(model_dir), world.layout).holdings(world.rank)
        results[name] = metrics, holdings, {key: value.detach().clone() for key, value in actor.params().items()}
    return results


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=VOCAB))


@pytest.fixture(scope="module")
def alone(model_dir):
    return shared_ranks(1).run(iterate_all, model_dir, {}, 10_000)[0]


@pytest.mark.parametrize(("world_size", "layout", "budget"), [
    (1, {}, 1), (2, {"dp": 2}, 50), (2, {"tp": 2}, 60), (2, {"pp": 2}, 40), (4, {"tp": 2, "dp": 2}, 10_000)], ids=str)
def test_loss_gradient_and_step_do_not_depend_on_the_division(world_size, layout, budget, model_dir, alone):
    ranks = shared_ranks(world_size).run(iterate_all, model_dir, layout, budget)
    for name, (expected, *held) in alone.items():
        for metrics, *_ in (rank[name] for rank in ranks):
            assert metrics.keys() == expected.keys()
            for key, value in metrics.items():
                assert value == pytest.approx(expected[key], rel=1e-5, abs=2e-6), (name, key)
        assert metrics["actor/grad_norm"] > 0
        found = assemble([rank[name][1:] for rank in ranks])
        assert largest_difference(found, assemble([held])) < 1e-6, name
