"""What a rank holds of a model: the vocabulary every target (Megatron, vLLM, FSDP, files) describes itself in."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Self

from engine.errors import LayoutError
from engine.resharding.boxes import Box, full_box, volume
from engine.resharding.catalog import LogicalTensor

Ranks = range | tuple[int, ...]
"""Ascending global ranks; a range where possible, so that membership and position cost nothing at 4,096 ranks."""


class Piece(NamedTuple):
    """A slice of a logical tensor and where it lies in a local parameter."""

    tensor: str
    """Hugging Face name of the logical tensor."""
    box: Box
    """The slice of the logical tensor."""
    param: str
    """Name of the local parameter."""
    at: tuple[int, ...]
    """First index of the slice in the parameter, one per parameter dimension. A parameter with more dimensions than
    the tensor (fused experts) holds the slice at one index of the leading ones."""


class Cell(NamedTuple):
    """A slice of a logical tensor and every rank that holds exactly it."""

    box: Box
    ranks: Ranks


@dataclass(frozen=True)
class Holdings:
    """Everything one rank holds."""

    owner: str
    """What the rank belongs to, for error messages: `Megatron tp=2 pp=1 dp=1`."""
    rank: int
    tensors: Mapping[str, LogicalTensor]
    """Every logical tensor of the model, held here or not."""
    pieces: tuple[Piece, ...]
    params: Mapping[str, tuple[int, ...]]
    """Shape of every local parameter the pieces lie in, padding included."""
    untouched: tuple[str, ...] = ()
    """Prefixes of parameters that are no part of the pretrained model (a critic's value head)."""
    by_tensor: dict[str, list[Piece]] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        grouped: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            grouped.setdefault(piece.tensor, []).append(piece)
        object.__setattr__(self, "by_tensor", grouped)


class Sharding(ABC):
    """How a set of ranks holds a model. Subclasses say, per logical tensor, which box each rank has and where it lies.

    `ranks[i]` is the global rank of the sharding's i-th rank (Megatron's or vLLM's own numbering): 0, 1, 2 ... unless
    it was put elsewhere with `on`, so two shardings can live on the same ranks, overlap, or be disjoint.
    """

    name: str
    tensors: Mapping[str, LogicalTensor]
    ranks: Ranks

    @abstractmethod
    def key(self, tensor: LogicalTensor) -> Hashable:
        """Tensors of equal key and shape have equal cells: what makes planning of huge models cheap."""

    @abstractmethod
    def cells(self, tensor: LogicalTensor) -> list[Cell]:
        """The distinct slices of `tensor` that ranks hold. Ranks with nothing of it appear in no cell."""

    @abstractmethod
    def place(self, tensor: LogicalTensor, box: Box, rank: int) -> Iterator[Piece]:
        """Where `rank`, which holds `box`, keeps it: pieces that cover the box exactly once (twice for a tied copy)."""

    @abstractmethod
    def local_params(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of `rank`, padding included."""

    @property
    def untouched(self) -> tuple[str, ...]:
        """Prefixes of parameter names outside the pretrained model; they are neither read nor written."""
        return ()

    def on(self, ranks: Sequence[int]) -> Self:
        """The same sharding elsewhere: its i-th rank is global rank `ranks[i]`.

        Raises:
            LayoutError: another number of ranks, or one named twice.
        """
        if len(ranks) != len(self.ranks) or len(set(ranks)) != len(ranks):
            raise LayoutError(f"{self.name}: needs {len(self.ranks)} distinct ranks, was given {list(ranks)[:16]}")
        moved = copy.copy(self)
        moved.ranks = ranks if isinstance(ranks, range) else tuple(ranks)
        return moved

    def holdings(self, rank: int) -> Holdings:
        """What global `rank` holds.

        Raises:
            LayoutError: the rank is not one of the sharding's.
        """
        if rank not in self.ranks:
            raise LayoutError(f"{self.name}: rank {rank} is not one of its {len(self.ranks)} ranks")
        pieces = [piece for tensor, box in self.held(rank) for piece in self.place(tensor, box, rank)]
        return Holdings(self.name, rank, self.tensors, tuple(pieces), self.local_params(rank), self.untouched)

    def held(self, rank: int) -> Iterator[tuple[LogicalTensor, Box]]:
        """The boxes of every logical tensor that global `rank` holds, in catalog order."""
        own: dict[Hashable, list[Box]] = {}
        for tensor in self.tensors.values():
            key = (self.key(tensor), tensor.shape)
            if key not in own:
                own[key] = [cell.box for cell in self.cells(tensor) if rank in cell.ranks]
            for box in own[key]:
                yield tensor, box


class FullSharding(Sharding):
    """Every rank holds the whole of every tensor under its own name: what gathering everything leads to."""

    def __init__(self, tensors: Mapping[str, LogicalTensor], ranks: Ranks):
        self.name, self.tensors, self.ranks = "full copies", tensors, ranks

    def key(self, tensor: LogicalTensor) -> Hashable:
        return None

    def cells(self, tensor: LogicalTensor) -> list[Cell]:
        return [Cell(full_box(tensor.shape), globalise(range(len(self.ranks)), self.ranks))]

    def place(self, tensor: LogicalTensor, box: Box, rank: int) -> Iterator[Piece]:
        yield Piece(tensor.name, box, tensor.name, (0,) * len(box))

    def local_params(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def merge_cells(cells: Iterator[Cell]) -> list[Cell]:
    """Drop empty boxes and join the ranks of equal ones (replicated kv heads, a tied copy on the last stage)."""
    ranks_of: dict[Box, Ranks] = {}
    for box, ranks in cells:
        if not volume(box) or not len(ranks):
            continue
        ranks_of[box] = tuple(sorted({*ranks_of[box], *ranks})) if box in ranks_of else ranks
    return [Cell(box, ranks) for box, ranks in ranks_of.items()]


@lru_cache(maxsize=65536)
def globalise(ranks: Ranks, mapping: Ranks) -> Ranks:
    """Global ranks of a sharding's own `ranks`: `mapping[i]` for each i, ascending; a range stays one where it can."""
    if isinstance(ranks, range) and isinstance(mapping, range) and mapping.step == 1:
        return range(ranks.start + mapping.start, ranks.stop + mapping.start, ranks.step)
    return tuple(sorted(mapping[rank] for rank in ranks))

