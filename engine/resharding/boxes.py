"""Boxes: axis-aligned slices of a tensor, as half-open ranges per dimension."""

from math import prod

Box = tuple[tuple[int, int], ...]
"""One (start, stop) per dimension of the logical tensor; empty when a stop is not beyond its start."""


def full_box(shape: tuple[int, ...]) -> Box:
    """The box of the whole tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Sizes of the box, never negative."""
    return tuple(max(0, stop - start) for start, stop in box)


def volume(box: Box) -> int:
    """Elements in the box."""
    return prod(max(0, stop - start) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None when they share no element."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, as disjoint boxes: at most two per dimension."""
    common = intersect(box, hole)
    if common is None:
        return [box] if volume(box) else []
    rest, middle = [], list(box)
    for dim, ((start, stop), (cut_start, cut_stop)) in enumerate(zip(box, common, strict=True)):
        for piece in ((start, cut_start), (cut_stop, stop)):
            if piece[0] < piece[1]:
                rest.append((*middle[:dim], piece, *box[dim + 1:]))
        middle[dim] = (cut_start, cut_stop)
    return rest


def relative(box: Box, outer: Box) -> tuple[slice, ...]:
    """Slices that cut `box` out of a tensor that holds exactly `outer`."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))
