"""Hugging Face `config.json` -> Megatron's `TransformerConfig`, and what Megatron's config has no field for."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.backends.megatron.parallel import World
from engine.errors import LayoutError, ModelError
from engine.layout import ModelShape, check_layout, read_model_shape
from megatron.core.transformer.transformer_config import TransformerConfig

DENSE_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a checkpoint."""

    theta: float
    kind: str
    """default, linear or llama3."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    """Positions the model was trained on before it was stretched."""

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2] float32: radians per position of each pair of channels.

        Source: arXiv:2104.09864 sec. 3.2.2; linear, arXiv:2306.15595; llama3, the Llama 3.1 release: wavelengths beyond
        original_context / low_freq_factor are stretched by `factor`, those below original_context / high_freq_factor
        kept, the ones between interpolated.
        """
        base = self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        frequencies = 1.0 / base
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "default":
            return frequencies
        turns = self.original_context * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a checkpoint that building its Megatron model needs."""

    shape: ModelShape
    rope: Rope
    norm_epsilon: float
    init_std: float
    max_positions: int


def read_model_config(model_dir: str | Path) -> ModelConfig:
    """Read a Hugging Face directory's `config.json`, of transformers 4 or 5.

    Raises:
        ModelError: the file is missing, or the model has a feature that this backend does not compute.
    """
    shape = read_model_shape(model_dir)
    config = json.loads((Path(model_dir) / "config.json").read_text())
    if shape.family not in DENSE_FAMILIES:
        raise ModelError(f"model {model_dir}: training of family {shape.family!r} is not supported; "
                         f"known: {', '.join(DENSE_FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"model {model_dir}: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    if "sliding_attention" in config.get("layer_types", ()) or config.get("use_sliding_window"):
        raise ModelError(f"model {model_dir}: sliding-window attention is not supported")
    if shape.o_bias != shape.mlp_bias:
        raise ModelError(f"model {model_dir}: attention_bias={shape.o_bias} with mlp_bias={shape.mlp_bias} is not "
                         f"supported; Megatron has one switch for both")
    return ModelConfig(
        shape=shape,
        rope=_read_rope(model_dir, config),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        init_std=config.get("initializer_range", 0.02),
        max_positions=config.get("max_position_embeddings", 2048),
    )


def _read_rope(model_dir: str | Path, config: dict[str, Any]) -> Rope:
    # transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling, with `type` before `rope_type`.
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"model {model_dir}: rope_type {kind!r} is not supported; known: default, linear, llama3")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"model {model_dir}: partial_rotary_factor is not supported")
    return Rope(
        theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        kind=kind,
        factor=rope.get("factor", 1.0),
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        original_context=rope.get("original_max_position_embeddings", 8192),
    )


def transformer_config(model: ModelConfig, world: World, *, sequence_parallel: bool,
                       random_init: bool) -> TransformerConfig:
    """Megatron's config: dense, pre-norm, SwiGLU; bf16 on GPU, fp32 on CPU; no fused kernels that need extra packages.

    Raises:
        LayoutError: the layout does not divide the model.
    """
    shape, layout = model.shape, world.layout
    check_layout(shape, layout)
    if layout.ep > 1:
        raise LayoutError(f"layout ep={layout.ep}: family {shape.family!r} has no experts; remove ep")
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    # Only for its side effect: Megatron marks parameters as tensor-parallel where it initialises them.
    initializers = {} if random_init else {"init_method": _leave, "output_layer_init_method": _leave,
                                           "embedding_init_method": _leave}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        # The activation is a module of the layer spec (ours, see model.py) that sees gate and up together.
        use_te_activation_func=True,
        add_bias_linear=shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_std,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        # Megatron refuses variable lengths with its default dispatcher, even without experts.
        moe_token_dispatcher_type="alltoall",
        # Losses arrive with their denominators: neither the number of microbatches nor dp may divide them.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **initializers,
    )


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
