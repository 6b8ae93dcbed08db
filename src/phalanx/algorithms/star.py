"""Star: everything goes through rank 0, for backends where only rank 0 is connected to everyone.

Cost for n ranks and a buffer of N bytes:

| | messages one after another | steps of rank 0 | of others | rank 0 sends | rank 0 receives |
| --- | --- | --- | --- | --- | --- |
| broadcast from 0 | 1 | 1 | 1 | (n - 1)·N | 0 |
| broadcast from others | 2, for two ranks 1 | 2, for two ranks 1 | 1 | (n - 2)·N | N |
| all_reduce | n | n | 2 | (n - 1)·N | (n - 1)·N |
| reduce to 0 | n - 1 | n - 1 | 1 | 0 | (n - 1)·N |
| reduce to others | n | n | 1, the root 2 | N | (n - 1)·N |
| barrier | 2 | 2 | 1 | n - 1 empty messages | as many |

And with one chunk of M bytes per rank (all_to_all: per pair of ranks):

| | messages one after another | steps of rank 0 | of others | rank 0 sends | rank 0 receives |
| --- | --- | --- | --- | --- | --- |
| gather to 0 | 1 | 1 | 1 | 0 | (n - 1)·M |
| gather to others | 2 | 2 | 1, the root 2 | (n - 1)·M | (n - 1)·M |
| scatter from 0 | 1 | 1 | 1 | (n - 1)·M | 0 |
| scatter from others | 2 | 2 | 1 | (n - 2)·M | (n - 1)·M |
| all_gather | 2 | 2 | 2 | (n - 1)²·M | (n - 1)·M |
| reduce_scatter | n | n | 2 | (n - 1)·M | n·(n - 1)·M |
| all_to_all | 2 | 2 | 2 | (n - 1)²·M | (n - 1)²·M |

The others send and receive N at most. What rank 0 sends at once shares its link, so the time still grows with n.

Wins where there is no other way, or with two or three ranks; loses to the tree and the ring wherever they can connect.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


@lru_cache
def broadcast(rank: int, size: int, root: int) -> Schedule:
    """The root's buffer to everyone; from another root it goes to rank 0 first.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    check_ranks(size, rank, root)
    if rank == 0:
        arrival = Step(recvs=(Recv(root, 0),)) if root else Step()
        return Schedule.of([arrival, Step(sends=tuple(Send(peer, 0) for peer in range(1, size) if peer != root))])
    return Schedule.of([Step(sends=(Send(0, 0),)) if rank == root else Step(recvs=(Recv(0, 0),))])


@lru_cache
def all_reduce(rank: int, size: int) -> Schedule:
    """The reduction of all buffers on everyone, with the same bits: rank 0 reduces in the order of ranks.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    if rank == 0:
        # One rank per step fixes the order of the reduction.
        arrivals = [Step(recvs=(Recv(peer, 0, reduce=True),)) for peer in range(1, size)]
        return Schedule.of([*arrivals, Step(sends=tuple(Send(peer, 0) for peer in range(1, size)))])
    return Schedule.of([Step(sends=(Send(0, 0),)), Step(recvs=(Recv(0, 0),))])


@lru_cache
def barrier(rank: int, size: int) -> Schedule:
    """No rank leaves before all have come: all tell rank 0, then it tells all. Runs on an empty buffer.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    if rank == 0:
        others = range(1, size)
        return Schedule.of(
            [Step(recvs=tuple(Recv(peer, 0) for peer in others)), Step(sends=tuple(Send(peer, 0) for peer in others))]
        )
    return Schedule.of([Step((Send(0, 0),), (Recv(0, 0),))])


