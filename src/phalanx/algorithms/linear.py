"""Linear: the root talks to each rank directly, one chunk per rank.

Cost for n ranks and n chunks of M bytes:

| | messages one after another | steps of a rank | the root | the others |
| --- | --- | --- | --- | --- |
| gather | 1 | 1 | receives (n - 1)·M | send M |
| scatter | 1 | 1 | sends (n - 1)·M | receive M |

Wins for long chunks: no byte travels twice, and the root's link is busy all the time. Loses for short chunks and many
ranks, where a tree needs fewer messages at the root.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["gather", "scatter"]


@lru_cache
def gather(rank: int, size: int, root: int) -> Schedule:
    """Chunk r of rank r to the root.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    check_ranks(size, rank, root)
    if rank != root:
        return Schedule.of([Step(sends=(Send(root, rank),))], parts=size)
    return Schedule.of([Step(recvs=tuple(Recv(peer, peer) for peer in range(size) if peer != root))], parts=size)


@lru_cache
def scatter(rank: int, size: int, root: int) -> Schedule:
    """Chunk r of the root to rank r.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    check_ranks(size, rank, root)
    if rank != root:
        return Schedule.of([Step(recvs=(Recv(root, rank),))], parts=size)
    return Schedule.of([Step(sends=tuple(Send(peer, peer) for peer in range(size) if peer != root))], parts=size)
