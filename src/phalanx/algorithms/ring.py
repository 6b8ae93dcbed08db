"""Ring: everyone sends to the right and receives from the left, one chunk per rank.

Cost for n ranks and a buffer of N bytes:

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| all_reduce | 2·(n - 1) | 2·(n - 1) | 2·(n - 1)/n·N | as much |
| reduce_scatter | n - 1 | n - 1 | (n - 1)/n·N | as much |
| all_gather | n - 1 | n - 1 | (n - 1)/n·N | as much |

(The bytes are exact where n divides the number of elements, and within two elements otherwise.)

Wins for long messages: no rank can do with fewer bytes, every link carries the same, and a rank talks to two others
only. Loses for short ones, where the latencies are all there is.

An all_reduce is a reduce_scatter, in which chunk c starts at rank c + 1, goes round, and is complete when it arrives at
rank c, and an all_gather, in which the complete chunks go round once more. So chunk c is reduced along one path, and
finished on rank c alone.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


@lru_cache
def all_reduce(rank: int, size: int) -> Schedule:
    """The reduction of all buffers on everyone, with the same bits.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    steps = [*reduce_scatter(rank, size).steps, *all_gather(rank, size).steps]
    return Schedule.of(steps, parts=size)


@lru_cache
def reduce_scatter(rank: int, size: int) -> Schedule:
    """The reduction of everyone's chunk r on rank r; the other chunks are left with partial results.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    return Schedule.of([_turn(rank, size, rank - 1 - i, reduce=True) for i in range(size - 1)], parts=size)


@lru_cache
def all_gather(rank: int, size: int) -> Schedule:
    """Chunk r of rank r to everyone.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    return Schedule.of([_turn(rank, size, rank - i, reduce=False) for i in range(size - 1)], parts=size)


def _turn(rank: int, size: int, chunk: int, *, reduce: bool) -> Step:
    # Everyone counts from its own rank, so what the left neighbour sends is the chunk before ours.
    right, left = (rank + 1) % size, (rank - 1) % size
    return Step((Send(right, chunk % size),), (Recv(left, (chunk - 1) % size, reduce),))
