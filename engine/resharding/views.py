"""Slices of local parameters as tensors: where boxes of the catalog meet memory."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import LayoutError
from engine.resharding.boxes import Box, intersect, relative
from engine.resharding.catalog import LogicalTensor
from engine.resharding.sharding import Holdings, Piece

_MERGE_ELEMENTS = 1 << 18
"""Elements of a weight that a low-rank update is added to at a time: 1 MiB of fp32 scratch."""


class LowRank(NamedTuple):
    """An update of a parameter that is added on the way: W + scale * b @ a (LoRA, arXiv:2106.09685)."""

    a: Tensor
    """[r, columns of the local parameter]"""
    b: Tensor
    """[rows of the local parameter, r]"""
    scale: float


class Read(NamedTuple):
    """A slice of a source parameter, and the update to add to it."""

    view: Tensor
    delta: LowRank | None = None

    def cut(self, index: tuple[slice, ...]) -> "Read":
        """A part of the slice."""
        delta = self.delta and LowRank(self.delta.a[:, index[1]], self.delta.b[index[0]], self.delta.scale)
        return Read(self.view[index], delta)

    def into(self, out: Tensor) -> None:
        """Write the slice, cast to `out`'s dtype, with the update added in fp32; the parameter stays as it is."""
        if self.delta is None:
            out.copy_(self.view)
            return
        rows = max(1, _MERGE_ELEMENTS // self.view.shape[1])
        for start in range(0, self.view.shape[0], rows):
            part = slice(start, start + rows)
            out[part].copy_(torch.addmm(self.view[part].float(), self.delta.b[part].float(), self.delta.a.float(),
                                        alpha=self.delta.scale))


def check_params(holdings: Holdings, params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that are not what the catalog says the rank holds.

    Raises:
        LayoutError: one is missing, unknown, or of another shape; names it, the rank, expected and found.
    """
    where = f"rank {holdings.rank} of {holdings.owner}"
    for name, shape in holdings.params.items():
        if name not in params:
            raise LayoutError(f"{name}: {where} should hold it with shape {shape}, the model has no such parameter")
        if tuple(params[name].shape) != tuple(shape):
            raise LayoutError(f"{name}: {where} should hold shape {tuple(shape)}, found {tuple(params[name].shape)}")
    unknown = [name for name in params if name not in holdings.params and not name.startswith(holdings.untouched)]
    if unknown:
        raise LayoutError(f"{unknown[0]}: {where} has this parameter (and {len(unknown) - 1} more) that the "
                          f"catalog does not know; its values would be lost")


def view_of(param: Tensor, piece: Piece, box: Box) -> Tensor:
    """`box`, a part of `piece`, as a view of the parameter that the piece lies in."""
    return param.detach()[_index(piece, box)]


def _index(piece: Piece, box: Box) -> tuple[int | slice, ...]:
    """Index of `box` in the piece's parameter: plain numbers for the dimensions the tensor does not have."""
    lead = len(piece.at) - len(box)
    return piece.at[:lead] + tuple(slice(at + cut.start, at + cut.stop)
                                   for at, cut in zip(piece.at[lead:], relative(box, piece.box), strict=True))


def views(holdings: Holdings, params: Mapping[str, Tensor], tensor: LogicalTensor,
          box: Box) -> Iterator[tuple[Box, Tensor]]:
    """The rank's memory of `box`: sub-boxes and a view of each."""
    for piece in holdings.by_tensor.get(tensor.name, ()):
        common = intersect(piece.box, box)
        if common is not None:
            yield common, view_of(params[piece.param], piece, common)


def reads(holdings: Holdings, params: Mapping[str, Tensor], deltas: Mapping[str, LowRank],
          part: tuple[LogicalTensor, Box]) -> Iterator[tuple[Box, Read]]:
    """The rank's memory of a slice as a source: sub-boxes and what to read for each."""
    tensor, box = part
    for piece in holdings.by_tensor.get(tensor.name, ()):
        common = intersect(piece.box, box)
        if common is None:
            continue
        whole = Read(params[piece.param].detach(), deltas.get(piece.param))
        yield common, whole.cut(_index(piece, common))


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two views of equal shape are the very same elements."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device


def shared_views(src: Holdings, dst: Holdings, src_params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The destination parameters that already lie in a source parameter, whole and in order: views, not copies.

    With equal tensor parallelism that is almost everything (not qkv, unless a rank has one kv head). An engine that
    takes such a view as its parameter (`param.data = view`) needs no memory for it, and the transfer skips it.

    Args:
        src, dst: holdings of the same rank. `src_params` are of the dtype the destination wants.
    Returns:
        Destination parameter name -> view of a source parameter, of the destination's shape.
    """
    shared = {}
    pieces_of: dict[str, list[Piece]] = {}
    for piece in dst.pieces:
        pieces_of.setdefault(piece.param, []).append(piece)
    for name, pieces in pieces_of.items():
        view = _shared_view(pieces, dst.params[name], src, src_params)
        if view is not None:
            shared[name] = view
    return shared


def _shared_view(pieces: list[Piece], shape: tuple[int, ...], src: Holdings,
                 params: Mapping[str, Tensor]) -> Tensor | None:
    starts, covered, probe = set(), 0, torch.empty(shape, device="meta")
    for piece in pieces:
        for held in src.by_tensor.get(piece.tensor, ()):
            common = intersect(held.box, piece.box)
            if common is None:
                continue
            have, want = view_of(params[held.param], held, common), view_of(probe, piece, common)
            if have.stride() != want.stride():
                return None
            covered += have.numel()
            starts.add((held.param, have.storage_offset() - want.storage_offset()))
    if len(starts) != 1 or covered != probe.numel():
        return None
    (param, start), = starts
    return params[param].detach().as_strided(shape, probe.stride(), start)
