"""Moves weights as planned: bounded buckets, pipelined, cast on the way, written in place. Makes no decisions."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import LayoutError, ReshardError
from engine.resharding.catalog import LogicalTensor
from engine.resharding.messages import Round
from engine.resharding.plan import RankPlan
from engine.resharding.program import Bound, Memory, Program, build_program
from engine.resharding.sharding import Holdings
from engine.resharding.views import LowRank, check_params
from engine.resharding.wire import Wire, first_line


@dataclass(frozen=True)
class SyncOptions:
    """How a transfer behaves; equal on all ranks."""

    bucket_bytes: int = 64 << 20
    """Staging memory of a rank, over everything in flight and in preparation."""
    timeout_s: float = 300.0
    """Longest wait for any message or agreement."""
    deltas: Mapping[str, LowRank] = field(default_factory=dict)
    """Low-rank updates merged on the way, by source parameter name; the parameters stay as they are."""


@dataclass(frozen=True)
class SyncReport:
    """What one `run` did on this rank; all zero when the version was served already."""

    version: int
    seconds: float = 0.0
    bytes_received: int = 0
    """Counted on the messages, not taken from the plan."""
    bytes_sent: int = 0
    bytes_copied: int = 0
    """Within the rank."""
    bytes_shared: int = 0
    """Destination memory that is the source's own: nothing to do."""
    peak_extra_bytes: int = 0
    """Staging memory beyond source and destination."""
    messages: int = 0


