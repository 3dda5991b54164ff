"""The slices that ranks hold of one tensor, made disjoint and quick to search. Torch-free."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from engine.resharding.boxes import Box, intersect, subtract
from engine.resharding.sharding import Cell


class Atoms:
    """Cells as non-overlapping slices; where cells overlap, the common part belongs to the ranks of both."""

    def __init__(self, cells: Iterable[Cell]):
        cells = sorted(cells, key=lambda cell: cell.box)
        self._dim = _single_cut(cells)
        self._cells = cells if self._dim is not None else _refine(cells)
        if self._dim is not None:
            self._starts = [cell.box[self._dim][0] for cell in cells]
            self._stops = [cell.box[self._dim][1] for cell in cells]

    def within(self, box: Box) -> Iterator[tuple[Cell, Box]]:
        """Every atom that shares elements with `box`, and the slice they share."""
        candidates = self._cells
        if self._dim is not None:
            start, stop = box[self._dim]
            candidates = candidates[bisect_right(self._stops, start):bisect_left(self._starts, stop)]
        for cell in candidates:
            common = intersect(cell.box, box)
            if common is not None:
                yield cell, common


def _single_cut(cells: list[Cell]) -> int | None:
    """The only dimension along which sorted cells differ, if they do not overlap there."""
    if not cells:
        return None
    first, last = cells[0].box, cells[-1].box
    dims = [dim for dim, (a, b) in enumerate(zip(first, last, strict=True)) if a != b] or [0]
    if len(dims) > 1:
        return None
    dim = dims[0]
    for left, right in itertools.pairwise(cells):
        if left.box[:dim] != right.box[:dim] or left.box[dim + 1:] != right.box[dim + 1:]:
            return None
        if left.box[dim][1] > right.box[dim][0]:
            return None
    return dim


def _refine(cells: list[Cell]) -> list[Cell]:
    atoms: list[Cell] = []
    for cell in cells:
        rest, refined = [cell.box], []
        for atom in atoms:
            common = intersect(atom.box, cell.box)
            if common is None:
                refined.append(atom)
                continue
            refined.append(Cell(common, tuple(sorted({*atom.ranks, *cell.ranks}))))
            refined.extend(Cell(box, atom.ranks) for box in subtract(atom.box, common))
            rest = [box for part in rest for box in subtract(part, common)]
        atoms = refined + [Cell(box, cell.ranks) for box in rest]
    return atoms
