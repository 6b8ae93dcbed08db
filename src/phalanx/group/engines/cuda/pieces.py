"""The pieces of each collective: what the executor's kernel reads from the memory of all ranks and writes to it.

Addresses are the executor's. `sources` and `targets` have one for each rank; `item` is the size of an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ....cuda.kernels.plan import Piece

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter"]

Addresses = Sequence[int]


def all_reduce(sources: Addresses, count: int) -> list[Piece]:
    """Everybody's on everybody."""
    return [Piece(tuple(sources), tuple(sources), count)]


def reduce(sources: Addresses, count: int, dst: int) -> list[Piece]:
    """Everybody's on one."""
    return [Piece(tuple(sources), (sources[dst],), count)]


def reduce_scatter(sources: Addresses, targets: Addresses, count: int, item: int) -> list[Piece]:
    """Part r of everybody's on rank r; `count` elements each."""
    return [
        Piece(tuple(source + rank * count * item for source in sources), (target,), count)
        for rank, target in enumerate(targets)
    ]


def broadcast(sources: Addresses, count: int, src: int) -> list[Piece]:
    """One's on everybody."""
    others = tuple(address for rank, address in enumerate(sources) if rank != src)
    return [Piece((sources[src],), others, count)]


def all_gather(sources: Addresses, targets: Addresses, counts: Sequence[int], item: int) -> list[Piece]:
    """Everybody's, one after another, on everybody. What lies at its place already is left alone."""
    pieces = []
    for source, count, before in zip(sources, counts, _starts(counts), strict=True):
        places = (target + before * item for target in targets)
        pieces.append(Piece((source,), tuple(place for place in places if place != source), count))
    return pieces


def gather(sources: Addresses, target: int, counts: Sequence[int], item: int) -> list[Piece]:
    """Everybody's, one after another, on one."""
    return all_gather(sources, [target], counts, item)


def all_to_all(sources: Addresses, targets: Addresses, sizes: npt.NDArray[np.int64], item: int) -> list[Piece]:
    """`sizes[i, j]` elements from rank i to rank j."""
    read = np.cumsum(sizes, axis=1) - sizes
    written = np.cumsum(sizes, axis=0) - sizes
    return [
        Piece((source + int(read[i, j]) * item,), (target + int(written[i, j]) * item,), int(sizes[i, j]))
        for i, source in enumerate(sources)
        for j, target in enumerate(targets)
    ]


def _starts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
