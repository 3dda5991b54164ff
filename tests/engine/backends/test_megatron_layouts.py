"""Every layout computes what transformers computes, and learns what torch's AdamW learns from autograd's gradients."""

import pytest
import torch

from tests.engine.backends.megatron_cases import (
    VOCAB,
    assemble,
    by_sample,
    huggingface_outputs,
    largest_difference,
    replica_rows,
    rows,
    signal_loss,
)
from tests.engine.multiprocess import shared_ranks
from tests.engine.resharding.hf_models import make_model

TEMPERATURE = 0.7
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama3_rope_biases": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3_tied_wide_heads": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
}
LAYOUTS = [
    (1, {}, False),
    (2, {"tp": 2}, False),
    (2, {"tp": 2}, True),
    (2, {"pp": 2}, False),
    (2, {"dp": 2}, False),
    (4, {"tp": 2, "pp": 2}, False),
    (4, {"tp": 2, "pp": 2}, True),
    (4, {"dp": 2, "pp": 2}, False),
    (4, {"tp": 2, "dp": 2}, True),
]
# With epsilon 1 an AdamW step is a smooth function of the gradient, so weights after a step compare gradients.
SMOOTH = {"lr": 1.0, "beta1": 0.5, "beta2": 0.9, "epsilon": 1.0, "weight_decay": 0.1, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: str(make_model(base / name, family, vocab_size=VOCAB, **sizes))
            for name, (family, sizes) in MODELS.items()}


def compute_and_learn(models, layout, sequence_parallel, budget):
    """On a rank, for each model: outputs of its rows, then parameters after two steps."""
    from engine.backends.megatron.heads import LogprobHead
    from engine.backends.megatron.parallel import start_world
    from engine.backends.megatron.trainer import TrainedModel, load_network
    from engine.layout import ParallelLayout, read_model_shape
    from engine.resharding.megatron import MegatronSharding
    from engine.spec.train import OptimizerSpec

    world = start_world(ParallelLayout(**layout))
    batch, head, results = replica_rows(world), LogprobHead(TEMPERATURE, with_entropy=True), {}
    for name, path in models.items():
        network = load_network(path, world, "logprobs", sequence_parallel=sequence_parallel)
        model = TrainedModel(world, network, budget, OptimizerSpec(**SMOOTH), total_steps=10)
        outputs = model.forward(batch, head)
        reports = [model.train_step(batch, head, signal_loss) for _ in range(2)]
        holdings = MegatronSharding(read_model_shape(path), world.layout).holdings(world.rank)
        params = {name: value.detach().clone() for name, value in model.params().items()}
        results[name] = (batch["sample_ids"], batch["response_lengths"], outputs, reports, holdings, params)
    return results


def oracle(path):
    """transformers' logprobs and entropies, and its weights after two steps of torch's AdamW."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = rows()
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1.0, betas=(0.5, 0.9), eps=1.0)
    first, norms = None, []
    for _ in range(2):
        logprobs, entropies = huggingface_outputs(model, batch, TEMPERATURE)
        first = first or ({k: v.detach() for k, v in logprobs.items()}, {k: v.detach() for k, v in entropies.items()})
        signal = batch["signal"]
        loss = sum((logprobs[row] * signal[row, : len(logprobs[row])]).sum()
                   + (entropies[row] * signal[row, : len(logprobs[row])].abs()).sum() for row in range(len(batch)))
        adam.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        adam.step()
    tied = model.config.tie_word_embeddings
    weights = {n: v.detach() for n, v in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    return *first, weights, norms


@pytest.fixture(scope="module")
def oracles(models):
    return {name: oracle(path) for name, path in models.items()}


@pytest.mark.parametrize(("world_size", "layout", "sequence_parallel"), LAYOUTS, ids=str)
def test_logprobs_entropies_and_two_steps_equal_transformers(world_size, layout, sequence_parallel, models, oracles):
    ranks = shared_ranks(world_size).run(compute_and_learn, models, layout, sequence_parallel, 40)
    for name in models:
        logprobs, entropies, weights, norms = oracles[name]
        results = [rank[name] for rank in ranks]
        for key, expected in (("logprobs", logprobs), ("entropy", entropies)):
            found = by_sample([(ids, lengths, outputs[key]) for ids, lengths, outputs, *_ in results])
            assert largest_difference(found, expected) < 1e-5, (name, key)
        assert all(result[3] == results[0][3] for result in results), "ranks report different steps"
        assert [report.grad_norm for report in results[0][3]] == pytest.approx(norms, rel=2e-6)
        found = assemble([(holdings, params) for *_, holdings, params in results])
        assert largest_difference(found, weights) < 3e-6, name


def test_the_step_does_not_depend_on_the_division_into_microbatches(models):
    some = {"qwen2": models["qwen2"]}
    single, few, one = (shared_ranks(1).run(compute_and_learn, some, {}, False, budget)[0]["qwen2"]
                        for budget in (1, 60, 100_000))
    for other in (few, one):
        assert largest_difference(single[5], other[5]) < 1e-6
        assert other[3][0].loss == pytest.approx(single[3][0].loss, rel=1e-6)
        assert other[3][0].sums["rows"] == single[3][0].sums["rows"] == 12
