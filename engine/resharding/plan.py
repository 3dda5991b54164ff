"""Which slice goes from whom to whom: a pure function of two shardings. Torch-free.

A rank plans only its own part. Tensors whose slices and ranks are alike (the same weight in the layers of one pipeline
stage) are planned once, so 4,096 ranks and hundreds of billions of parameters take well under a second.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from engine.errors import ReshardError
from engine.resharding.atoms import Atoms
from engine.resharding.boxes import Box, volume
from engine.resharding.catalog import LogicalTensor
from engine.resharding.placement import PAPER_CLUSTER, Exchange, Placement
from engine.resharding.sharding import Cell, Ranks, Sharding


class Transfer(NamedTuple):
    """One slice on its way from a rank to another."""

    tensor: LogicalTensor
    box: Box
    src: int
    dst: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a transition. Sender and receiver list the transfers between them in the same order."""

    src: Sharding
    dst: Sharding
    rank: int
    placement: Placement
    local: tuple[tuple[LogicalTensor, Box], ...]
    """Slices the rank has already: copied on the spot, or no work at all where the memory is the same."""
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]
    forwards: tuple[Transfer, ...]
    """Sent on to ranks of the same node out of the destination memory, once everything in `recvs` has arrived."""
    relayed: tuple[Transfer, ...]
    """The other end of others' `forwards`."""


@dataclass
class _Parts:
    """A rank's plan while it is being put together."""

    local: list[tuple[LogicalTensor, Box]] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)
    recvs: list[Transfer] = field(default_factory=list)
    forwards: list[Transfer] = field(default_factory=list)
    relayed: list[Transfer] = field(default_factory=list)


def plan_rank(src: Sharding, dst: Sharding, rank: int, placement: Placement = PAPER_CLUSTER) -> RankPlan:
    """What `rank` keeps, sends and receives so that every rank of `dst` has what it needs.

    Every missing element is received exactly once: from a source of the same node when one is there; otherwise it
    crosses the network once per node. Bytes received are therefore the lower bound, what the rank needs minus what it
    has, and bytes into a node are what its ranks need minus what they have together.

    Raises:
        ReshardError: a tensor, or a part of one, that the destination needs and no source rank holds.
    """
    parts, exchanges = _Parts(), {}
    for turn, tensors in enumerate(_alike(src, dst)):
        for held, wanted, box in _overlaps(src, dst, tensors[0]):
            _plan_overlap(rank, (held.ranks, wanted.ranks, box), (turn, tensors), (placement, exchanges), parts)
    return RankPlan(src, dst, rank, placement, *(tuple(getattr(parts, part.name)) for part in fields(parts)))


def _alike(src: Sharding, dst: Sharding) -> list[list[LogicalTensor]]:
    """The destination's tensors, grouped by equal cells on both sides."""
    groups: dict[tuple, list[LogicalTensor]] = {}
    for name, tensor in dst.tensors.items():
        source = src.tensors.get(name)
        if source is None:
            raise ReshardError(f"{name}: {dst.name} needs it and {src.name} has no such tensor")
        if source.shape != tensor.shape:
            raise ReshardError(f"{name}: {src.name} has shape {source.shape}, {dst.name} expects {tensor.shape}")
        groups.setdefault((src.key(tensor), dst.key(tensor), tensor.shape), []).append(tensor)
    return list(groups.values())


def _overlaps(src: Sharding, dst: Sharding, tensor: LogicalTensor) -> Iterator[tuple[Cell, Cell, Box]]:
    """Source cell, destination cell and the slice they share; together the destination cells exactly once."""
    atoms = Atoms(src.cells(tensor))
    for wanted in dst.cells(tensor):
        found = 0
        for held, box in atoms.within(wanted.box):
            found += volume(box)
            yield held, wanted, box
        if found != volume(wanted.box):
            raise ReshardError(f"{tensor.name}: {dst.name} needs {volume(wanted.box)} elements in {wanted.box}, "
                               f"{src.name} holds {found} of them")


def _plan_overlap(rank: int, overlap: tuple[Ranks, Ranks, Box], group: tuple[int, list[LogicalTensor]],
                  context: tuple[Placement, dict], parts: _Parts) -> None:
    """Add what `rank` does about one shared slice of a group of alike tensors."""
    (holders, wanters, box), (turn, tensors), (placement, exchanges) = overlap, group, context
    holds, wants = rank in holders, rank in wanters
    if not holds and not wants:
        return
    if holds and wants:
        parts.local.extend((tensor, box) for tensor in tensors)
    if (holders, wanters) not in exchanges:
        exchanges[holders, wanters] = Exchange(holders, wanters, placement)
    exchange = exchanges[holders, wanters]
    for index, tensor in enumerate(tensors, turn):
        if holds:
            parts.sends.extend(Transfer(tensor, box, rank, other) for other in exchange.served(rank, index))
            continue
        source, relays = exchange.source(rank, index)
        (parts.relayed if relays else parts.recvs).append(Transfer(tensor, box, source, rank))
        parts.forwards.extend(Transfer(tensor, box, rank, other) for other in exchange.relayed(rank, index))


def grouped_ranks(tp: int, pp: int, world_size: int, generation_tp: int, generation_pp: int = 1) -> tuple[int, ...]:
    """HybridFlow's grouping: generation ranks chosen so that every rank's training slice lies in its generation slice.

    Generation tensor groups take every (tp / generation_tp)-th rank of a training tensor group, and pipeline groups
    every (pp / generation_pp)-th stage, instead of neighbours. For engines that are free to place their ranks.

    Args:
        tp, pp: training degrees; ranks are numbered tp fastest, then dp, then pp.
        world_size: all ranks.
        generation_tp, generation_pp: divide tp and pp.
    Returns:
        The global rank of generation rank i, tp fastest, then replica, then pipeline stage.
    Source: HybridFlow, arXiv:2409.19256, sec. 5.3, figure 8b.
    """
    dp, tp_step, pp_step = world_size // (tp * pp), tp // generation_tp, pp // generation_pp
    order = []
    # A replica is one of the dp groups, one offset within a step of stages, one within a step of tensor ranks.
    replicas = list(itertools.product(range(dp), range(pp_step), range(tp_step)))
    for stage, (data, pp_offset, tp_offset) in itertools.product(range(generation_pp), replicas):
        first = tp_offset + tp * (data + dp * (stage * pp_step + pp_offset))
        order.extend(range(first, first + tp_step * generation_tp, tp_step))
    return tuple(order)
