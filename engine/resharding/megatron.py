"""Where Megatron-core keeps the logical tensors: GPTModel of the local layer spec, 0.16. Torch-free.

Names and cuts read in the installed source: models/gpt/gpt_model.py, transformer/attention.py (interleaved qkv),
transformer/mlp.py, transformer/moe/experts.py (SequentialMLP), transformer/transformer_layer.py (layer offsets).
"""

from collections.abc import Hashable, Iterator

from engine.errors import LayoutError
from engine.layout import ModelShape, ParallelLayout, check_layout
from engine.resharding.boxes import Box, box_shape, full_box
from engine.resharding.catalog import LogicalTensor, catalog
from engine.resharding.rows import Interval, even, padded, padded_part
from engine.resharding.sharding import Cell, Piece, Sharding, globalise, merge_cells

_QKV = "self_attention.linear_qkv"
_LAYER_PARAMS = {
    "input_norm": "input_layernorm",
    "post_norm": "pre_mlp_layernorm",
    "q": _QKV, "k": _QKV, "v": _QKV,
    "q_norm": "self_attention.q_layernorm",
    "k_norm": "self_attention.k_layernorm",
    "o": "self_attention.linear_proj",
    "gate": "mlp.linear_fc1", "up": "mlp.linear_fc1", "down": "mlp.linear_fc2",
    "router": "mlp.router",
    "expert_gate": "mlp.experts.local_experts.{expert}.linear_fc1",
    "expert_up": "mlp.experts.local_experts.{expert}.linear_fc1",
    "expert_down": "mlp.experts.local_experts.{expert}.linear_fc2",
    "shared_gate": "mlp.shared_experts.linear_fc1",
    "shared_up": "mlp.shared_experts.linear_fc1",
    "shared_down": "mlp.shared_experts.linear_fc2",
    "q_a": "self_attention.linear_q_down_proj",
    "q_a_norm": "self_attention.q_layernorm",
    "q_b": "self_attention.linear_q_up_proj",
    "kv_a": "self_attention.linear_kv_down_proj",
    "kv_a_norm": "self_attention.kv_layernorm",
    "kv_b": "self_attention.linear_kv_up_proj",
}
_ROWS = ("gate", "up", "q_b", "kv_b")
_COLUMNS = ("o", "down")
_HEAD = "output_layer"


