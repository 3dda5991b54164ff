"""How a rank's transfers travel: messages of bounded size, in rounds that cannot deadlock. Pure; torch-free.

Both ends cut the transfers between them into the same messages without talking, because both know the plan. Message k
from rank s to rank d has the key (k, (d - s) mod N). Every rank works through its messages by ascending key, a run of
keys at a time (a round); sends and receives of one key are in one round. Take the smallest unfinished key of all: what
its two ends have to do before it has smaller keys and is finished, so it is under way. Hence some message can always
move, whatever the sizes of the rounds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.resharding.boxes import Box, volume
from engine.resharding.catalog import LogicalTensor
from engine.resharding.plan import Transfer

SOLO_BYTES = 1 << 18
"""A slice this large travels alone, so that it needs no packing where it is contiguous."""
_ROUND_MESSAGES = 64
"""Messages of a round each way: enough to keep every link busy, few enough to post quickly."""


class Message(NamedTuple):
    """What one point-to-point operation carries: slices of one dtype, one after the other, each in row-major order."""

    peer: int
    key: tuple[int, int]
    dtype: str
    num_bytes: int
    parts: tuple[tuple[LogicalTensor, Box], ...]


@dataclass
class Round:
    """Messages in flight together."""

    sends: list = field(default_factory=list)
    recvs: list = field(default_factory=list)


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `max_elements`: by rows, and a row that is itself too long by columns."""
    rest = volume(box[1:])
    start, stop = box[0]
    if rest > max_elements:
        for row in range(start, stop):
            yield from (((row, row + 1), *part) for part in split_box(box[1:], max_elements))
        return
    rows = max(1, max_elements // max(rest, 1))
    for row in range(start, stop, rows):
        yield ((row, min(row + rows, stop)), *box[1:])


def messages(transfers: Iterable[Transfer], peer_of: Callable[[Transfer], int], size: tuple[int, int],
             dtype_of: Callable[[LogicalTensor], tuple[str, int]]) -> list[Message]:
    """Cut transfers into messages, by peer.

    Args:
        transfers: all of a rank's sends, or all of its receives, in plan order.
        peer_of: the other end.
        size: most bytes of a message; ranks in the group.
        dtype_of: name and bytes per element of what travels for a tensor.
    """
    max_bytes, num_ranks = size
    streams: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        streams.setdefault(peer_of(transfer), []).append(transfer)
    found = []
    for peer, stream in streams.items():
        shift = (stream[0].dst - stream[0].src) % num_ranks
        for index, (dtype, num_bytes, parts) in enumerate(_cut(stream, max_bytes, dtype_of)):
            found.append(Message(peer, (index, shift), dtype, num_bytes, parts))
    return sorted(found, key=lambda message: message.key)


def _cut(stream: list[Transfer], max_bytes: int, dtype_of: Callable) -> Iterator[tuple[str, int, tuple]]:
    """The messages of one pair of ranks: large slices alone, small ones together."""
    parts, filled, current = [], 0, ""
    for transfer in stream:
        dtype, width = dtype_of(transfer.tensor)
        for box in split_box(transfer.box, max(1, max_bytes // width)):
            num_bytes = volume(box) * width
            if num_bytes >= SOLO_BYTES:
                yield dtype, num_bytes, ((transfer.tensor, box),)
                continue
            if parts and (filled + num_bytes > max_bytes or dtype != current):
                yield current, filled, tuple(parts)
                parts, filled = [], 0
            parts.append((transfer.tensor, box))
            filled, current = filled + num_bytes, dtype
    if parts:
        yield current, filled, tuple(parts)


def rounds(sends: list, recvs: list, staged_bytes: Callable[[object], int], max_bytes: int) -> list[Round]:
    """Group messages into rounds: at most `max_bytes` of staging memory each way.

    Args:
        sends, recvs: anything with a `key`, each ascending by it.
        staged_bytes: memory a message needs besides source and destination; 0 when it travels from or to its place.
        max_bytes: not less than any one message needs.
    """
    found, filled, current = [], {"send": 0, "recv": 0}, Round()
    waiting = {"send": sends[::-1], "recv": recvs[::-1]}
    while waiting["send"] or waiting["recv"]:
        key = min(queue[-1].key for queue in waiting.values() if queue)
        next_up = {way: queue[-1] for way, queue in waiting.items() if queue and queue[-1].key == key}
        need = {way: staged_bytes(item) for way, item in next_up.items()}
        full = any(filled[way] + need[way] > max_bytes for way in next_up)
        if full or max(len(current.sends), len(current.recvs)) >= _ROUND_MESSAGES:
            found.append(current)
            filled, current = {"send": 0, "recv": 0}, Round()
        for way, item in next_up.items():
            (current.sends if way == "send" else current.recvs).append(item)
            filled[way] += need[way]
            waiting[way].pop()
    if current.sends or current.recvs:
        found.append(current)
    return found
