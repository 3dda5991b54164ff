"""Where FSDP2 keeps the logical tensors: every parameter cut along its first dimension over all ranks. Torch-free."""

from collections.abc import Hashable, Iterator

from engine.layout import ModelShape
from engine.resharding.boxes import Box, box_shape, full_box
from engine.resharding.catalog import LogicalTensor, catalog
from engine.resharding.rows import chunk
from engine.resharding.sharding import Cell, Piece, Sharding, merge_cells


class FsdpSharding(Sharding):
    """`fully_shard` over `world_size` ranks: rank i has the i-th `torch.chunk` of every parameter's first dimension.

    Parameters have their Hugging Face names; a rank beyond the last chunk holds nothing of that tensor.
    """

    def __init__(self, shape: ModelShape, world_size: int, *, critic: bool = False):
        self.name, self.world_size = f"FSDP dp={world_size}", world_size
        self.tensors = catalog(shape, critic)
        self.ranks = range(world_size)

    def key(self, tensor: LogicalTensor) -> Hashable:
        return None

    def cells(self, tensor: LogicalTensor) -> list[Cell]:
        rest = full_box(tensor.shape[1:])
        return merge_cells(
            Cell((chunk(tensor.shape[0], self.world_size, index), *rest), (rank,))
            for index, rank in enumerate(self.ranks))

    def place(self, tensor: LogicalTensor, box: Box, rank: int) -> Iterator[Piece]:
        yield Piece(tensor.name, box, tensor.name, (0,) * len(box))

    def local_params(self, rank: int) -> dict[str, tuple[int, ...]]:
        shapes = {tensor.name: (0, *tensor.shape[1:]) for tensor in self.tensors.values()}
        shapes |= {tensor.name: box_shape(box) for tensor, box in self.held(rank)}
        return shapes
