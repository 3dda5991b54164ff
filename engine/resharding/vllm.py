"""Where vLLM keeps the logical tensors (0.28 to 0.32), unquantised. Torch-free.

Names and cuts read in the installed source: layers/linear.py (fused [Q; K; V] and [gate; up], replicated kv heads),
layers/vocab_parallel_embedding.py (padding to 64), layers/fused_moe (w13 = [gate; up] and w2 per local expert).
"""

from collections.abc import Hashable, Iterator

from engine.errors import LayoutError
from engine.layout import GenerationLayout, ModelShape, check_generation_layout
from engine.resharding.boxes import Box, box_shape, full_box
from engine.resharding.catalog import LogicalTensor, catalog
from engine.resharding.rows import Interval, even, padded, padded_part
from engine.resharding.sharding import Cell, Piece, Sharding, globalise, merge_cells

VOCAB_PADDING = 64
"""Rows vLLM pads its vocabulary tables to a multiple of (DEFAULT_VOCAB_PADDING_SIZE)."""

_MOE_MODULE = {"mixtral": "block_sparse_moe"}
_LAYER_PARAMS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q": "self_attn.qkv_proj", "k": "self_attn.qkv_proj", "v": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj", "down": "mlp.down_proj",
    "router": "{moe}.gate",
    "expert_gate": "{moe}.experts.routed_experts.w13_weight",
    "expert_up": "{moe}.experts.routed_experts.w13_weight",
    "expert_down": "{moe}.experts.routed_experts.w2_weight",
    "shared_gate": "mlp.shared_experts.gate_up_proj",
    "shared_up": "mlp.shared_experts.gate_up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
    "q_a": "self_attn.fused_qkv_a_proj", "kv_a": "self_attn.fused_qkv_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
}
_OUTER_PARAMS = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_ROWS = ("gate", "up", "q_b", "kv_b")
_COLUMNS = ("o", "down")


