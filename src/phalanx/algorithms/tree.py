"""Binomial tree: any root, logarithmic time, the whole buffer in every message (a scatter: what is for those below).

Cost for n ranks and a buffer of N bytes, where a rank has c children (the root ⌈log2 n⌉, at least half of all none):

| | messages one after another | steps of a rank | a rank sends | a rank receives |
| --- | --- | --- | --- | --- |
| broadcast | ⌈log2 n⌉ | c + 1, the root c | c·N | N, the root 0 |
| reduce | ⌈log2 n⌉ | c + 1, the root c | N, the root 0 | c·N |
| barrier | 2·⌊log2 n⌋ | 3, rank 0 2, leaves 1 | c + 1 empty messages, rank 0 c | as many |
| scatter, with b ranks below | ⌊log2 n⌋ | 2, the root and leaves 1 | b·N/n | (b + 1)·N/n, the root 0 |

Wins where latency counts: short messages, barriers, and a reduction that only one rank needs. For long messages a root
that sends ⌈log2 n⌉·N loses against algorithms that cut the buffer, and in a scatter most bytes travel more than once.

With v = (rank - root) mod n, the parent of v is v without its lowest set bit, and its children are v + 1, v + 2,
v + 4, … below that bit. The child v + b speaks for the ranks from v + b to v + 2b - 1, so every reduction combines
neighbours in the order of ranks, starting at the root.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step, check_ranks

__all__ = ["barrier", "below", "broadcast", "family", "reduce", "scatter"]


@lru_cache
def broadcast(rank: int, size: int, root: int) -> Schedule:
    """The root's buffer to everyone.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    parents, children = family(rank, size, root)
    # One child per step and the largest subtree first: it has the most left to do, so it should not share the link.
    return Schedule.of(
        [
            *(Step(recvs=(Recv(parent, 0),)) for parent in parents),
            *(Step(sends=(Send(child, 0),)) for child in reversed(children)),
        ]
    )


@lru_cache
def reduce(rank: int, size: int, root: int) -> Schedule:
    """The reduction of all buffers to the root.

    On the other ranks the buffer is left with partial results: run it on a copy where the caller's must stay.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    parents, children = family(rank, size, root)
    # One child per step fixes the order of the reduction; the smallest subtree first, because it is ready first.
    return Schedule.of(
        [
            *(Step(recvs=(Recv(child, 0, reduce=True),)) for child in children),
            *(Step(sends=(Send(parent, 0),)) for parent in parents),
        ]
    )


@lru_cache
def barrier(rank: int, size: int) -> Schedule:
    """No rank leaves before all have come: up the tree of rank 0, then down. Runs on an empty buffer.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` is not in a group of that size.
    """
    parents, children = family(rank, size, 0)
    return Schedule.of(
        [
            Step(recvs=tuple(Recv(child, 0) for child in children)),
            Step(tuple(Send(parent, 0) for parent in parents), tuple(Recv(parent, 0) for parent in parents)),
            Step(sends=tuple(Send(child, 0) for child in reversed(children))),
        ]
    )


@lru_cache
def scatter(rank: int, size: int, root: int) -> Schedule:
    """Chunk r of the root to rank r, and on the way there to each rank that has rank r below it.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    parents, children = family(rank, size, root)
    held = (rank, *below(rank, size, root))
    sends = [Send(child, r) for child in reversed(children) for r in (child, *below(child, size, root))]
    return Schedule.of(
        [Step(recvs=tuple(Recv(parent, r) for parent in parents for r in held)), Step(sends=tuple(sends))], parts=size
    )


def below(rank: int, size: int, root: int) -> list[int]:
    """The ranks that hear from the root through this one, in order from it on."""
    v = (rank - root) % size
    lowest = v & -v or size
    return [(rank + i) % size for i in range(1, min(lowest, size - v))]


def family(rank: int, size: int, root: int) -> tuple[list[int], list[int]]:
    """The parent (none for the root), and the children from the smallest subtree to the largest."""
    check_ranks(size, rank, root)
    v = (rank - root) % size
    lowest = v & -v or size
    bits = [1 << i for i in range(size.bit_length())]
    parents = [(v - lowest + root) % size] if v else []
    return parents, [(v + bit + root) % size for bit in bits if bit < lowest and v + bit < size]
