"""Boxes: axis-aligned slices of a tensor, as half-open ranges per dimension."""

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
    elements = 1
    for start, stop in box:
        if stop <= start:
            return 0
        elements *= stop - start
    return elements


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None when they share no element."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


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