class VllmSharding(Sharding):
    """A model served by vLLM replicas of tp ranks each.

    vLLM's external launcher makes replicas of consecutive ranks. An engine that is free to choose takes
    `.on(grouped_ranks(...))`, HybridFlow's grouping.

    Args:
        shape: sizes of the model.
        layout: tp of one replica; ranks i*tp .. (i+1)*tp - 1 of the sharding form replica i.
        world_size: ranks over all replicas.
        expert_parallel: experts are distributed whole over a replica's ranks instead of each cut by tp.
    Raises:
        LayoutError: the layout cannot hold the model.
    """

    def __init__(self, shape: ModelShape, layout: GenerationLayout, world_size: int, *, expert_parallel: bool = False):
        check_generation_layout(shape, layout)
        layout.replicas(world_size)
        self.name = f"vLLM tp={layout.tp}"
        self.shape, self.tp, self.world_size = shape, layout.tp, world_size
        self.tensors = catalog(shape)
        self.ranks = range(world_size)
        self.vocab_rows = padded(shape.vocab_size, VOCAB_PADDING)
        if self.vocab_rows % self.tp:
            raise LayoutError(f"{self.name}: does not divide the {self.vocab_rows} rows vLLM pads the vocabulary to")
        self.expert_parallel = expert_parallel
        if expert_parallel and shape.num_experts % self.tp:
            raise LayoutError(f"{self.name}: {shape.num_experts} experts do not divide over {self.tp} ranks")
        self._experts_per_rank = max(1, shape.num_experts // (self.tp if expert_parallel else 1))

    def key(self, tensor: LogicalTensor) -> Hashable:
        expert = tensor.expert // self._experts_per_rank if tensor.expert >= 0 else -1
        return tensor.part, tensor.kind, expert

    def cells(self, tensor: LogicalTensor) -> list[Cell]:
        return merge_cells(self._cells(tensor))

    def _cells(self, tensor: LogicalTensor) -> Iterator[Cell]:
        if tensor.expert >= 0 and self.expert_parallel:
            owner = range(tensor.expert // self._experts_per_rank, self.world_size, self.tp)
            yield Cell(full_box(tensor.shape), globalise(owner, self.ranks))
        elif self._is_cut(tensor):
            for index in range(self.tp):
                yield Cell(self._box(tensor, index), globalise(range(index, self.world_size, self.tp), self.ranks))
        else:
            yield Cell(full_box(tensor.shape), globalise(range(self.world_size), self.ranks))

    def _is_cut(self, tensor: LogicalTensor) -> bool:
        part = tensor.part.removeprefix("expert_").removeprefix("shared_")
        if part in _COLUMNS:
            return tensor.kind == "weight"
        return part in _ROWS or part in ("q", "k", "v", "embed", "lm_head")

    def _box(self, tensor: LogicalTensor, index: int) -> Box:
        """The slice of a cut tensor on tensor rank `index`."""
        part = tensor.part.removeprefix("expert_").removeprefix("shared_")
        if part in ("k", "v"):
            rows = self._kv_rows(index)
        elif part in ("embed", "lm_head"):
            rows = padded_part(tensor.shape[0], self.tp, index, self.vocab_rows)
        elif part in _COLUMNS:
            return (0, tensor.shape[0]), even(tensor.shape[1], self.tp, index, f"{self.name}: columns of {tensor.name}")
        else:
            rows = even(tensor.shape[0], self.tp, index, f"{self.name}: rows of {tensor.name}")
        return rows, *full_box(tensor.shape[1:])

    def _kv_rows(self, index: int) -> Interval:
        """Rows of k or v on tensor rank `index`; a kv head is replicated when there are more ranks than heads."""
        heads, head = self.shape.num_kv_heads, self.shape.head_dim
        if self.tp >= heads:
            kv_head = index // (self.tp // heads)
            return kv_head * head, (kv_head + 1) * head
        return even(heads * head, self.tp, index, f"{self.name}: kv heads")

    def place(self, tensor: LogicalTensor, box: Box, rank: int) -> Iterator[Piece]:
        at = (self._row_offset(tensor, box_shape(box)[0]),) + (0,) * (len(box) - 1)
        if tensor.expert >= 0:
            at = (tensor.expert % self._experts_per_rank, *at)
        yield Piece(tensor.name, box, self._param_name(tensor), at)

    def _row_offset(self, tensor: LogicalTensor, rows: int) -> int:
        """Where the tensor's rows start in the fused parameter it is part of."""
        if tensor.part in ("k", "v"):
            q_rows = self.shape.num_heads // self.tp * self.shape.head_dim
            return q_rows + (rows if tensor.part == "v" else 0)
        if tensor.part == "kv_a":
            return self.shape.q_lora_rank
        return rows if tensor.part.endswith("up") else 0

    def _param_name(self, tensor: LogicalTensor) -> str:
        if tensor.layer < 0:
            return _OUTER_PARAMS[tensor.part]
        name = _LAYER_PARAMS[tensor.part].format(moe=_MOE_MODULE.get(self.shape.family, "mlp"))
        if tensor.expert >= 0:
            return f"model.layers.{tensor.layer}.{name}"
        kind = "e_score_correction_bias" if (tensor.part, tensor.kind) == ("router", "bias") else tensor.kind
        return f"model.layers.{tensor.layer}.{name}.{kind}"

    def local_params(self, rank: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor, box in self.held(rank):
            param, (rows, *rest) = self._param_name(tensor), box_shape(box)
            known = shapes.get(param)
            if tensor.expert >= 0:
                # [local experts, rows of gate and up (or of down), columns]; each expert fills the same rows.
                first = tensor.expert % self._experts_per_rank == 0
                above = known[1] if known and first else 0
                shapes[param] = (self._experts_per_rank, above + rows, *rest) if first else known
            else:
                shapes[param] = ((known[0] if known else 0) + rows, *rest)
        for tensor in self.tensors.values():
            if tensor.part in ("embed", "lm_head"):
                shapes[self._param_name(tensor)] = (self.vocab_rows // self.tp, *tensor.shape[1:])
        return shapes
