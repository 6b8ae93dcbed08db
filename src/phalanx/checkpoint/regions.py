"""Boxes inside a tensor: where a piece lies, and what two of them share."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Region", "cut", "is_covered", "whole"]


class Region(NamedTuple):
    """A box: its first element in each dim, and its length in each."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor of this shape has all of it."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            first >= 0 and length >= 0 and first + length <= limit
            for first, length, limit in zip(self.offset, self.shape, shape, strict=True)
        )

    def shared(self, other: Region) -> Region | None:
        """The box that is in both; None if there is none, or if it is empty."""
        firsts = tuple(map(max, self.offset, other.offset))
        ends = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        lengths = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        return Region(firsts, lengths) if all(length > 0 for length in lengths) else None

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Where this box lies in an array that holds `outer`."""
        return tuple(
            slice(first - base, first - base + length)
            for first, length, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )


def whole(shape: Iterable[int]) -> Region:
    """All of a tensor."""
    return _whole(tuple(shape))


@functools.lru_cache(1024)  # thousands of tensors have few shapes
def _whole(shape: tuple[int, ...]) -> Region:
    return Region((0,) * len(shape), shape)


def cut(region: Region, parts: int) -> Iterator[Region]:
    """The box in slices of its first dim, as even as they can be; fewer than `parts` if it has fewer rows."""
    rows = region.shape[0]
    parts = min(parts, rows)
    for part in range(parts):
        first, end = rows * part // parts, rows * (part + 1) // parts
        yield Region((region.offset[0] + first, *region.offset[1:]), (end - first, *region.shape[1:]))


def is_covered(wanted: Region, pieces: Iterable[Region]) -> bool:
    """True if the pieces, together, hold every element of `wanted`."""
    left = [wanted] if wanted.size else []
    for piece in pieces:
        left = [rest for box in left for rest in _without(box, piece)]
        if not left:
            return True
    return not left


def _without(box: Region, piece: Region) -> Iterator[Region]:
    """The rest of a box when a piece is taken out of it: at most two boxes for each dim."""
    taken = box.shared(piece)
    if taken is None:
        yield box
        return
    offset, shape = list(box.offset), list(box.shape)
    for dim, (first, length) in enumerate(zip(taken.offset, taken.shape, strict=True)):
        before, after = first - offset[dim], offset[dim] + shape[dim] - first - length
        for start, extent in ((offset[dim], before), (first + length, after)):
            if extent:
                yield Region((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], extent, *shape[dim + 1 :]))
        offset[dim], shape[dim] = first, length