class WeightSync:
    """Brings the destination parameters to the source's values, each missing byte once.

    Collective: every rank of the group constructs it and calls `run` with the same versions in the same order.

    Args:
        plan: the rank's part (`plan_rank`); its ranks are those of `group`.
        src_params: this rank's source parameters by name ({} where it is no source).
        dst_params: this rank's destination parameters by name ({} where it is none), written in place; a parameter may
            share memory with its source (`shared_views`).
        group: process group, gloo or NCCL; None is the default group, or no communication without one.
        options: bucket, time-out, low-rank updates.
    Raises:
        LayoutError: on every rank, when on any rank a parameter is missing, unknown to the catalog or of another shape.
        ReshardError: a rank did not answer.
    """

    def __init__(self, plan: RankPlan, src_params: Mapping[str, Tensor], dst_params: Mapping[str, Tensor],
                 group: dist.ProcessGroup | None = None, options: SyncOptions = SyncOptions()):
        self._plan, self._options = plan, options
        self._wire = Wire(group, options.timeout_s)
        src = plan.src.holdings(plan.rank) if plan.rank in plan.src.ranks else None
        dst = plan.dst.holdings(plan.rank) if plan.rank in plan.dst.ranks else None
        self._memory = Memory(src, dst, src_params, dst_params, options.deltas)
        self._wire_dtypes = self._handshake()
        self._program: Program | None = None
        self._fingerprint: tuple[int, ...] = ()
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._failure = "no transfer has been made yet"
        self.version: int | None = None
        """Policy version the destination holds; None before the first transfer and after a failed one."""

    def require(self, version: int) -> None:
        """Refuse to serve anything but a completely transferred `version`.

        Raises:
            ReshardError: the destination holds another version, or parts of several.
        """
        if self.version is None:
            raise ReshardError(f"rank {self._plan.rank}: {self._plan.dst.name} holds no complete policy version "
                               f"({self._failure}); run a full transfer first")
        if self.version != version:
            raise ReshardError(f"rank {self._plan.rank}: {self._plan.dst.name} holds policy version {self.version}, "
                               f"asked for {version}; run a transfer first")

    def run(self, version: int) -> SyncReport:
        """Make the destination hold the source's present values as `version`; nothing moves if it has that version.

        Raises:
            ReshardError: a peer is gone or too slow; names the tensor and the rank. The destination is then unusable
                (`require` refuses) until a later run completes.
        """
        if self.version is not None and version == self.version:
            return SyncReport(version)
        start, self.version = time.perf_counter(), None
        self._failure = f"the transfer of version {version} did not complete"
        with torch.no_grad():
            program = self._bound_program()
            report = self._transfer(program)
            self._wire.agree(f"transfer of policy version {version}")
        self.version = version
        return SyncReport(version, time.perf_counter() - start, **report)

    def invalidate(self) -> None:
        """The destination was given up or written over: the next `run` transfers everything, whatever the version.

        Gives back the staging memory too.
        """
        self._slots = []
        self.version, self._failure = None, "its memory was given up or written over since the last transfer"

    # -- preparation -----------------------------------------------------------------------------------------------

    def _handshake(self) -> dict[str, tuple[str, int]]:
        """Tell all ranks what this one has, and learn the dtype that travels for each kind of tensor."""
        memory, error, dtypes = self._memory, "", {"src": {}, "dst": {}}
        try:
            sides = (("src", memory.src, memory.src_params), ("dst", memory.dst, memory.dst_params))
            for side, holdings, params in sides:
                if holdings is not None:
                    check_params(holdings, params)
                    dtypes[side] = _dtypes(holdings, params)
        except LayoutError as mismatch:
            error = str(mismatch)
        facts = {"error": error, "bucket": self._options.bucket_bytes, "src_name": self._plan.src.name,
                 "dst_name": self._plan.dst.name, **dtypes}
        everyone = self._wire.gather(facts)
        for rank, other in enumerate(everyone):
            if other["error"]:
                raise LayoutError(other["error"])
            for name in ("bucket", "src_name", "dst_name"):
                if other[name] != facts[name]:
                    raise LayoutError(f"rank {rank} has {name} {other[name]}, rank {self._plan.rank} has "
                                      f"{facts[name]}; all ranks must transfer alike")
        return _wire_dtypes(everyone)

    def _dtype_of(self, tensor: LogicalTensor) -> tuple[str, int]:
        return self._wire_dtypes[_kind(tensor)]

    def _bound_program(self) -> Program:
        fingerprint = self._memory.fingerprint()
        if self._program is None or fingerprint != self._fingerprint:
            wire = (self._wire.device, self._wire.size, self._options.bucket_bytes)
            self._program = build_program(self._plan, self._memory, self._dtype_of, wire)
            self._fingerprint = fingerprint
        return self._program

    # -- the transfer ----------------------------------------------------------------------------------------------

    def _transfer(self, program: Program) -> dict[str, int]:
        """Move everything; returns what was moved."""
        slots = self._staging(program)
        self._run_rounds(program.rounds, slots, meanwhile=program.copy_locally)
        self._run_rounds(program.relays, slots)
        everything = program.rounds + program.relays
        sent = [bound.message.num_bytes for part in everything for bound in part.sends]
        received = [bound.message.num_bytes for part in everything for bound in part.recvs]
        return {"bytes_received": sum(received), "bytes_sent": sum(sent), "messages": len(sent) + len(received),
                "bytes_copied": program.copied_bytes, "bytes_shared": program.shared_bytes,
                "peak_extra_bytes": sum(buffer.numel() for slot in slots for buffer in slot)}

    def _staging(self, program: Program) -> list[tuple[Tensor, Tensor]]:
        """Memory of two rounds, for sends and receives; kept, because touching new pages takes a tenth of the time."""
        count = min(2, max(len(program.rounds), len(program.relays)))
        wanted = [program.slot_bytes] * count
        if [tuple(buffer.numel() for buffer in slot) for slot in self._slots] != wanted:
            self._slots = [tuple(torch.empty(size, dtype=torch.uint8, device=self._wire.device) for size in sizes)
                           for sizes in wanted]
        return self._slots

    def _run_rounds(self, schedule: list[Round], slots: list[tuple[Tensor, Tensor]],
                    meanwhile: Callable[[], None] | None = None) -> None:
        """While one round is in flight, the next is packed and posted; then it lands and is unpacked.

        So two are in flight where there are two. `meanwhile` is done during the first.
        """
        flight: _Flight | None = None
        for index, current in enumerate(schedule):
            upcoming = _Flight(current, slots[index % 2])
            upcoming.pack()
            upcoming.works = self._post(upcoming)
            if flight is not None:
                self._land(flight)
                flight.unpack()
            elif meanwhile is not None:
                meanwhile()
            flight = upcoming
        if flight is not None:
            self._land(flight)
            flight.unpack()
        elif meanwhile is not None:
            meanwhile()

    def _post(self, flight: "_Flight") -> list:
        try:
            return self._wire.post(flight.outgoing, flight.incoming)
        except RuntimeError as error:
            raise self._lost([*flight.round.recvs, *flight.round.sends][0], error) from error

    def _land(self, flight: "_Flight") -> None:
        """Wait for everything in flight."""
        deadline, bounds = time.monotonic() + self._wire.timeout_s, [*flight.round.recvs, *flight.round.sends]
        for index, work in enumerate(flight.works):
            try:
                self._wire.wait(work, deadline)
            except RuntimeError as error:
                raise self._lost(bounds[index], error) from error

    def _lost(self, bound: Bound, error: RuntimeError) -> ReshardError:
        tensor, box = bound.message.parts[0]
        peer = bound.message.peer
        return ReshardError(
            f"{tensor.name} {list(box)}: its transfer between rank {self._plan.rank} and rank {peer} did not complete "
            f"within {self._wire.timeout_s:g} s; rank {peer} is gone or stuck ({first_line(error)})")


