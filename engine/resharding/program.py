"""A rank's plan bound to its tensors: what to copy on the spot, and which memory each message comes from or goes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.resharding.boxes import box_shape, relative, volume
from engine.resharding.messages import Message, Round, messages, rounds
from engine.resharding.plan import RankPlan, Transfer
from engine.resharding.sharding import Holdings
from engine.resharding.views import LowRank, Read, reads, same_memory, views

_ALIGN = 64
"""Bytes messages are aligned to in staging memory: fits every dtype, and a cache line."""


@dataclass
class Bound:
    """A message and its memory."""

    message: Message
    direct: Tensor | None = None
    """The parameter's own memory, where the slice lies there as it travels."""
    copies: list[tuple[int, tuple[int, ...], tuple[slice, ...], Read | Tensor]] = field(default_factory=list)
    """Otherwise: element offset in the message, shape of the part, the sub-box of it, and where that lies."""

    @property
    def key(self) -> tuple[int, int]:
        return self.message.key

    @property
    def staged_bytes(self) -> int:
        """Staging memory the message needs."""
        return 0 if self.direct is not None else -(-self.message.num_bytes // _ALIGN) * _ALIGN

    def pack(self, buffer: Tensor) -> None:
        """Read the source into the message's staging memory."""
        for offset, shape, cut, read in self.copies:
            read.into(buffer[offset:offset + torch.Size(shape).numel()].view(shape)[cut])

    def unpack(self, buffer: Tensor) -> None:
        """Write what has arrived to its places."""
        for offset, shape, cut, view in self.copies:
            view.copy_(buffer[offset:offset + torch.Size(shape).numel()].view(shape)[cut])


@dataclass
class Program:
    """Everything `WeightSync.run` does, in order."""

    rounds: list[Round]
    relays: list[Round]
    """What comes after all `rounds`: slices passed on within a node, out of the destination memory."""
    local: list[tuple[Read, Tensor]]
    """Copies within the rank."""
    copied_bytes: int
    shared_bytes: int
    """Destination bytes that are the source's own memory."""
    slot_bytes: tuple[int, int]
    """Staging memory of a round: for sends, for receives."""

    def copy_locally(self) -> None:
        """Copy what the rank has already."""
        for read, view in self.local:
            read.into(view)


@dataclass(frozen=True)
class Memory:
    """A rank's tensors on both sides of a transition; None where it takes no part."""

    src: Holdings | None
    dst: Holdings | None
    src_params: Mapping[str, Tensor]
    dst_params: Mapping[str, Tensor]
    deltas: Mapping[str, LowRank]

    def fingerprint(self) -> tuple[int, ...]:
        """Changes when a parameter moves to other memory."""
        return tuple(param.data_ptr() for params in (self.src_params, self.dst_params) for param in params.values())


def build_program(plan: RankPlan, memory: Memory, dtype_of: Callable, wire: tuple[torch.device, int, int]) -> Program:
    """Bind a plan to memory.

    Args:
        dtype_of: LogicalTensor -> (dtype name, bytes per element) of what travels.
        wire: device messages travel from; ranks in the group; bytes of the bucket, of which each of two rounds in
            flight has a quarter for what it sends and a quarter for what it receives.
    """
    device, num_ranks, bucket_bytes = wire
    quarter = max(_ALIGN, bucket_bytes // 4 // _ALIGN * _ALIGN)

    def schedule(sends: tuple[Transfer, ...], recvs: tuple[Transfer, ...], source: Memory) -> list[Round]:
        outgoing = messages(sends, lambda transfer: transfer.dst, (quarter, num_ranks), dtype_of)
        incoming = messages(recvs, lambda transfer: transfer.src, (quarter, num_ranks), dtype_of)
        return rounds([_bind_send(message, source, device) for message in outgoing],
                      [_bind_recv(message, memory, device) for message in incoming],
                      lambda bound: bound.staged_bytes, quarter)

    first = schedule(plan.sends, plan.recvs, memory)
    relays = schedule(plan.forwards, plan.relayed, Memory(memory.dst, memory.dst, memory.dst_params, {}, {}))
    slot = tuple(max((sum(bound.staged_bytes for bound in side) for side in sides), default=0)
                 for sides in ([part.sends for part in first + relays], [part.recvs for part in first + relays]))
    local, copied, shared = _local_copies(plan, memory)
    return Program(first, relays, local, copied, shared, slot)


def _bind_send(message: Message, memory: Memory, device: torch.device) -> Bound:
    bound, offset = Bound(message), 0
    for part in message.parts:
        tensor, box = part
        for common, read in reads(memory.src, memory.src_params, memory.deltas, part):
            bound.copies.append((offset, box_shape(box), relative(common, box), read))
        offset += volume(box)
    only = bound.copies[0][3]
    if len(bound.copies) == 1 and only.delta is None and _travels_as_is(only.view, message, device):
        return Bound(message, direct=only.view.reshape(-1))
    return bound


def _bind_recv(message: Message, memory: Memory, device: torch.device) -> Bound:
    bound, offset = Bound(message), 0
    for tensor, box in message.parts:
        for common, view in views(memory.dst, memory.dst_params, tensor, box):
            bound.copies.append((offset, box_shape(box), relative(common, box), view))
        offset += volume(box)
    only = bound.copies[0][3]
    if len(bound.copies) == 1 and _travels_as_is(only, message, device):
        return Bound(message, direct=only.view(-1))
    return bound


def _travels_as_is(view: Tensor, message: Message, device: torch.device) -> bool:
    whole = view.numel() * view.element_size() == message.num_bytes and len(message.parts) == 1
    return whole and view.is_contiguous() and view.dtype == getattr(torch, message.dtype) and view.device == device


def _local_copies(plan: RankPlan, memory: Memory) -> tuple[list[tuple[Read, Tensor]], int, int]:
    """Copies within the rank, their bytes, and the bytes that are in place already."""
    pairs = [(read.cut(relative(common, source_box)), view)
             for tensor, box in plan.local
             for source_box, read in reads(memory.src, memory.src_params, memory.deltas, (tensor, box))
             for common, view in views(memory.dst, memory.dst_params, tensor, source_box)]
    copies = [(read, view) for read, view in pairs if read.delta is not None or not same_memory(read.view, view)]
    total, copied = (sum(view.numel() * view.element_size() for _, view in some) for some in (pairs, copies))
    return copies, copied, total - copied


