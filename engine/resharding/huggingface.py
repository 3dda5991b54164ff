"""Hugging Face files as a sharding: every tensor whole, each with the one rank that writes its file. Torch-free."""

from collections.abc import Hashable, Iterator, Mapping

from engine.resharding.boxes import Box, full_box
from engine.resharding.catalog import LogicalTensor
from engine.resharding.sharding import Cell, Piece, Sharding


class FileSharding(Sharding):
    """Tensors distributed whole over writers; a tensor is its own local parameter.

    Args:
        tensors: the logical tensors.
        writers: global rank that holds each tensor, by name.
    """

    def __init__(self, tensors: Mapping[str, LogicalTensor], writers: Mapping[str, int]):
        self.name, self.tensors, self._writers = "Hugging Face files", tensors, writers
        self.ranks = tuple(sorted(set(writers.values())))

    def key(self, tensor: LogicalTensor) -> Hashable:
        return self._writers[tensor.name]

    def cells(self, tensor: LogicalTensor) -> list[Cell]:
        return [Cell(full_box(tensor.shape), (self._writers[tensor.name],))]

    def place(self, tensor: LogicalTensor, box: Box, rank: int) -> Iterator[Piece]:
        yield Piece(tensor.name, box, tensor.name, (0,) * len(box))

    def local_params(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor, _ in self.held(rank)}
