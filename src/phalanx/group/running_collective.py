"""A collective whose turn has come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..deadline import Deadline
from .engines.steps.run import FingerprintMismatch
from .tracking.fingerprint import fingerprint_of
from .tracking.journal import Entry

if TYPE_CHECKING:
    from .collective_runner import CollectiveRunner
    from .engines.base import Engine

__all__ = ["RunningCollective"]


class RunningCollective:
    """One collective under way. What it is, is said by `stamp` before anything is sent."""

    def __init__(self, group: CollectiveRunner, entry: Entry, deadline: Deadline) -> None:
        self.group = group
        self.entry = entry
        self.deadline = deadline
        self.fingerprint = 0
        """The operation's fingerprint, which everything that is sent for it carries."""

    def stamp(
        self,
        operation: str,
        *,
        dtype: str = "",
        shape: tuple[int, ...] = (),
        reduction: str = "",
        root: int = 0,
    ) -> Engine:
        """Says what must be the same on all ranks, and returns what will move the data."""
        fingerprint = fingerprint_of(operation, self.entry.sequence, dtype, shape, reduction, root)
        self.fingerprint = self.group._journal.stamp(self.entry, fingerprint, dtype, shape)
        return self.group._engine_for(self)

    def check_peers(self) -> None:
        """Asks what the others are doing.

        Ranks in different operations may all wait without a byte on the wire: then only asking tells.

        Raises:
            FingerprintMismatch: A member is in another operation.
            OutOfResources: A member that has not connected yet cannot, because this rank has no more descriptors.
        """
        group = self.group
        lane, trouble = group._collectives, group._control.trouble
        if trouble is not None and any(not lane.inbound(rank) for rank in range(lane.size) if rank != lane.rank):
            raise trouble
        # Some may be ahead: those tell what they had under this number. Others may be behind.
        for name, status in group._control.statuses(group._context, self.entry.sequence).replies.items():
            if name in group.members and group._journal.contradicts(status):
                raise FingerprintMismatch(group.members.index(name))
