"""Actor, critic and reference: the same update however rows, ranks and microbatches divide it."""

import math

import pytest
import torch

from engine.batch import response_mask
from tests.engine.backends.megatron_cases import by_sample, largest_difference, replica_rows
from tests.engine.multiprocess import shared_ranks
from tests.engine.resharding.hf_models import make_model

MINIBATCHES, EPOCHS = 2, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model"), "llama"))


def iterate(model_dir, layout, budget, spoil=None):
    """One iteration of each role on the rows of this rank; `spoil` puts NaN where masked slots are."""
    from engine.backends.megatron.parallel import start_world
    from engine.backends.megatron.trainer import Model, TrainedModel, load_network
    from engine.dataflows.objectives import ActorObjective, CriticObjective
    from engine.layout import ParallelLayout
    from engine.spec.algorithm import GRPO, PPO, FixedKL
    from engine.spec.train import OptimizerSpec
    from engine.workers.actor import Actor
    from engine.workers.critic import Critic
    from engine.workers.reference import Reference

    world = start_world(ParallelLayout(**layout))

    def trained(head):
        network = load_network(model_dir, world, head)
        # Epsilon 1 makes the step a smooth function of the gradient.
        return TrainedModel(world, network, budget, OptimizerSpec(lr=0.5, epsilon=1.0), MINIBATCHES * EPOCHS)

    algorithm = GRPO(kl=FixedKL(coefficient=0.1, place="loss", estimator="k3"), entropy_coefficient=0.01,
                     clip_ratio=0.001)
    actor = Actor(trained("logprobs"), ActorObjective(algorithm, 12), temperature=0.8, epochs=EPOCHS)
    critic = Critic(trained("values"), CriticObjective(PPO()), epochs=EPOCHS)
    reference = Reference(Model(world, load_network(model_dir, world, "logprobs"), budget), temperature=0.8)

    batch = reference.logprobs(critic.values(actor.logprobs(replica_rows(world, MINIBATCHES))))
    first = {name: batch[name].clone() for name in ("old_logprobs", "ref_logprobs", "values")}
    batch["advantages"], batch["returns"] = batch["signal"] * 10, batch["signal"].cumsum(1)
    if spoil:
        batch[spoil] = torch.where(response_mask(batch), batch[spoil], torch.nan)
    metrics = critic.update(batch) | actor.update(batch)
    last = reference.logprobs(critic.values(actor.logprobs(batch)))
    last = {name: last[name].clone() for name in ("old_logprobs", "ref_logprobs", "values")}
    return batch["sample_ids"], batch["response_lengths"], first, last, metrics


def collect(results):
    """{when: {field: {sample: values}}} and the metrics, which all ranks must agree on."""
    assert all(metrics == results[0][4] for *_, metrics in results)
    found = {}
    for when, place in (("first", 2), ("last", 3)):
        found[when] = {name: by_sample([(r[0], r[1], r[place][name]) for r in results]) for name in results[0][place]}
    return found, results[0][4]


@pytest.fixture(scope="module")
def alone(model_dir):
    return collect(shared_ranks(1).run(iterate, model_dir, {}, 10_000))


@pytest.mark.parametrize(("world_size", "layout", "budget"), [
    (1, {}, 1), (1, {}, 50), (2, {"dp": 2}, 50), (2, {"tp": 2}, 10_000), (2, {"pp": 2}, 30)], ids=str)
def test_an_update_is_the_same_however_it_is_divided(world_size, layout, budget, model_dir, alone):
    found, metrics = collect(shared_ranks(world_size).run(iterate, model_dir, layout, budget))
    expected, expected_metrics = alone
    for when in ("first", "last"):
        for name in ("old_logprobs", "ref_logprobs", "values"):
            assert largest_difference(found[when][name], expected[when][name]) < 5e-5, (when, name)
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected_metrics[name], rel=1e-3, abs=1e-5), name


def test_the_roles_learn_and_the_reference_stays(alone):
    found, metrics = alone
    first, last = found["first"], found["last"]
    assert largest_difference(first["old_logprobs"], first["ref_logprobs"]) == 0
    assert largest_difference(first["ref_logprobs"], last["ref_logprobs"]) == 0
    assert largest_difference(first["old_logprobs"], last["old_logprobs"]) > 1e-3
    assert largest_difference(first["values"], last["values"]) > 1e-3


def test_metrics_have_the_names_of_the_documentation(alone):
    _, metrics = alone
    assert {"actor/loss", "actor/grad_norm", "actor/lr", "actor/clip_share", "actor/entropy", "actor/kl_to_old",
            "actor/kl_loss", "actor/skipped_steps", "critic/loss", "critic/grad_norm", "critic/lr",
            "critic/explained_variance", "critic/skipped_steps"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 < metrics["actor/entropy"] < math.log(101)
    assert metrics["actor/clip_share"] > 0
    assert metrics["actor/skipped_steps"] == metrics["critic/skipped_steps"] == 0


@pytest.mark.parametrize("field", ["old_logprobs", "advantages", "values", "returns"])
def test_what_stands_in_masked_slots_changes_nothing(field, model_dir, alone):
    found, metrics = collect(shared_ranks(1).run(iterate, model_dir, {}, 10_000, field))
    assert metrics == alone[1]
    assert largest_difference(found["last"]["values"], alone[0]["last"]["values"]) == 0
