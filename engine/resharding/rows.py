"""How a dimension is cut over tensor-parallel ranks: the arithmetic that Megatron, vLLM and FSDP share."""

from engine.errors import LayoutError

Interval = tuple[int, int]


def even(size: int, parts: int, index: int, what: str) -> Interval:
    """The index-th of `parts` equal parts of `size` rows.

    Raises:
        LayoutError: it does not divide.
    """
    if size % parts:
        raise LayoutError(f"{what}: {size} does not divide over {parts} ranks")
    width = size // parts
    return index * width, (index + 1) * width


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def padded_part(size: int, parts: int, index: int, padded_size: int) -> Interval:
    """The real rows in the index-th part of a table padded to `padded_size` rows; empty when all is padding."""
    width = padded_size // parts
    return min(size, index * width), min(size, (index + 1) * width)


def chunk(size: int, parts: int, index: int) -> Interval:
    """The index-th chunk as `torch.chunk` cuts it (FSDP2's dim-0 shards): all of ceil(size / parts) but the last."""
    width = -(-size // parts)
    return min(size, index * width), min(size, (index + 1) * width)
