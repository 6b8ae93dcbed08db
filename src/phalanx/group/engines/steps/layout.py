"""Where the chunks of a collective lie in its arrays: what the core's fast path over TCP must know once for each size.

It is the same cut that `engines.network` makes, as numbers instead of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...._native import core
from ....algorithms import bruck, chunk_bounds, select, tree
from ....transports.channel import Inbound, Outbound
from ..slots import SLOT
from .fast_path import FastRun, Prepared
from .transfers import Job

if TYPE_CHECKING:
    from ...._core import StepsLayout, StepsRun

__all__ = ["Cut", "Origin", "cut", "lay_out"]

X, OUT, SCRATCH = range(3)
"""The memory that a chunk lies in; the numbers of `Place` in cpp/bindings/fast_steps.cpp."""
_NOWHERE = (-1, 0)
Numbers = tuple[int, int, int, int, int]


class Chunk(NamedTuple):
    """A chunk: its bytes, and the memory and offset at which it lies."""

    size: int
    place: int
    offset: int
    own: tuple[int, int] = _NOWHERE
    """The memory and offset of its first contents, where those must stay as they are."""


class Cut(NamedTuple):
    """The chunks of a collective by their numbers in its schedule, and what is copied from array to array first."""

    chunks: dict[int, Chunk]
    copies: Sequence[Numbers] = ()
    scratch: int = 0
    """Bytes of memory of the call's own."""


class Origin(NamedTuple):
    """The means to go on in Python with a collective that the fast path has begun."""

    prepared: Prepared
    outbound: Sequence[Outbound]
    inbound: Sequence[Inbound]
    salt: int

    def fast_run(self, steps: StepsRun, job: Job) -> FastRun:
        """The steps, where they stand, as a part of that job."""
        return FastRun(self.prepared, job, self.outbound, self.inbound, steps)


def _parts(items: int, item: int, count: int) -> list[tuple[int, int]]:
    """Size and offset, in bytes, of each of so many parts."""
    return [((stop - start) * item, start * item) for start, stop in chunk_bounds(items, count)]


def cut(verb: str, name: str, rank: int, size: int, root: int, items: int, item: int) -> Cut:
    """The chunks of an operation.

    Args:
        verb: As the core's fast path calls it; `scatter_slot` is what a rank hears before its part of a scatter.
        name: The algorithm.
        items: Elements of the largest array of the call.
        item: Bytes of an element.
    """
    nbytes = items * item
    if verb == "barrier":
        return Cut({0: Chunk(0, SCRATCH, 0)}, scratch=1)
    if verb == "broadcast":
        count = select.chain_pieces(nbytes) if name == "chain" else 1
        return Cut({n: Chunk(length, X, at) for n, (length, at) in enumerate(_parts(items, item, count))})
    if verb == "all_reduce":
        count = 1 if name in ("doubling", "star") else size
        return Cut({n: Chunk(length, X, at) for n, (length, at) in enumerate(_parts(items, item, count))})
    if verb == "reduce":
        parts = list(enumerate(_parts(items, item, select.chain_pieces(nbytes) if name == "chain" else 1)))
        if rank == root:
            return Cut({n: Chunk(length, X, at) for n, (length, at) in parts})
        return Cut({n: Chunk(length, SCRATCH, at, (X, at)) for n, (length, at) in parts}, scratch=nbytes)
    part = nbytes // size
    if verb == "reduce_scatter":
        chunks = {n: Chunk(part, SCRATCH, n * part, (X, n * part)) for n in range(size)}
        chunks[rank] = Chunk(part, OUT, 0, (X, rank * part))
        return Cut(chunks, scratch=nbytes)
    if verb == "all_gather":
        mine = (part, X, 0, OUT, rank * part)
        return Cut({n: Chunk(part, OUT, n * part) for n in range(size)}, [mine])
    if verb == "gather":
        if rank != root:
            return Cut({rank: Chunk(part, X, 0)})
        return Cut({n: Chunk(part, OUT, n * part) for n in range(size)}, [(part, X, 0, OUT, rank * part)])
    if verb == "scatter_slot":
        return Cut({size: Chunk(nbytes, X, 0)})
    if verb == "scatter":
        chunks = {n: Chunk(part, X, n * part) for n in range(size)}
        if rank == root:
            return Cut({**chunks, size: Chunk(SLOT, SCRATCH, 0)}, [(part, X, rank * part, OUT, 0)], SLOT)
        # What it has heard is its x.
        below = tree.below(rank, size, root) if name == "tree" else []
        chunks = {n: Chunk(part, SCRATCH, place * part) for place, n in enumerate(below)}
        return Cut({**chunks, rank: Chunk(part, OUT, 0), size: Chunk(SLOT, X, 0)}, (), len(below) * part)
    assert verb == "all_to_all"
    chunks = {rank * size + j: Chunk(part, X, j * part) for j in range(size) if j != rank}
    chunks |= {i * size + rank: Chunk(part, OUT, i * part) for i in range(size) if i != rank}
    passing = sorted(bruck.passing(rank, size)) if name == "bruck" else []
    chunks |= {chunk: Chunk(part, SCRATCH, place * part) for place, chunk in enumerate(passing)}
    return Cut(chunks, [(part, X, rank * part, OUT, rank * part)], len(passing) * part)


def lay_out(
    prepared: Prepared,
    found: Cut,
    channels: Callable[[Sequence[int], Sequence[int]], tuple[list[Outbound], list[Inbound]] | None],
    salt: int,
    also_reads: Sequence[int] = (),
) -> StepsLayout | None:
    """The layout of an operation for the core; None as long as one of its channels is not there.

    Args:
        channels: Gives the channels to write to and to read from, by rank.
        salt: The number of the algorithm.
        also_reads: Ranks from which nothing comes in these steps, but before them, in others of the same operation.
    """
    assert core is not None
    both = channels(prepared.writes, [*prepared.reads, *(rank for rank in also_reads if rank not in prepared.reads)])
    if both is None:
        return None
    chunks = [found.chunks[number] for number in prepared.chunks]
    numbers = [(chunk.size, chunk.place, chunk.offset, *chunk.own) for chunk in chunks]
    origin = Origin(prepared, *both, salt)
    made: StepsLayout = core.StepsLayout(
        prepared.plan, both[0], both[1], numbers, list(found.copies), found.scratch, salt, origin
    )
    return made
