"""Transfers into a live vLLM, against what vLLM itself loads from the exported checkpoint."""

import pytest
import torch
import torch.distributed as dist

from engine.layout import GenerationLayout, ParallelLayout, read_model_shape
from engine.resharding.execute import SyncOptions, WeightSync
from engine.resharding.export import export_hf
from engine.resharding.load import load_hf
from engine.resharding.megatron import MegatronSharding
from engine.resharding.plan import plan_rank
from engine.resharding.views import view_of
from engine.resharding.vllm import VllmSharding
from tests.engine.multiprocess import Ranks
from tests.engine.resharding.hf_models import make_model

pytestmark = pytest.mark.slow
# Heads of 32: vLLM has no CPU attention for narrower ones. Fewer kv heads than ranks, tied or not, odd vocabularies.
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "num_attention_heads": 4}
# Experts first: the first engine of a process decides whether vLLM has a group for them. 128: its CPU kernel pads what
# is no multiple of 32 per rank, which the catalog refuses.
MODELS = {
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 128},
    "qwen3_moe": {"num_key_value_heads": 1, "moe_intermediate_size": 64},
    "llama": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True, "hidden_size": 128},
    "qwen3": {"num_key_value_heads": 4, "vocab_size": 129}}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as processes:
        yield processes


def trained_params(model_dir, layout):
    """What a trainer holds after an update that changed every weight."""
    sharding = MegatronSharding(read_model_shape(model_dir), layout)
    holdings = sharding.holdings(dist.get_rank())
    params = {name: torch.empty(shape) for name, shape in holdings.params.items()}
    load_hf(model_dir, holdings, params)
    for value in params.values():
        value.mul_(1.25)
    return sharding, params


def model_values(sharding, generator):
    """Copies of the parameters without vocabulary padding, which vLLM never reads."""
    params = generator.params()
    return {piece: view_of(params[piece.param], piece, piece.box).clone()
            for piece in sharding.holdings(dist.get_rank()).pieces}


KEPT = []
"""With its last engine vLLM would destroy the process groups of the rank, at any time of a later test."""


def served(model_dir, out_dir, layout):
    """Largest logprob gap, and whether tokens and parameters are equal, of a transfer and of vLLM's own loading."""
    from engine.backends.vllm.generator import Generator
    from engine.backends.vllm.requests import GeneratorConfig, Request
    from engine.ranks import join_ranks

    join_ranks()
    generator = Generator(model_dir, GenerationLayout(2), GeneratorConfig(
        max_model_len=64, kv_cache_bytes=16 << 20, max_concurrent_sequences=4))
    KEPT.append(generator)
    src, params = trained_params(model_dir, layout)
    dst = VllmSharding(src.shape, GenerationLayout(2), 2)
    plan, options = plan_rank(src, dst, dist.get_rank()), SyncOptions(timeout_s=60)
    sync = WeightSync(plan, params, generator.params(), None, options)
    sync.run(1)
    generator.weights_changed()
    requests = [Request([3 + i, 7, 11 + i], seed=i, max_tokens=16, temperature=0.0) for i in range(4)]
    ours, moved = generator.generate(requests), model_values(dst, generator)
    export_hf(model_dir, out_dir, src, params)
    generator.load(out_dir)
    theirs = generator.generate(requests)
    loaded = model_values(dst, generator)
    different = [piece for piece, value in loaded.items() if not torch.equal(value, moved[piece])]
    gap = max(abs(a - b) for one, two in zip(ours, theirs, strict=True)
              for a, b in zip(one.logprobs, two.logprobs, strict=True))
    return gap, [r.token_ids for r in ours] == [r.token_ids for r in theirs], different


@pytest.mark.parametrize("family", MODELS)
def test_live_vllm_serves_what_it_would_load_from_the_exported_checkpoint(ranks, family, tmp_path):
    model_dir = make_model(tmp_path / "model", family, **SIZES | MODELS[family])
    for index, layout in enumerate((ParallelLayout(pp=2), ParallelLayout(tp=2))):
        results = ranks.run(served, model_dir, tmp_path / f"out-{index}", layout, timeout_s=300)
        for gap, same_tokens, different in results:
            assert not different and same_tokens and gap < 1e-5
