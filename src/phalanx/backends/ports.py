"""How remote calls get their connections: a port that opens streams to members, and is told of those they open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ChannelClosed, PhalanxError, ProtocolError
from ..transports.stream import Stream

if TYPE_CHECKING:
    from .control_plane import ControlPlane

__all__ = ["Accept", "LinkPort"]

Accept = Callable[[int, Stream], None]
"""Is told of a stream that a member (its rank in the group) has opened. From any thread; must not wait."""


class LinkPort(ABC):
    """Opens streams between the members of a group, each with two ends: who opened it, and the other.

    Args:
        members: The world rank of each member.
    """

    oversubscribed = True
    """Whether ranks may have to share a core: then it is better to sleep at once than to look again."""

    def __init__(self, members: Sequence[int], control: ControlPlane) -> None:
        self.members = tuple(members)
        self.control = control
        self.on_close: Callable[[], None] | None = None
        """Called when the world is closed and this port with it."""
        self.on_abandon: Callable[[], None] | None = None
        """Called in a forked child: whatever was opened belongs to the parent."""

    @abstractmethod
    def start(self) -> None:
        """Begins to accept; those that came before are handed over."""

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
        """Accepts nothing more. Streams that are open stay so."""

    def why_ended(self, member: int, ended: Exception, wait: float) -> PhalanxError:
        """Why a stream to a member ended, in the words of whoever knows best."""
        rank = self.members[member]
        if isinstance(ended, ProtocolError):
            return ProtocolError(
                f"rank {rank} sent a malformed message; closing the connection to it: {ended}", peer=rank
            )
        known = self.control.verdict(rank, (), wait)
        if known is not None:
            return known
        if self.control.has_left(rank):
            return ChannelClosed(rank, "it has left the world")
        return ChannelClosed(rank, f"its connection has ended: {ended}")
