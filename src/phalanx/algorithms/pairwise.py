"""Pairwise: in step s everyone sends to the rank s to its right and receives from the rank s to its left.

Cost for n ranks and chunks of M bytes from each rank to each other:

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| all_to_all | n - 1 | n - 1 | (n - 1)·M | as much |

Wins for long chunks: no byte travels twice, and in every step each rank sends one chunk and receives one. Loses for
short chunks and many ranks, where n - 1 latencies are all there is.

Chunk i·n + j is what rank i has for rank j: a rank holds the chunks of its row and receives those of its column.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_to_all"]


@lru_cache
def all_to_all(rank: int, size: int) -> Schedule:
    """A chunk from every rank to every other.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)

    def exchange(shift: int) -> Step:
        right, left = (rank + shift) % size, (rank - shift) % size
        return Step((Send(right, rank * size + right),), (Recv(left, left * size + rank),))

    return Schedule.of([exchange(shift) for shift in range(1, size)], parts=size * size)
