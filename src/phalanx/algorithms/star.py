"""Star: everything goes through rank 0, for backends where only rank 0 is connected to everyone.

Cost for n ranks and a buffer of N bytes:

| | messages one after another | steps of rank 0 | of others | rank 0 sends | rank 0 receives |
| --- | --- | --- | --- | --- | --- |
| broadcast from 0 | 1 | 1 | 1 | (n - 1)·N | 0 |
| broadcast from others | 2, for two ranks 1 | 2, for two ranks 1 | 1 | (n - 2)·N | N |
| all_reduce | n | n | 2 | (n - 1)·N | (n - 1)·N |
| barrier | 2 | 2 | 1 | n - 1 empty messages | as many |

The others send and receive N at most. What rank 0 sends at once shares its link, so the time still grows with n.

Wins where there is no other way, or with two or three ranks; loses to the tree and the ring wherever they can connect.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["all_reduce", "barrier", "broadcast"]


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
    """Nobody leaves before everyone has come: all tell rank 0, then it tells all. Runs on an empty buffer.

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
