"""Chain: from rank to rank in a row, in several pieces, so that all links are busy at once.

Cost for n ranks, a buffer of N bytes and p pieces:

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| broadcast | p + n - 2 | p + 1, the root and the last p | N, the last 0 | N, the root 0 |
| reduce | p + n - 2 | p + 1, the root and the last p | N, the root 0 | N, the last 0 |

Wins for long messages: nobody sends or receives a byte twice, and with enough pieces it takes hardly longer than one
message of N bytes, however many ranks there are. Loses for short ones, where n - 1 latencies are too many.
"""

from __future__ import annotations

from functools import lru_cache

from phalanx.errors import UsageError

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["broadcast", "reduce"]


@lru_cache
def broadcast(rank: int, size: int, root: int, pieces: int) -> Schedule:
    """The root's buffer to everyone, cut into `pieces` chunks.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
        UsageError: `pieces` is less than 1.
    """
    check_ranks(size, rank, root)
    place = (rank - root) % size
    before, after = (rank - 1) % size, (rank + 1) % size
    return _pass_on(before if place else None, after if place < size - 1 else None, pieces, reduce=False)


@lru_cache
def reduce(rank: int, size: int, root: int, pieces: int) -> Schedule:
    """The reduction of all buffers to the root, cut into `pieces` chunks.

    On the other ranks the buffer is left with partial results: run it on a copy where the caller's must stay. Every
    rank combines what it has with all that comes after it, in the order of ranks, starting at the root.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
        UsageError: `pieces` is less than 1.
    """
    check_ranks(size, rank, root)
    place = (rank - root) % size
    before, after = (rank - 1) % size, (rank + 1) % size
    return _pass_on(after if place < size - 1 else None, before if place else None, pieces, reduce=True)


def _pass_on(source: int | None, target: int | None, pieces: int, *, reduce: bool) -> Schedule:
    """Every piece from one neighbour, if there is one, and on to the other."""
    if pieces < 1:
        raise UsageError(f"a message cannot be cut into {pieces} pieces (expected 1 or more)")

    def step(number: int) -> Step:
        # One piece goes on while the next one comes in.
        sends = () if target is None or number == 0 else (Send(target, number - 1),)
        recvs = () if source is None or number == pieces else (Recv(source, number, reduce),)
        return Step(sends, recvs)

    return Schedule.of([step(number) for number in range(pieces + 1)], parts=pieces)
