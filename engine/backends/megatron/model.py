"""A GPTModel that ends in hidden states, built from a Hugging Face `config.json`, its layer made of parts of our own.

The head (logprobs or values) is applied by the caller, at response positions only: see `logprobs.py`.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.megatron.config import ModelConfig, Rope, read_model_config, transformer_config
from engine.backends.megatron.kernels import Rotate, SwiGLU
from engine.backends.megatron.logprobs import VocabShard
from engine.backends.megatron.parallel import World
from engine.backends.megatron.sequences import Tree
from engine.resharding.megatron import padded_vocab_size
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

Head = Literal["logprobs", "values"]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in Megatron's layer spec; unlike Megatron's wrapper it allows sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        # Under sequence parallelism each tp rank sees other tokens: Megatron sums the gradients of marked weights.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):
    """Rotary embedding and torch's scaled_dot_product_attention, causal or along a tree (see `sequences.py`).

    Padding on the right needs no mask: it stands after every real token, and its own outputs are never read.
    """

    def __init__(self, config: TransformerConfig, **unused: Any):
        super().__init__(config=config)
        self.rotary: Rotary | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tree | None,
                **unused: Any) -> Tensor:
        """Attend.

        Args:
            query: [T, s, heads, head_dim]; key, value: [T, s, kv heads, head_dim].
            attention_mask: Megatron's name for what it hands through to here.
        Returns:
            [T, s, heads * head_dim].
        """
        assert self.rotary is not None
        cos, sin = self.rotary.tables(query.shape[0], query.dtype)
        if attention_mask is not None:
            places = attention_mask.positions.t()
            cos, sin = cos[places, 0], sin[places, 0]
        query, key = Rotate.apply(query, cos, sin), Rotate.apply(key, cos, sin)
        context = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3),
            attn_mask=None if attention_mask is None else attention_mask.mask, is_causal=attention_mask is None,
            enable_gqa=query.shape[2] != key.shape[2])
        return context.permute(2, 0, 1, 3).flatten(2)


class Rotary:
    """Cosine and sine tables of a model, computed once and shared by its layers."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device):
        self._frequencies = rope.inverse_frequencies(head_dim).to(device)
        self._tables = torch.empty(2, 0)

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each [length, 1, 1, head_dim / 2]."""
        if self._tables.shape[1] < length or self._tables.dtype != dtype:
            positions = torch.arange(length, device=self._frequencies.device, dtype=torch.float32)
            angles = torch.outer(positions, self._frequencies)[:, None, None, :]
            self._tables = torch.stack([angles.cos(), angles.sin()]).to(dtype)
        cos, sin = self._tables[:, :length]
        return cos, sin


class GatedActivation(torch.nn.Module):
    """SwiGLU of Megatron's fused [gate; up] in one step each way."""

    def __init__(self, config: TransformerConfig):
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """[T, b, 2 F] -> [T, b, F]."""
        return SwiGLU.apply(gate_up)

    def sharded_state_dict(self, *unused: Any, **also_unused: Any) -> dict[str, Any]:
        """Nothing to save; Megatron's MLP asks all of its parts."""
        return {}


class CausalLM(GPTModel):
    """GPTModel whose output is [T / sp, s, hidden] after the final norm (last stage) or after its layers."""

    vocab_size_unpadded: int
    """Tokens of the checkpoint; Megatron's own `vocab_size` is padded to a multiple of tp."""
    value_head: torch.nn.Linear
    """Of a critic, on the last stage."""

    def forward(self, input_ids: Tensor, tree: Tree | None = None) -> Tensor:  # type: ignore[override]
        """input_ids: [s, T], T a multiple of tp under sequence parallelism; read on the first stage only."""
        return super().forward(input_ids=input_ids, position_ids=None, attention_mask=tree)

    def _postprocess(self, hidden_states: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return hidden_states

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """What a distributed checkpoint holds of this rank."""
        if self.post_process and self.output_layer is None:
            # A critic: Megatron's own method asks for the language-model head (0.16.1).
            return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def vocab_shard(self) -> VocabShard:
        """This tp rank's rows of the output matrix, without vocabulary padding."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights \
            else self.output_layer.weight
        start = weight.shape[0] * self.tp_group.rank()
        rows = min(weight.shape[0], max(0, self.vocab_size_unpadded - start))
        # Slicing costs a copy of the gradient: not where nothing is padded.
        return VocabShard(weight if rows == weight.shape[0] else weight[:rows], start, self.tp_group)


def build_model(model_dir: str | Path, world: World, head: Head, *, sequence_parallel: bool = False,
                random_init: bool = False) -> CausalLM:
    """This rank's part of the model in a Hugging Face directory, with parameters that are still to be loaded.

    Args:
        model_dir: with `config.json`; weights are loaded by `engine.resharding`.
        world: the rank's place.
        head: `logprobs` keeps the language-model head; `values` replaces it by Linear(hidden, 1), started at zero.
        sequence_parallel: divide norms and residuals over tp ranks by tokens.
        random_init: draw the parameters (tests, models from scratch) instead of leaving them uninitialised.
    Raises:
        ModelError: the model has a feature that is not supported.
        LayoutError: the layout does not divide the model.
    """
    model = read_model_config(model_dir)
    config = transformer_config(model, world, sequence_parallel=sequence_parallel, random_init=random_init)
    built = CausalLM(
        config,
        _block_spec(config),
        vocab_size=padded_vocab_size(model.shape.vocab_size, world.layout.tp),
        max_sequence_length=model.max_positions,
        pre_process=world.is_first_stage,
        post_process=world.is_last_stage,
        share_embeddings_and_output_weights=model.shape.tied_embeddings and head == "logprobs",
        position_embedding_type="none",
    )
    built.vocab_size_unpadded = model.shape.vocab_size
    rotary = Rotary(model.rope, model.shape.head_dim, world.device)
    for layer in built.decoder.layers:
        layer.self_attention.core_attention.rotary = rotary
    if head == "values" and world.is_last_stage:
        _replace_head(built, model, config)
    return built


def _replace_head(model: CausalLM, config: ModelConfig, megatron: TransformerConfig) -> None:
    model.output_layer = None
    model.value_head = torch.nn.Linear(
        config.shape.hidden_size, 1, bias=False, dtype=megatron.params_dtype, device=torch.cuda.current_device())
    # Zero values make the first advantages the rewards themselves; a random head would add noise to them.
    torch.nn.init.zeros_(model.value_head.weight)


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.mlp.submodules.activation_func = GatedActivation
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return TransformerBlockSubmodules(
        layer_specs=[layer] * (config.num_layers // stages), layer_norm=RMSNorm)
