"""The slot: a few bytes that the root of an operation tells everybody first, along the tree. Chunk n of n ranks.

A rank hears it from its parent, and passes it on once it knows what else there is to do: with what else it sends.
"""

from __future__ import annotations

from functools import lru_cache

from .schedule import Recv, Schedule, Send, Step
from .tree import family

__all__ = ["hear", "pass_on", "with_slot"]


@lru_cache
def hear(rank: int, size: int, root: int) -> Schedule:
    """The slot from the parent; nothing on the root.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    parents, _ = family(rank, size, root)
    return Schedule.of([Step(recvs=tuple(Recv(parent, size) for parent in parents))], parts=size + 1)


@lru_cache
def pass_on(rank: int, size: int, root: int) -> Schedule:
    """The slot to the children.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: `rank` or `root` is not in a group of that size.
    """
    _, children = family(rank, size, root)
    return Schedule.of([Step(sends=tuple(Send(child, size) for child in reversed(children)))], parts=size + 1)


@lru_cache
def with_slot(schedule: Schedule, rank: int, size: int, root: int) -> Schedule:
    """This schedule of a scatter, with the slot to the children before what it sends to them last: both go at once."""
    told = pass_on(rank, size, root).steps
    if not told:
        return Schedule(size + 1, schedule.steps)
    *before, last = schedule.steps
    return Schedule(size + 1, (*before, Step(told[0].sends + last.sends, last.recvs)))
