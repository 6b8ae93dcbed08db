"""Linear: each rank that has a chunk sends it to each rank that wants it, all in one step.

Cost for n ranks and n chunks of M bytes:

| | messages one after another | steps of a rank | the root | the others |
| --- | --- | --- | --- | --- |
| gather | 1 | 1 | receives (n - 1)·M | send M |
| scatter | 1 | 1 | sends (n - 1)·M | receive M |

And where all ranks do the same (all_to_all: M bytes per pair of ranks):

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| all_gather | 1 | 1 | (n - 1)·M | as much |
| all_to_all | 1 | 1 | (n - 1)·M | as much |

Gather and scatter win for long chunks: no byte travels twice, and the root's link is busy all the time. They lose for
short chunks and many ranks, where a tree needs fewer messages at the root. all_gather and all_to_all win for short
chunks and few ranks: there is one wait only. With many ranks everyone needs a channel to everyone, and long chunks of
all ranks arrive at one at the same time.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_gather", "all_to_all", "gather", "scatter"]


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


@lru_cache
def all_gather(rank: int, size: int) -> Schedule:
    """Chunk r of rank r to everyone.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    sends = tuple(Send((rank + i) % size, rank) for i in range(1, size))
    return Schedule.of([Step(sends, tuple(Recv(send.peer, send.peer) for send in reversed(sends)))], parts=size)


@lru_cache
def all_to_all(rank: int, size: int) -> Schedule:
    """A chunk from every rank to every other, numbered as in `pairwise`.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    # Everyone starts with its right neighbour, so that not all send to the same rank first.
    peers = [(rank + i) % size for i in range(1, size)]
    sends = tuple(Send(peer, rank * size + peer) for peer in peers)
    recvs = tuple(Recv(peer, peer * size + rank) for peer in reversed(peers))
    return Schedule.of([Step(sends, recvs)], parts=size * size)