class _Flight:
    """A round and the staging memory it uses."""

    def __init__(self, current: Round, slot: tuple[Tensor, Tensor]):
        self.round, self.works = current, []
        self._out = list(zip(current.sends, _buffers(current.sends, slot[0]), strict=True))
        self._in = list(zip(current.recvs, _buffers(current.recvs, slot[1]), strict=True))
        self.outgoing = [(buffer, bound.message.peer) for bound, buffer in self._out]
        self.incoming = [(buffer, bound.message.peer) for bound, buffer in self._in]

    def pack(self) -> None:
        """Fill what is sent from staging memory."""
        for bound, buffer in self._out:
            bound.pack(buffer)

    def unpack(self) -> None:
        """Put what has arrived in staging memory to its places."""
        for bound, buffer in self._in:
            bound.unpack(buffer)


def _buffers(bounds: list[Bound], slot: Tensor) -> list[Tensor]:
    """The memory each message travels from or to: the parameter's own, or a part of the slot."""
    buffers, offset = [], 0
    for bound in bounds:
        if bound.direct is not None:
            buffers.append(bound.direct)
            continue
        buffers.append(slot[offset:offset + bound.message.num_bytes].view(getattr(torch, bound.message.dtype)))
        offset += bound.staged_bytes
    return buffers


def _kind(tensor: LogicalTensor) -> str:
    return f"{tensor.part}.{tensor.kind}"


def _dtypes(holdings: Holdings, params: Mapping[str, Tensor]) -> dict[str, str]:
    """dtype of each kind of tensor on this rank."""
    found: dict[str, str] = {}
    for piece in holdings.pieces:
        kind, dtype = _kind(holdings.tensors[piece.tensor]), str(params[piece.param].dtype).removeprefix("torch.")
        if found.setdefault(kind, dtype) != dtype:
            raise LayoutError(f"{piece.param}: rank {holdings.rank} of {holdings.owner} has dtype {dtype} and "
                              f"{found[kind]} elsewhere for the same kind of tensor ({kind})")
    return found


def _wire_dtypes(everyone: list[dict]) -> dict[str, tuple[str, int]]:
    """What travels for each kind: the narrower of source and destination, so that a cast saves bytes."""
    src, dst = _merged_dtypes(everyone, "src"), _merged_dtypes(everyone, "dst")
    wire = {}
    for kind in src.keys() & dst.keys():
        have, want = getattr(torch, src[kind]), getattr(torch, dst[kind])
        narrow = have if have.itemsize < want.itemsize else want
        wire[kind] = (str(narrow).removeprefix("torch."), narrow.itemsize)
    return wire


def _merged_dtypes(everyone: list[dict], side: str) -> dict[str, str]:
    known: dict[str, str] = {}
    for rank, facts in enumerate(everyone):
        for kind, dtype in facts[side].items():
            if known.setdefault(kind, dtype) != dtype:
                raise LayoutError(f"{kind}: {side} has dtype {dtype} on rank {rank} and {known[kind]} on others; "
                                  f"all ranks must have the same")
    return known
