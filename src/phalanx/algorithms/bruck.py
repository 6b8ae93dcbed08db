"""Bruck: everyone sends to the rank 1, 2, 4, … away, so ⌈log2 n⌉ steps do for every n.

Cost for n ranks and one chunk of M bytes per rank (all_to_all: per pair of ranks):

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| all_gather | ⌈log2 n⌉ | ⌈log2 n⌉ | (n - 1)·M | as much |
| all_to_all | ⌈log2 n⌉ | ⌈log2 n⌉ | at most ⌈log2 n⌉·⌈n/2⌉·M | as much |
| barrier | ⌈log2 n⌉ | ⌈log2 n⌉ | ⌈log2 n⌉ empty messages | as many |

(The chunks that one step sends to one rank count as one message.)

Wins for short chunks: no algorithm needs fewer messages, and it does not matter what n is. For long chunks all_gather
loses to the ring, which talks to neighbours only; all_to_all loses to the pairwise exchange, because a chunk travels
once for every set bit in the distance between its two ranks, through the memory of the ranks in between.
The barrier is known as the dissemination barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_gather", "all_to_all", "barrier", "passing"]


@lru_cache
def all_gather(rank: int, size: int) -> Schedule:
    """Chunk r of rank r to everyone.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)

    def step(distance: int) -> Step:
        # A rank has the chunks of the `distance` ranks from itself on, and gets as many of those behind them.
        left, right = (rank - distance) % size, (rank + distance) % size
        count = range(min(distance, size - distance))
        return Step(
            tuple(Send(left, (rank + i) % size) for i in count), tuple(Recv(right, (right + i) % size) for i in count)
        )

    return Schedule.of([step(distance) for distance in _distances(size)], parts=size)


@lru_cache
def all_to_all(rank: int, size: int) -> Schedule:
    """A chunk from every rank to every other, numbered as in `pairwise`. It also handles the chunks of `passing`.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)

    def moving(at: int, distance: int) -> list[int]:
        # A chunk that has `way` to go moves by the bits of it, the lowest first: so far by those below `distance`.
        ways = [way for way in range(size) if way & distance]
        starts = [(at - way % distance) % size for way in ways]
        return [start * size + (start + way) % size for start, way in zip(starts, ways, strict=True)]

    def step(distance: int) -> Step:
        left, right = (rank - distance) % size, (rank + distance) % size
        sends = tuple(Send(right, chunk) for chunk in moving(rank, distance))
        return Step(sends, tuple(Recv(left, chunk) for chunk in moving(left, distance)))

    return Schedule.of([step(distance) for distance in _distances(size)], parts=size * size)


@lru_cache
def passing(rank: int, size: int) -> frozenset[int]:
    """The chunks that `all_to_all` takes through a rank that neither has nor wants them.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    taken = {recv.chunk for step in all_to_all(rank, size).steps for recv in step.recvs}
    return frozenset(chunk for chunk in taken if chunk % size != rank)


@lru_cache
def barrier(rank: int, size: int) -> Schedule:
    """No rank leaves before all have come. Runs on an empty buffer.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    return Schedule.of(
        Step((Send((rank + distance) % size, 0),), (Recv((rank - distance) % size, 0),))
        for distance in _distances(size)
    )


def _distances(size: int) -> Iterator[int]:
    distance = 1
    while distance < size:
        yield distance
        distance *= 2