@lru_cache
def reduce(rank: int, size: int, root: int) -> Schedule:
    """The reduction of all buffers to the root: rank 0 reduces in the order of ranks, and hands the result on.

    Elsewhere the buffer may be left with partial results: run it on a copy where the caller's must stay.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    check_ranks(size, rank, root)
    if rank == 0:
        arrivals = [Step(recvs=(Recv(peer, 0, reduce=True),)) for peer in range(1, size)]
        return Schedule.of([*arrivals, Step(sends=(Send(root, 0),) if root else ())])
    return Schedule.of([Step(sends=(Send(0, 0),)), Step(recvs=(Recv(0, 0),) if rank == root else ())])


@lru_cache
def gather(rank: int, size: int, root: int) -> Schedule:
    """Chunk r of rank r to the root; to another root than 0 they go through rank 0.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    check_ranks(size, rank, root)
    if rank == 0:
        arrivals = Step(recvs=tuple(Recv(peer, peer) for peer in range(1, size) if peer != root))
        onward = Step(sends=tuple(Send(root, chunk) for chunk in range(size) if chunk != root) if root else ())
        return Schedule.of([arrivals, onward], parts=size)
    if rank == root:
        return Schedule.of([Step(recvs=tuple(Recv(0, c) for c in range(size) if c != root))], parts=size)
    return Schedule.of([Step(sends=(Send(0, rank),))], parts=size)


@lru_cache
def scatter(rank: int, size: int, root: int) -> Schedule:
    """Chunk r of the root to rank r; from another root than 0 they go through rank 0.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    check_ranks(size, rank, root)
    if rank == 0:
        arrivals = Step(recvs=tuple(Recv(root, chunk) for chunk in range(size) if chunk != root) if root else ())
        onward = Step(sends=tuple(Send(peer, peer) for peer in range(1, size) if peer != root))
        return Schedule.of([arrivals, onward], parts=size)
    if rank == root:
        return Schedule.of([Step(sends=tuple(Send(0, c) for c in range(size) if c != root))], parts=size)
    return Schedule.of([Step(recvs=(Recv(0, rank),))], parts=size)


@lru_cache
def all_gather(rank: int, size: int) -> Schedule:
    """Chunk r of rank r to everyone.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    others = range(1, size)
    if rank == 0:
        arrivals = Step(recvs=tuple(Recv(peer, peer) for peer in others))
        onward = Step(sends=tuple(Send(peer, chunk) for peer in others for chunk in range(size) if chunk != peer))
        return Schedule.of([arrivals, onward], parts=size)
    rest = tuple(Recv(0, chunk) for chunk in range(size) if chunk != rank)
    return Schedule.of([Step(sends=(Send(0, rank),)), Step(recvs=rest)], parts=size)


@lru_cache
def reduce_scatter(rank: int, size: int) -> Schedule:
    """The reduction of everyone's chunk r on rank r: rank 0 reduces all of them in the order of ranks.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    chunks = range(size)
    if rank == 0:
        arrivals = [Step(recvs=tuple(Recv(peer, chunk, reduce=True) for chunk in chunks)) for peer in range(1, size)]
        return Schedule.of([*arrivals, Step(sends=tuple(Send(peer, peer) for peer in range(1, size)))], parts=size)
    everything = Step(sends=tuple(Send(0, chunk) for chunk in chunks))
    return Schedule.of([everything, Step(recvs=(Recv(0, rank),))], parts=size)


@lru_cache
def all_to_all(rank: int, size: int) -> Schedule:
    """A chunk from every rank to every other, numbered as in `pairwise`: rank 0 passes on what is not for itself.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    check_ranks(size, rank)
    others = range(1, size)
    if rank == 0:
        arrivals = Step(recvs=tuple(Recv(i, i * size + j) for i in others for j in range(size) if j != i))
        onward = Step(sends=tuple(Send(j, i * size + j) for j in others for i in range(size) if i != j))
        return Schedule.of([arrivals, onward], parts=size * size)
    mine = tuple(Send(0, rank * size + j) for j in range(size) if j != rank)
    rest = tuple(Recv(0, i * size + rank) for i in range(size) if i != rank)
    return Schedule.of([Step(sends=mine), Step(recvs=rest)], parts=size * size)
