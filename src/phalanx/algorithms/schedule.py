"""Schedules of collectives: which chunk goes to whom in which step, for one rank.

Steps run one after another. The sends and receives of one step run together: an executor must let both make progress,
because in a ring every rank sends and receives in the same step, and whoever finishes the sends first waits for ever
once messages outgrow the buffers of the channel.

What an executor may rely on:

- The k-th send from one rank to another meets the k-th receive there from that rank, and both name the same chunk.
- No step writes a chunk twice, or one that it also sends, unless it reduces into it late (`Recv.late`). So its
  transfers may finish in any order, and may read and write the buffer directly. (A barrier moves no data and runs on an
  empty buffer, so the rule says nothing about it.)
- Each chunk is reduced in one fixed order. It is finished on one rank and then only copied, or all who finish it
  combine the same operands in the same order (`Recv.before`): either way all ranks end with the same bits.
- All of this holds element by element, so a chunk may travel in pieces of any size.

An empty chunk is still a message: a barrier is made of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from phalanx.errors import InvalidRank, InvalidWorldSize, UsageError

__all__ = ["Recv", "Schedule", "Send", "Step", "check_ranks", "chunk_bounds"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send `buffer[chunk]` to `peer`."""

    peer: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive from `peer`: `buffer[chunk] = received`, or with `reduce` `buffer[chunk] = buffer[chunk] op received`.

    Two ranks that exchange a chunk and both reduce it need two more words. With `late` the reduction waits until all
    transfers of the step are done, because one of them sends the chunk. With `before` the operands change places,
    `buffer[chunk] = received op buffer[chunk]`: a NaN or a signed zero may tell one order from the other.
    """

    peer: int
    chunk: int
    reduce: bool = False
    before: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers that run together; each tuple is in the order in which they are best started."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The part of one rank: the buffer is cut into `parts` chunks (`chunk_bounds`), and the steps run in order."""

    parts: int
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, steps: Iterable[Step], *, parts: int = 1) -> Schedule:
        """A schedule of these steps, without those that have nothing to do."""
        return cls(parts, tuple(step for step in steps if step.sends or step.recvs))

    def among(self, members: Sequence[int]) -> Schedule:
        """The same schedule for some ranks of a larger group: peer i is `members[i]`. Chunks keep their numbers."""
        return _among(self, tuple(members))


@lru_cache
def _among(schedule: Schedule, members: tuple[int, ...]) -> Schedule:
    def rename(step: Step) -> Step:
        sends = tuple(Send(members[send.peer], send.chunk) for send in step.sends)
        return Step(sends, tuple(replace(recv, peer=members[recv.peer]) for recv in step.recvs))

    return Schedule(schedule.parts, tuple(rename(step) for step in schedule.steps))


def chunk_bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Cuts `count` elements into `parts` chunks, given as (start, stop) in order.

    Lengths differ by one at most. With fewer elements than parts some chunks are empty.

    Raises:
        UsageError: `count` is negative, or `parts` is less than 1.
    """
    if count < 0 or parts < 1:
        raise UsageError(f"cannot cut {count} elements into {parts} chunks (expected 0 or more, into 1 or more)")
    return list(pairwise(count * i // parts for i in range(parts + 1)))


def check_ranks(size: int, *ranks: int) -> None:
    """Refuses what would give a wrong schedule rather than none.

    Raises:
        InvalidWorldSize: `size` is less than 1.
        InvalidRank: One of `ranks` is not in a group of that size.
    """
    if size < 1:
        raise InvalidWorldSize(size)
    for rank in ranks:
        if not 0 <= rank < size:
            raise InvalidRank(rank, size)
