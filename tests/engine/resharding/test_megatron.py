"""The catalog against Megatron-core itself: its parameters, its forward pass, and its own resharding as an oracle."""

import pytest
import torch
import torch.distributed as dist

from engine.layout import ParallelLayout, read_model_shape
from engine.resharding.execute import SyncOptions, WeightSync
from engine.resharding.load import load_hf
from engine.resharding.megatron import MegatronSharding, padded_vocab_size
from engine.resharding.plan import plan_rank
from tests.engine.multiprocess import shared_ranks
from tests.engine.resharding.hf_models import make_model

DEGREES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
LAYOUTS = [ParallelLayout(tp=tp, pp=pp, dp=4 // tp // pp) for tp, pp in DEGREES]
MODELS = {"llama": {"num_key_value_heads": 4}, "qwen2": {"num_key_value_heads": 4, "tie_word_embeddings": True},
          "qwen3": {"num_key_value_heads": 2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family, vocab_size=99, **sizes) for family, sizes in MODELS.items()}


def built(model_dir, layout, head="logprobs"):
    from engine.backends.megatron.model import build_model
    from engine.backends.megatron.parallel import start_world

    return build_model(model_dir, start_world(layout), head, random_init=True)


def parameters(model):
    return {name: param.detach() for name, param in model.named_parameters()}


def same_parameters(model_dir):
    shape = read_model_shape(model_dir)
    for layout in LAYOUTS:
        for head in ("logprobs", "values"):
            model = built(model_dir, layout, head)
            holdings = MegatronSharding(shape, layout, critic=head == "values").holdings(dist.get_rank())
            own = {name: tuple(value.shape) for name, value in parameters(model).items()
                   if not name.startswith(holdings.untouched)}
            assert own == holdings.params, (str(layout), head)


@pytest.mark.parametrize("family", MODELS)
def test_the_catalog_has_the_parameters_of_the_model_that_is_trained(models, family):
    shared_ranks(4).run(same_parameters, models[family])


def swapped(model_dir, src_layout, dst_layout):
    """Ours and megatron-core's refit from one source."""
    from megatron.core.resharding import refit

    refit.clear_service_cache()
    shape, source = read_model_shape(model_dir), built(model_dir, src_layout)
    rank = dist.get_rank()
    src = MegatronSharding(shape, src_layout)
    load_hf(model_dir, src.holdings(rank), parameters(source))
    theirs, ours = built(model_dir, dst_layout), built(model_dir, dst_layout)
    for value in (*parameters(theirs).values(), *parameters(ours).values()):
        value.zero_()
    refit.swap_model_weights(source, theirs, "gloo")
    plan = plan_rank(src, MegatronSharding(shape, dst_layout), rank)
    WeightSync(plan, parameters(source), parameters(ours), None, SyncOptions(timeout_s=60, bucket_bytes=1 << 14)).run(1)
    want, got = parameters(theirs), parameters(ours)
    assert want.keys() == got.keys()
    padding = {"embedding.word_embeddings.weight", "output_layer.weight"}
    for name, value in want.items():
        # megatron-core moves the padding rows too; to us they are no part of the model.
        rows = own_vocabulary(shape, dst_layout, rank) if name in padding else value.shape[0]
        assert torch.equal(got[name][:rows], value[:rows]) and value[:rows].any(), name


def own_vocabulary(shape, layout, rank):
    per_rank = padded_vocab_size(shape.vocab_size, layout.tp) // layout.tp
    return min(per_rank, shape.vocab_size - layout.coords(rank).tp * per_rank)


PAIRS = [(2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 2), (4, 1, 2, 2), (1, 4, 4, 1), (1, 2, 2, 1), (2, 1, 1, 4)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "tp{}pp{}-tp{}pp{}".format(*p))
def test_megatron_cores_own_resharding_gives_the_same_parameters(models, pair, tmp_path):
    # 100 rows: its planner needs the padded vocabulary to be the same under both layouts.
    model_dir = make_model(tmp_path / "model", "llama", num_key_value_heads=4, vocab_size=100)
    tp, pp, to_tp, to_pp = pair
    shared_ranks(4).run(swapped, model_dir, ParallelLayout(tp=tp, pp=pp, dp=4 // tp // pp),
                        ParallelLayout(tp=to_tp, pp=to_pp, dp=4 // to_tp // to_pp))


def hidden_states(model_dir, layout, ids):
    model, sharding = built(model_dir, layout), MegatronSharding(read_model_shape(model_dir), layout)
    load_hf(model_dir, sharding.holdings(dist.get_rank()), parameters(model))
    with torch.no_grad():
        return model.eval()(ids).transpose(0, 1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_megatron_computes_what_transformers_does_with_kv_heads_below_and_above_tp(kv_heads, tmp_path):
    from transformers import AutoModelForCausalLM

    model_dir = make_model(tmp_path / "model", "qwen2", num_key_value_heads=kv_heads)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(model_dir).eval().model(ids).last_hidden_state
    for tp in (1, 2, 4):
        for got in shared_ranks(4).run(hidden_states, model_dir, ParallelLayout(tp=tp, dp=4 // tp), ids):
            assert (got - want).abs().max() < 2e-5


def expert_parameters(model_dir, layout):
    """Parameter shapes of a GPTModel of Megatron's own local spec with experts."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from engine.backends.megatron.model import RMSNorm
    from engine.backends.megatron.parallel import start_world

    start_world(ParallelLayout(dp=4))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep)
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    shape = read_model_shape(model_dir)
    config = TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.ffn_hidden_size,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size, num_moe_experts=shape.num_experts, kv_channels=shape.head_dim,
        num_attention_heads=shape.num_heads, num_query_groups=shape.num_kv_heads, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        qk_layernorm=shape.qk_norm, tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep, sequence_parallel=layout.tp > 1, pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall", persist_layer_norm=False)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    # Megatron's torch norm refuses sequence parallelism, which experts need under tp.
    spec.layer_norm = RMSNorm
    for parts in (layer.submodules for layer in spec.layer_specs):
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if config.qk_layernorm:
            parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    model = GPTModel(config, spec, vocab_size=padded_vocab_size(shape.vocab_size, layout.tp), max_sequence_length=64,
                     pre_process=parallel_state.is_pipeline_first_stage(),
                     post_process=parallel_state.is_pipeline_last_stage(), position_embedding_type="rope")
    own = {name: tuple(param.shape) for name, param in model.named_parameters()}
    parallel_state.destroy_model_parallel()
    assert own == MegatronSharding(shape, layout).holdings(dist.get_rank()).params


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_catalog_has_megatrons_parameters_of_experts(family, tmp_path):
    model_dir = make_model(tmp_path / "model", family)
    for layout in (ParallelLayout(dp=4, ep=4), ParallelLayout(tp=2, dp=2, ep=2), ParallelLayout(pp=2, dp=2, ep=2)):
        shared_ranks(4).run(expert_parameters, model_dir, layout)
