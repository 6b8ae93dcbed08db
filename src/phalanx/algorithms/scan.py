"""Prefix reductions by doubling: in step k a rank sends what it has to the rank 2ᵏ above, and gets from the one below.

Cost for n ranks and a buffer of N bytes:

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| inclusive | ⌈log2 n⌉ | at most ⌈log2 n⌉ | at most ⌈log2 n⌉·N | as much |
| pass_on | 1 | 1 | at most N | as much |

An exclusive scan is `pass_on`, then an inclusive one from rank 1 on.

Wins for short buffers, and among few ranks. Long buffers of many ranks are exchanged instead, so that every rank alone
combines one part of all of them: that sends 2·N bytes (`Engine.scan`).
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["inclusive", "pass_on"]


@lru_cache
def inclusive(rank: int, size: int, first: int = 0) -> Schedule:
    """On rank r the reduction of the buffers of the ranks from `first` to r; nothing on those below.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    if rank < first:
        return Schedule.of(())

    def step(distance: int) -> Step:
        above, below = rank + distance, rank - distance
        return Step(
            (Send(above, 0),) if above < size else (),
            (Recv(below, 0, reduce=True, before=True, late=True),) if below >= first else (),
        )

    return Schedule.of(step(1 << k) for k in range((size - first - 1).bit_length()))


@lru_cache
def pass_on(rank: int, size: int) -> Schedule:
    """Chunk r of rank r to the next rank.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    sends = (Send(rank + 1, rank),) if rank + 1 < size else ()
    return Schedule.of([Step(sends, (Recv(rank - 1, rank - 1),) if rank > 0 else ())], parts=size)
