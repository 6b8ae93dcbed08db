"""Ring: everyone sends to the right and receives from the left, one chunk per rank.

Cost for n ranks and a buffer of N bytes:

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| all_reduce | 2·(n - 1) | 2·(n - 1) | 2·(n - 1)/n·N | as much |

(The bytes are exact where n divides the number of elements, and within two elements otherwise.)

Wins for long messages: no rank can do with fewer bytes, every link carries the same, and a rank talks to two others
only. Loses for short ones, where the 2·(n - 1) latencies are all there is.

First reduce-scatter: chunk c starts at rank c + 1, goes round, and is complete when it arrives at rank c. Then
all-gather: the complete chunks go round once more. So chunk c is reduced along one path, and finished on rank c alone.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_reduce"]


@lru_cache
def all_reduce(rank: int, size: int) -> Schedule:
    """The reduction of all buffers on everyone, with the same bits.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    right, left = (rank + 1) % size, (rank - 1) % size

    def turn(chunk: int, *, reduce: bool) -> Step:
        # Everyone counts from its own rank, so what the left neighbour sends is the chunk before ours.
        return Step((Send(right, chunk % size),), (Recv(left, (chunk - 1) % size, reduce),))

    reduce_scatter = [turn(rank - 1 - i, reduce=True) for i in range(size - 1)]
    all_gather = [turn(rank - i, reduce=False) for i in range(size - 1)]
    return Schedule.of([*reduce_scatter, *all_gather], parts=size)
