"""Ports: the connections of remote calls. A port opens streams to members, and accepts those that they open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ChannelClosed, PhalanxError, ProtocolError
from ..transports.stream import Stream

if TYPE_CHECKING:
    from .._core import Crew
    from .control_plane import ControlPlane

__all__ = ["Accept", "LinkPort"]

Accept = Callable[[int, Stream], None]
"""Takes a stream that a member (its rank in the group) has opened. Called in any thread; must not wait."""


class LinkPort(ABC):
    """Opens and accepts streams between the members of a group.

    Args:
        members: The world rank of each member.
    """

    oversubscribed = True
    """True if ranks may have to share a core: then it is better to sleep at once than to look again."""
    spare_cores = 0
    """Cores of this host for each of its ranks, besides the one that the rank runs on."""
    crew: Crew | None = None
    """The threads that may use them, for those who read what other ranks lend."""

    def __init__(self, members: Sequence[int], control: ControlPlane) -> None:
        self.members = tuple(members)
        self.control = control
        self.on_close: Callable[[], None] | None = None
        """Called when the port is closed, also by its world."""
        self.on_abandon: Callable[[], None] | None = None
        """Called in a forked child: the open streams belong to the parent."""

    @abstractmethod
    def start(self) -> None:
        """Begins to accept streams, and hands over those that came before."""

    @abstractmethod
    def dial(self, dst: int, deadline: Deadline) -> Stream:
        """Opens a stream to a member.

        Raises:
            Timeout: It did not answer in time.
            PeerLost: It is gone.
        """

    def memory_of(self, member: int) -> int | None:
        """The process id of a member that can share memory with this rank, else None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stops accepting. Open streams stay open."""

    def why_ended(self, member: int, ended: Exception, wait: float) -> PhalanxError:
        """The error for a stream to a member that ended: the member's own reason if it is known."""
        rank = self.members[member]
        if isinstance(ended, ProtocolError):
            return ProtocolError(
                f"rank {rank} sent a malformed message; closing the connection to it: {ended}", peer=rank
            )
        known = self.ask_why(member, wait)
        if known is not None:
            return known
        if self.control.has_left(rank):
            return ChannelClosed(rank, "it has left the world")
        return ChannelClosed(rank, f"its connection has ended: {ended}")

    def why_closed(self, member: int) -> PhalanxError:
        """The error for a member that has closed its agent: why its world has ended, if that is the reason."""
        return self.control.ended or ChannelClosed(self.members[member], "it has closed its agent")

    def ask_why(self, member: int, wait: float) -> PhalanxError | None:
        """Finds out what became of a member whose stream has ended; None if that is not known within `wait` seconds.

        Where a member can be asked itself, it is: a goodbye on the stream is lost if it would have to go into the
        middle of a frame, or if the other side has not read all that was sent before it.
        """
        return self.control.verdict(self.members[member], (), wait)
