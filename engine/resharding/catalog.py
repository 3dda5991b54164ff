"""The logical tensors of each model family: Hugging Face names and shapes, and the part each plays. Torch-free.

The only list of parameter names: Megatron, vLLM, FSDP and files say where these tensors lie, nothing else names them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.errors import ModelError
from engine.layout import ModelShape


class LogicalTensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    part: str
    """What it is, the same word in every family: embed, q, k, v, o, gate, up, down, router, input_norm ..."""
    kind: str = "weight"
    """weight or bias."""
    layer: int = -1
    """Index of its transformer layer; -1 outside of them."""
    expert: int = -1
    """Index of its expert; -1 for dense parts."""


@dataclass(frozen=True)
class LatentShape(ModelShape):
    """Sizes of a model with multi-head latent attention and leading dense layers (DeepSeek-V2/V3): plans only."""

    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    num_dense_layers: int = 0
    num_shared_experts: int = 0


SCORE = "score.weight"
_MOE_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", {"gate": "w1", "down": "w2", "up": "w3"}),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
    "deepseek_v3": ("mlp.gate", "mlp.experts.{}.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


@lru_cache(maxsize=8)
def catalog(shape: ModelShape, critic: bool = False, scored: bool = False) -> Mapping[str, LogicalTensor]:
    """Every tensor of the model by name, in checkpoint order. One mapping for all who ask: not to be changed.

    Args:
        shape: sizes of the model.
        critic: leave out the language-model head; a critic has a value head of its own, which no checkpoint holds.
        scored: add the head of a reward model, by transformers' name for sequence classification with one label.
    Raises:
        ModelError: an expert family without experts.
    """
    if shape.family in _MOE_NAMES and not shape.num_experts:
        raise ModelError(f"family {shape.family} needs num_experts, the configuration gives none")
    table = [LogicalTensor("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size), "embed")]
    for layer in range(shape.num_layers):
        table.extend(_layer(shape, layer))
    table.append(LogicalTensor("model.norm.weight", (shape.hidden_size,), "final_norm"))
    if not shape.tied_embeddings and not critic:
        table.append(LogicalTensor("lm_head.weight", (shape.vocab_size, shape.hidden_size), "lm_head"))
    if scored:
        table.append(LogicalTensor(SCORE, (1, shape.hidden_size), "score"))
    return {tensor.name: tensor for tensor in table}


def _layer(shape: ModelShape, layer: int) -> Iterator[LogicalTensor]:
    prefix = f"model.layers.{layer}."
    hidden = shape.hidden_size
    yield LogicalTensor(prefix + "input_layernorm.weight", (hidden,), "input_norm", layer=layer)
    attention = _latent_attention if isinstance(shape, LatentShape) else _attention
    for part, name, kind, size in attention(shape):
        yield LogicalTensor(f"{prefix}self_attn.{name}.{kind}", size, part, kind, layer)
    yield LogicalTensor(prefix + "post_attention_layernorm.weight", (hidden,), "post_norm", layer=layer)
    if shape.num_experts and layer >= getattr(shape, "num_dense_layers", 0):
        yield from _experts(shape, layer, prefix)
    else:
        yield from _mlp(prefix + "mlp.", layer, (hidden, shape.ffn_hidden_size), shape.mlp_bias)


def _attention(shape: ModelShape) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    hidden, q_size = shape.hidden_size, shape.num_heads * shape.head_dim
    kv_size = shape.num_kv_heads * shape.head_dim
    for part, name, size in (("q", "q_proj", q_size), ("k", "k_proj", kv_size), ("v", "v_proj", kv_size)):
        yield part, name, "weight", (size, hidden)
        if shape.qkv_bias:
            yield part, name, "bias", (size,)
    yield "o", "o_proj", "weight", (hidden, q_size)
    if shape.o_bias:
        yield "o", "o_proj", "bias", (hidden,)
    if shape.qk_norm:
        yield "q_norm", "q_norm", "weight", (shape.head_dim,)
        yield "k_norm", "k_norm", "weight", (shape.head_dim,)


def _latent_attention(shape: LatentShape) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    heads, hidden, nope = shape.num_heads, shape.hidden_size, shape.head_dim
    yield "q_a", "q_a_proj", "weight", (shape.q_lora_rank, hidden)
    yield "q_a_norm", "q_a_layernorm", "weight", (shape.q_lora_rank,)
    yield "q_b", "q_b_proj", "weight", (heads * (nope + shape.rope_head_dim), shape.q_lora_rank)
    yield "kv_a", "kv_a_proj_with_mqa", "weight", (shape.kv_lora_rank + shape.rope_head_dim, hidden)
    yield "kv_a_norm", "kv_a_layernorm", "weight", (shape.kv_lora_rank,)
    yield "kv_b", "kv_b_proj", "weight", (heads * (nope + shape.v_head_dim), shape.kv_lora_rank)
    yield "o", "o_proj", "weight", (hidden, heads * shape.v_head_dim)


def _mlp(prefix: str, layer: int, size: tuple[int, int], bias: bool) -> Iterator[LogicalTensor]:
    hidden, width = size
    kind_of_part = "shared_" if "shared" in prefix else ""
    for part, size in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        yield LogicalTensor(f"{prefix}{part}_proj.weight", size, kind_of_part + part, layer=layer)
        if bias:
            yield LogicalTensor(f"{prefix}{part}_proj.bias", size[:1], kind_of_part + part, "bias", layer)


def _experts(shape: ModelShape, layer: int, prefix: str) -> Iterator[LogicalTensor]:
    router, expert_prefix, names = _MOE_NAMES[shape.family]
    hidden, width = shape.hidden_size, shape.moe_ffn_hidden_size
    yield LogicalTensor(f"{prefix}{router}.weight", (shape.num_experts, hidden), "router", layer=layer)
    if isinstance(shape, LatentShape):
        yield LogicalTensor(f"{prefix}{router}.e_score_correction_bias", (shape.num_experts,), "router", "bias", layer)
    for expert in range(shape.num_experts):
        base = prefix + expert_prefix.format(expert)
        for part in ("gate", "up", "down"):
            size = (hidden, width) if part == "down" else (width, hidden)
            yield LogicalTensor(f"{base}{names[part]}.weight", size, "expert_" + part, "weight", layer, expert)
    shared = getattr(shape, "num_shared_experts", 0)
    if shared:
        yield from _mlp(prefix + "mlp.shared_experts.", layer, (hidden, shared * width), False)


def model_elements(shape: ModelShape) -> int:
    """M: parameters of the model."""
    total = 0
    for tensor in catalog(shape).values():
        size = 1
        for extent in tensor.shape:
            size *= extent
        total += size
    return total