class MegatronSharding(Sharding):
    """A model under Megatron's tensor, pipeline, expert and data parallelism.

    Args:
        shape: sizes of the model.
        layout: tp, pp, dp, ep; experts are cut by tp too (Megatron's default expert_tensor_parallel_size).
        vocab_multiple: the vocabulary is padded to a multiple of this times tp, see `padded_vocab_size`.
        critic: a backbone without language-model head; its value head is left alone.
        virtual_stages: model chunks per pipeline rank (interleaved 1F1B); above 1, names start with `model{chunk}.`.
    Raises:
        LayoutError: the layout cannot hold the model.
    """

    def __init__(self, shape: ModelShape, layout: ParallelLayout, *, vocab_multiple: int = 1, critic: bool = False,
                 virtual_stages: int = 1):
        check_layout(shape, layout)
        chunks = layout.pp * virtual_stages
        if shape.num_layers % chunks or (virtual_stages > 1 and layout.pp == 1):
            raise LayoutError(f"{shape.num_layers} layers do not divide over pp={layout.pp} x {virtual_stages} virtual "
                              f"stages (virtual stages need pp > 1)")
        self.name = f"Megatron {layout}"
        self.shape, self.layout, self.critic, self.virtual_stages = shape, layout, critic, virtual_stages
        self.vocab_multiple = vocab_multiple
        self.tensors = catalog(shape, critic)
        self.ranks = range(layout.world_size)
        self.vocab_rows = padded_vocab_size(shape.vocab_size, layout.tp, vocab_multiple)
        self._layers_per_chunk = shape.num_layers // chunks
        self._experts_per_rank = shape.num_experts // layout.ep

    @property
    def untouched(self) -> tuple[str, ...]:
        return (f"{_HEAD}.", "value_head.") if self.critic else ()

    # -- which ranks hold what ------------------------------------------------------------------------------------

    def key(self, tensor: LogicalTensor) -> Hashable:
        expert = tensor.expert // self._experts_per_rank if tensor.expert >= 0 else -1
        return tensor.part, tensor.kind, self._stages(tensor), expert

    def cells(self, tensor: LogicalTensor) -> list[Cell]:
        return merge_cells(self._cells(tensor))

    def _cells(self, tensor: LogicalTensor) -> Iterator[Cell]:
        expert = tensor.expert // self._experts_per_rank if tensor.expert >= 0 else None
        for stage in self._stages(tensor):
            if not self._is_cut(tensor):
                yield Cell(full_box(tensor.shape), globalise(self.layout.ranks_at(pp=stage), self.ranks))
                continue
            for index in range(self.layout.tp):
                ranks = self.layout.ranks_at(tp=index, pp=stage, ep=expert)
                yield Cell(self._box(tensor, index), globalise(ranks, self.ranks))

    def _stages(self, tensor: LogicalTensor) -> tuple[int, ...]:
        last = self.layout.pp - 1
        if tensor.layer >= 0:
            return (tensor.layer // self._layers_per_chunk % self.layout.pp,)
        if tensor.part != "embed":
            return (last,)
        # A tied model keeps a second copy of the embedding on the last stage, as its output layer.
        return (0, last) if self._has_tied_copy() else (0,)

    def _has_tied_copy(self) -> bool:
        return self.shape.tied_embeddings and not self.critic and self.layout.pp > 1

    def _is_cut(self, tensor: LogicalTensor) -> bool:
        part = tensor.part.removeprefix("expert_").removeprefix("shared_")
        if part in _COLUMNS:
            return tensor.kind == "weight"
        return part in _ROWS or part in ("q", "k", "v", "embed", "lm_head")

    def _box(self, tensor: LogicalTensor, index: int) -> Box:
        """The slice of a cut tensor on tensor rank `index`."""
        tp, part = self.layout.tp, tensor.part.removeprefix("expert_").removeprefix("shared_")
        if part in ("q", "k", "v"):
            rows = self._head_rows(part, index)
        elif part in ("embed", "lm_head"):
            rows = padded_part(tensor.shape[0], tp, index, self.vocab_rows)
        elif part in _COLUMNS:
            return (0, tensor.shape[0]), even(tensor.shape[1], tp, index, f"{self.name}: columns of {tensor.name}")
        else:
            rows = even(tensor.shape[0], tp, index, f"{self.name}: rows of {tensor.name}")
        return rows, *full_box(tensor.shape[1:])

    # -- the interleaved qkv: for each kv group its query heads, its key head, its value head ------------------------

    def _group_blocks(self) -> tuple[int, dict[str, Interval]]:
        """Rows of one kv group, and within it the rows of its q, k and v."""
        head = self.shape.head_dim
        q_rows = self.shape.num_heads // self.shape.num_kv_heads * head
        blocks = {"q": (0, q_rows), "k": (q_rows, q_rows + head), "v": (q_rows + head, q_rows + 2 * head)}
        return q_rows + 2 * head, blocks

    def _qkv_rows(self, index: int) -> Interval:
        """Rows of the interleaved matrix on tensor rank `index`; with fewer kv heads than ranks a group is cut."""
        group, _ = self._group_blocks()
        return even(group * self.shape.num_kv_heads, self.layout.tp, index, f"{self.name}: rows of qkv")

    def _head_rows(self, part: str, index: int) -> Interval:
        """Rows of q, k or v on tensor rank `index`, in the order of the logical tensor."""
        group, blocks = self._group_blocks()
        start, stop = blocks[part]

        def before(row: int) -> int:
            return row // group * (stop - start) + min(max(row % group - start, 0), stop - start)

        first, last = self._qkv_rows(index)
        return before(first), before(last)

    def _qkv_pieces(self, tensor: LogicalTensor, box: Box, param: str, index: int) -> Iterator[Piece]:
        group, blocks = self._group_blocks()
        start, stop = blocks[tensor.part]
        width, first = stop - start, self._qkv_rows(index)[0]
        row, end = box[0]
        while row < end:
            run = min(end, (row // width + 1) * width)
            at = row // width * group + start + row % width - first
            yield Piece(tensor.name, ((row, run), *box[1:]), param, (at,) + (0,) * (len(box) - 1))
            row = run

    # -- where a rank keeps it -------------------------------------------------------------------------------------

    def _coords(self, rank: int):
        return self.layout.coords(self.ranks.index(rank))

    def place(self, tensor: LogicalTensor, box: Box, rank: int) -> Iterator[Piece]:
        coords = self._coords(rank)
        for param in self._param_names(tensor, coords.pp):
            if tensor.part in ("q", "k", "v"):
                yield from self._qkv_pieces(tensor, box, param, coords.tp)
                continue
            row = box[0][1] - box[0][0] if tensor.part.endswith("up") else 0
            yield Piece(tensor.name, box, param, (row,) + (0,) * (len(box) - 1))

    def _param_names(self, tensor: LogicalTensor, stage: int) -> list[str]:
        first_chunk, last_chunk = self._chunk_prefix(0), self._chunk_prefix(self.virtual_stages - 1)
        head, last = f"{last_chunk}{_HEAD}.weight", self.layout.pp - 1
        if tensor.part == "embed":
            names = [f"{first_chunk}embedding.word_embeddings.weight"] if stage == 0 else []
            return names + ([head] if stage == last and self._has_tied_copy() else [])
        if tensor.part == "lm_head":
            return [head]
        if tensor.part == "final_norm":
            return [f"{last_chunk}decoder.final_layernorm.weight"]
        chunk, layer = divmod(tensor.layer, self._layers_per_chunk)
        name = _LAYER_PARAMS[tensor.part].format(expert=tensor.expert % max(self._experts_per_rank, 1))
        # The correction bias of DeepSeek's router is Megatron's expert_bias.
        kind = "expert_bias" if (tensor.part, tensor.kind) == ("router", "bias") else tensor.kind
        return [f"{self._chunk_prefix(chunk // self.layout.pp)}decoder.layers.{layer}.{name}.{kind}"]

    def _chunk_prefix(self, chunk: int) -> str:
        return f"model{chunk}." if self.virtual_stages > 1 else ""

    def local_params(self, rank: int) -> dict[str, tuple[int, ...]]:
        coords, shapes = self._coords(rank), {}
        for tensor, box in self.held(rank):
            rows, rest = box_shape(box)[0], box_shape(box)[1:]
            for param in self._param_names(tensor, coords.pp):
                shapes[param] = (shapes.get(param, (0,))[0] + rows, *rest)
        # Tables are padded, and the last ranks may hold nothing but padding.
        for part in ("embed", "lm_head"):
            for tensor in (tensor for tensor in self.tensors.values() if tensor.part == part):
                for param in self._param_names(tensor, coords.pp) if coords.pp in self._stages(tensor) else ():
                    shapes[param] = (self.vocab_rows // self.layout.tp, *tensor.shape[1:])
        return shapes


class RewardModelSharding(MegatronSharding):
    """A critic's backbone with its value head as one more tensor: a reward model, read from files and written to them.

    Args and raises: as `MegatronSharding`.
    """

    def __init__(self, shape: ModelShape, layout: ParallelLayout):
        super().__init__(shape, layout, critic=True)
        self.tensors = catalog(shape, critic=True, scored=True)

    @property
    def untouched(self) -> tuple[str, ...]:
        return (f"{_HEAD}.",)

    def _param_names(self, tensor: LogicalTensor, stage: int) -> list[str]:
        return ["value_head.weight"] if tensor.part == "score" else super()._param_names(tensor, stage)


def padded_vocab_size(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Rows of Megatron's embedding: the vocabulary rounded up to a multiple of `multiple` x tp."""
    return padded(vocab_size, multiple * tp)
