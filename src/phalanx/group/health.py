"""The health of a group: the first cause of its failure, told to all that waits in it."""

from __future__ import annotations

import threading

from ..backends.lane import Lane
from ..errors import Evicted, PhalanxError
from ..wire.control import OperationStatus
from .tracking.journal import Journal
from .tracking.long_waits import LongWaits

__all__ = ["Health"]


class Health:
    """The part of a group that the control plane watches (see `backends.control_plane.Watcher`).

    Args:
        world_ranks: The world rank of each member.
        lanes: The group's lanes, which break with it.
        journal: What this rank is doing in the group.
        long_waits: Speaks of collectives that wait for long.
    """

    def __init__(
        self, world_ranks: tuple[int, ...], lanes: tuple[Lane, ...], journal: Journal, long_waits: LongWaits
    ) -> None:
        self.world_ranks = world_ranks
        self.cause: PhalanxError | None = None
        """The first cause of failure; None while the group works."""
        self._lanes = lanes
        self._journal = journal
        self._long_waits = long_waits
        self._lock = threading.RLock()

    def fail(self, error: PhalanxError) -> None:
        """Breaks the group for good. From any thread."""
        with self._lock:
            if self.cause is None or isinstance(error, Evicted):  # which is why this rank saw the others go
                self.cause = error
            error = self.cause
        for lane in self._lanes:
            lane.fail(error)

    def left(self, rank: int) -> None:
        """Notes that a member closed its world, by its world rank."""
        member = self.world_ranks.index(rank)
        for lane in self._lanes:
            lane.left(member)

    def look_for_long_waits(self) -> None:
        """Speaks of a collective that waits for a rank for long. Called about once a second; does not wait."""
        if self.cause is None:
            self._long_waits.look()

    def status(self, sequence: int = 0) -> OperationStatus:
        """Tells what this rank is doing in the group, or did as its collective of that number."""
        return self._journal.status(sequence)
