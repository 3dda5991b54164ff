"""How ranks divide a model, and whether a model can be divided that way. The only rank arithmetic; torch-free."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from engine.errors import LayoutError, ModelError

Degree = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Coords:
    """Where one rank stands in a layout."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ParallelLayout:
    """How ranks divide the model. tp varies fastest, then dp, then pp: Megatron's order `tp-cp-ep-dp-pp`."""

    tp: Degree = 1
    """Tensor-parallel ranks: each holds a slice of every matrix."""
    pp: Degree = 1
    """Pipeline stages: each holds a run of layers."""
    dp: Degree = 1
    """Data-parallel replicas: each sees another part of the batch."""
    ep: Degree = 1
    """Expert-parallel ranks, taken out of dp: each holds a run of every layer's experts. Divides dp."""

    @property
    def world_size(self) -> int:
        """Ranks the layout needs."""
        return self.tp * self.pp * self.dp

    def coords(self, rank: int) -> Coords:
        """The coordinates of `rank`, 0 <= rank < world_size."""
        return Coords(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, coords: Coords) -> int:
        """The rank at `coords`; inverse of `coords()`."""
        return coords.tp + self.tp * (coords.dp + self.dp * coords.pp)

    def ranks_at(self, pp: int, tp: int | None = None, ep: int | None = None) -> range:
        """The ranks of a pipeline stage, of one tensor rank in it, or of one expert rank of that; ascending."""
        start, stop = self.tp * self.dp * pp, self.tp * self.dp * (pp + 1)
        if tp is None:
            return range(start, stop)
        if ep is None:
            return range(start + tp, stop, self.tp)
        return range(start + tp + self.tp * ep, stop, self.tp * self.ep)

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} dp={self.dp}" + (f" ep={self.ep}" if self.ep > 1 else "")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GenerationLayout:
    """How the same ranks serve the model: consecutive groups of tp ranks, each group one replica."""

    tp: Degree = 1
    """Ranks of one inference replica."""

    def replicas(self, world_size: int) -> int:
        """Independent replicas in a job of `world_size` ranks.

        Raises:
            LayoutError: the ranks do not fill whole replicas.
        """
        if world_size % self.tp:
            raise LayoutError(
                f"rollout tp={self.tp} does not divide the {world_size} ranks of the job; "
                f"choose a divisor of {world_size}"
            )
        return world_size // self.tp

    def replica(self, rank: int) -> int:
        """The replica that `rank` belongs to."""
        return rank // self.tp

    def place(self, rank: int) -> int:
        """Where in its replica `rank` stands, 0 <= place < tp; place 0 leads."""
        return rank % self.tp


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model, read from a Hugging Face `config.json`."""

    family: str
    """Hugging Face `model_type`: llama, qwen2, qwen3, mixtral, qwen3_moe."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0


FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def read_model_shape(model_dir: str | Path) -> ModelShape:
    """Read the sizes of the model in a Hugging Face directory.

    Raises:
        ModelError: config.json is missing or unreadable, or the family is not one of FAMILIES.
    """
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {model_dir}: cannot read config.json ({error}); give a Hugging Face directory") from None
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model {model_dir}: family {family!r} is not supported; known: {', '.join(FAMILIES)}")
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2" or config.get("attention_bias", False),
            o_bias=family != "qwen2" and config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            num_experts=config.get("num_local_experts") or config.get("num_experts") or 0,
            moe_ffn_hidden_size=config.get("moe_intermediate_size") or (
                config["intermediate_size"] if family == "mixtral" else 0),
        )
    except KeyError as error:
        raise ModelError(f"model {model_dir}: config.json has no {error}") from None


def check_layout(shape: ModelShape, layout: ParallelLayout) -> None:
    """Refuse a training layout that the model cannot be divided by.

    Raises:
        LayoutError: says which size is not divisible, with both numbers.
    """
    widths = [("attention heads", shape.num_heads), ("ffn width", shape.moe_ffn_hidden_size or shape.ffn_hidden_size)]
    for name, size in widths:
        if size % layout.tp:
            divisors = [d for d in range(1, shape.num_heads + 1) if all(width % d == 0 for _, width in widths)]
            raise LayoutError(
                f"layout tp={layout.tp} does not divide {size} {name}; tp can be one of {divisors[:8]}")
    if shape.num_kv_heads % layout.tp and layout.tp % shape.num_kv_heads:
        raise LayoutError(f"layout tp={layout.tp} and {shape.num_kv_heads} kv heads: one must divide the other")
    # With fewer kv heads than ranks Megatron cuts the fused qkv matrix through a group of heads.
    qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if qkv_rows % layout.tp:
        raise LayoutError(f"layout tp={layout.tp} does not divide the {qkv_rows} rows of the fused qkv matrix")
    if layout.dp % layout.ep or max(shape.num_experts, 1) % layout.ep:
        raise LayoutError(
            f"layout ep={layout.ep} must divide dp={layout.dp} and the model's {shape.num_experts} experts")
    if shape.num_layers % layout.pp:
        divisors = [d for d in range(1, shape.num_layers + 1) if shape.num_layers % d == 0]
        raise LayoutError(
            f"layout pp={layout.pp} does not divide {shape.num_layers} layers; pp can be one of {divisors}")


def check_generation_layout(shape: ModelShape, layout: GenerationLayout) -> None:
    """Refuse an inference layout that vLLM cannot shard the model by.

    Raises:
        LayoutError: query heads do not divide, or kv heads neither divide nor are divided.
    """
    if shape.num_heads % layout.tp:
        raise LayoutError(f"rollout tp={layout.tp} does not divide {shape.num_heads} attention heads")
    if shape.num_kv_heads % layout.tp and layout.tp % shape.num_kv_heads:
        raise LayoutError(
            f"rollout tp={layout.tp} and {shape.num_kv_heads} kv heads: one must divide the other")
