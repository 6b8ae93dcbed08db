"""The gate before a collective on MPI: it opens once all ranks have come and mean the same.

MPI's calls wait for each other without any bound, and ranks that call different ones get each other's bytes, or hang.
So no rank enters MPI before all are there with the same fingerprint. All waiting for a late, lost or mistaken rank
happens in the gate, which has a deadline and can be broken; what follows takes as long as the transfer.
"""

from __future__ import annotations

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....backends.lane import Lane
from ....backends.mpi.library import Backoff, Mpi
from ....deadline import Deadline
from ...outcomes import DeadlinePassed, FingerprintMismatch
from ...running_collective import RunningCollective
from ..network import NetworkEngine
from ..segment import DONE, raise_outcome

if TYPE_CHECKING:
    from ...._core import Segment

__all__ = ["Gate", "MessageGate", "OpenGate", "SharedGate", "all_in_time"]

_FOREVER = 1e9
"""Seconds."""


class Gate(ABC):
    """Lets all members through together, or none."""

    @abstractmethod
    def enter(self, running: RunningCollective) -> None:
        """Returns once every member has called it for the same operation.

        Raises:
            DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
        """


class OpenGate(Gate):
    """For a group of one, and where the check is switched off."""

    def enter(self, running: RunningCollective) -> None:
        pass


class SharedGate(Gate):
    """Members of one host meet in memory that they share: less than a microsecond."""

    def __init__(self, segment: Segment, members: Sequence[int], lane: Lane) -> None:
        self._segment = segment
        self._members = tuple(members)
        self._lane = lane

    def enter(self, running: RunningCollective) -> None:
        outcome = self._segment.barrier(running.fingerprint, running.deadline.at)
        if outcome != DONE:
            raise_outcome(outcome, self._segment.blamed(outcome), self._members, self._lane)


class MessageGate(Gate):
    """Members on several hosts compare their fingerprints through MPI: one reduction of a few bytes.

    The deadlines are compared, too: a late rank may meet the message of one that has given up meanwhile.

    Args:
        comm: The group's.
    """

    def __init__(self, mpi: Mpi, comm: Any, lane: Lane, *, oversubscribed: bool) -> None:
        self._mpi = mpi
        self._lane = lane
        self._oversubscribed = oversubscribed
        self._mine, self._all = np.zeros(3, np.uint64), np.zeros(3, np.uint64)
        arguments = ([self._mine, mpi.module.UINT64_T], [self._all, mpi.module.UINT64_T], mpi.module.MIN)
        self._begin: Callable[[], Any] = functools.partial(comm.Iallreduce, *arguments)
        self._request: Any = None
        # MPI 4: set up once, which halves the cost of each.
        with contextlib.suppress(NotImplementedError, mpi.module.Exception):
            self._request = comm.Allreduce_init(*arguments)

    def enter(self, running: RunningCollective) -> None:
        mpi, lane = self._mpi, self._lane
        # The least of all fingerprints, and of all complements: they belong together if all ranks have the same.
        self._mine[0] = running.fingerprint
        self._mine[1] = ~self._mine[0]
        self._mine[2] = _on_the_clock(running.deadline)
        request = self._request
        if request is None:
            request = self._begin()
        else:
            request.Start()
        backoff = Backoff(oversubscribed=self._oversubscribed)
        try:
            while not request.Test():
                if lane.error is not None:
                    raise lane.error
                if running.deadline.expired:
                    raise DeadlinePassed(_others(lane))
                backoff.pause()
        except BaseException:
            mpi.left_under_way.append((request, self._mine, self._all))
            raise
        if self._all[0] != ~self._all[1]:
            running.check_peers()  # says who
            raise FingerprintMismatch((lane.rank + 1) % lane.size)
        if self._all[2] <= _now():
            raise lane.error or DeadlinePassed(_others(lane))

    def close(self) -> None:
        """Gives the request back."""
        if self._request is not None:
            self._request.Free()


def all_in_time(running: RunningCollective, lane: Lane) -> None:
    """Returns once all members have come, by messages: for the first time, when there is no gate yet.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
    """
    deadlines = np.zeros(lane.size, np.uint64)
    mine = np.array([_on_the_clock(running.deadline)], np.uint64)
    NetworkEngine(lane, is_star=False).all_gather(running, mine, deadlines, [1] * lane.size)
    if deadlines.min() <= _now():
        raise lane.error or DeadlinePassed(_others(lane))


def _others(lane: Lane) -> list[int]:
    return [rank for rank in range(lane.size) if rank != lane.rank]


def _now() -> int:
    return time.time_ns() // 1000


def _on_the_clock(deadline: Deadline) -> int:
    """The deadline by the clock that hosts have in common, in microseconds."""
    return _now() + int(min(deadline.remaining(), _FOREVER) * 1e6)
