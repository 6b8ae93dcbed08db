"""A collective that runs, as its engine sees it."""

from __future__ import annotations

from ..backends.control_plane import ControlPlane
from ..backends.lane import Lane
from ..deadline import Deadline
from .outcomes import FingerprintMismatch
from .tracking.journal import Entry, Journal

__all__ = ["Peers", "RunningCollective"]


class Peers:
    """The other members of a group, which can be asked what they are doing."""

    def __init__(self, lane: Lane, control: ControlPlane, context: bytes, journal: Journal) -> None:
        self._lane = lane
        self._control = control
        self._context = context
        self._journal = journal

    def check(self, sequence: int) -> None:
        """Asks what the others are doing.

        Ranks in different operations may all wait without a byte on the wire: then only asking tells.

        Args:
            sequence: The number of this rank's collective.

        Raises:
            FingerprintMismatch: A member is in another operation.
            OutOfResources: A member that has not connected yet cannot, because this rank has no more descriptors.
        """
        lane, trouble = self._lane, self._control.trouble
        if trouble is not None and any(not lane.inbound(rank) for rank in range(lane.size) if rank != lane.rank):
            raise trouble
        # Some may be ahead: those tell what they had under this number. Others may be behind.
        for name, status in self._control.statuses(self._context, sequence).replies.items():
            if name in lane.members and self._journal.contradicts(status):
                raise FingerprintMismatch(lane.members.index(name))


class RunningCollective:
    """A running collective. Its fingerprint is fixed before the first byte is sent.

    Args:
        entry: Its entry in the group's journal.
        fingerprint: The number that everything sent for it carries.
    """

    __slots__ = ("_entry", "_peers", "deadline", "fingerprint")

    def __init__(self, entry: Entry, deadline: Deadline, peers: Peers, fingerprint: int) -> None:
        self._entry = entry
        self._peers = peers
        self.deadline = deadline
        self.fingerprint = fingerprint

    @property
    def name(self) -> str:
        """The operation and its number, for errors."""
        return self._entry.name

    def with_fingerprint(self, fingerprint: int) -> RunningCollective:
        """The same collective while it does something else first, such as setting up memory."""
        return RunningCollective(self._entry, self.deadline, self._peers, fingerprint)

    def check_peers(self) -> None:
        """Asks what the others are doing; see `Peers.check`."""
        self._peers.check(self._entry.sequence)
