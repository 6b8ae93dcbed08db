"""How a job ends: the steps from a polite signal to SIGKILL, and which rank is to blame. Decisions only, no I/O."""

from __future__ import annotations

import enum
import math
import signal
from dataclasses import dataclass, field

from .processes import LocalRank
from .world import WorldEnd

__all__ = ["Ending", "Reason"]

SETTLE = 0.2
"""Seconds between the first failure and SIGTERM, in which the directory may name the rank that failed first."""
NOTICE = 1.0
"""Seconds that ranks get to raise `PeerLost` by themselves, once the directory has told them who is lost."""


LINGER = 0.5
"""Seconds for processes that the ranks left behind to end by themselves, as helpers do that notice the end."""


class Reason(enum.Enum):
    """Why everything is being ended."""

    FAILURE = enum.auto()
    """A rank failed, or the world ended."""
    SIGNAL = enum.auto()
    """The launcher was told to."""
    OUTPUT = enum.auto()
    """The reader of the launcher's output is gone."""
    LEFTOVERS = enum.auto()
    """All ranks are done, but processes that they started are not."""


@dataclass
class Ending:
    """The state of the end of a job. All times are `time.monotonic()`."""

    grace: float
    reason: Reason | None = None
    signal: int = 0
    """The signal that told the launcher to end."""
    failed: list[LocalRank] = field(default_factory=list)
    """The ranks that failed before anything was sent to them, in the order in which they were seen."""
    cause: WorldEnd | None = None
    signalled: bool = False
    """True once anything was sent: from then on a rank's end says nothing about the rank."""
    steps: list[tuple[float, int]] = field(default_factory=list)

    def rank_ended(self, rank: LocalRank, now: float) -> None:
        """Notes that a rank ended, as far as is known by itself."""
        if self.signalled:
            return
        if rank.status:
            self.failed.append(rank)
            if self.reason is None:
                self._start(Reason.FAILURE, (now + SETTLE, signal.SIGTERM), (now + SETTLE + self.grace, signal.SIGKILL))
        elif self._only_lost(rank) and self.reason is Reason.FAILURE and not self.failed:
            # It left in a hurry, but it was done: those who still need it will say so themselves.
            self._start(None)

    def world_ended(self, cause: WorldEnd, now: float, local: LocalRank | None) -> bool:
        """The directory said why the world ended.

        Args:
            cause: Its words.
            now: The time.
            local: The rank to blame, if it is one of this node.

        Returns:
            Whether that is news. It is not if it comes too late to be trusted, or if the rank was done.
        """
        if self.signalled or self.cause is not None or self.reason not in (None, Reason.FAILURE):
            return False
        self.cause = cause
        if local is not None and local.status == 0 and self._only_lost(local) and not self.failed:
            return False
        self._start(Reason.FAILURE, (now + NOTICE, signal.SIGTERM), (now + NOTICE + self.grace, signal.SIGKILL))
        return True

    def all_lost(self, now: float) -> None:
        """No rank is left that could go on: those that still run get the time to end by themselves."""
        if not self.signalled and self.reason in (None, Reason.FAILURE):
            self._start(Reason.FAILURE, (now + NOTICE, signal.SIGTERM), (now + NOTICE + self.grace, signal.SIGKILL))

    def _only_lost(self, rank: LocalRank) -> bool:
        return self.cause is not None and self.cause.rank == rank.rank and not self.cause.aborted

    def told(self, number: int, now: float) -> None:
        """The launcher got a signal that ends it."""
        last = now + self.grace
        if self.reason in (None, Reason.LEFTOVERS):
            self.signal = number
            first = [(now, number)] if number == signal.SIGINT else []
            # Those who do not listen to Ctrl-C are asked once more before the end.
            middle = now if number != signal.SIGINT else now + self.grace / 2
            self._start(Reason.SIGNAL, *first, (middle, signal.SIGTERM), (last, signal.SIGKILL))
        elif number == signal.SIGINT:
            self.steps = [(now, signal.SIGKILL)]
        else:
            self.steps = [(min(at, last), step) for at, step in self.steps]

    def output_closed(self, now: float) -> None:
        """The reader of the output is gone."""
        if self.reason is None:
            self._start(Reason.OUTPUT, (now, signal.SIGTERM), (now + self.grace, signal.SIGKILL))

    def leftovers(self, now: float) -> None:
        """All ranks are done, but processes that they started still run."""
        self._start(Reason.LEFTOVERS, (now + LINGER, signal.SIGTERM), (now + LINGER + self.grace, signal.SIGKILL))

    def ranks_are_gone(self, now: float) -> None:
        """No rank runs any more: after a failure the wait is over, unless the first failure is still unknown."""
        if self.reason is Reason.FAILURE and not self.signalled and (self.cause is not None or len(self.failed) == 1):
            late = max(0.0, self.next_step() - now)
            self.steps = [(at - late, number) for at, number in self.steps]

    @property
    def undecided(self) -> bool:
        """True while the first rank that failed is not known."""
        return self.reason is Reason.FAILURE and not self.signalled

    def _start(self, reason: Reason | None, *steps: tuple[float, int]) -> None:
        self.reason = reason
        self.steps = list(steps)

    def next_step(self) -> float:
        """When the next step is due."""
        return self.steps[0][0] if self.steps else math.inf

    def take_step(self, now: float) -> int | None:
        """The signal to send now, if any."""
        if not self.steps or self.steps[0][0] > now:
            return None
        self.signalled = True
        return self.steps.pop(0)[1]

    def culprit(self, ranks: list[LocalRank]) -> LocalRank | None:
        """The rank of this node that is to blame; None if no rank of this node is."""
        if self.cause is not None:
            return next((rank for rank in ranks if rank.rank == self.cause.rank), None)
        return self.failed[0] if self.failed else None
