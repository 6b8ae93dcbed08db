"""Ports of the mesh: TCP connections with the world's handshake."""

from __future__ import annotations

from collections.abc import Sequence

from ...deadline import Deadline
from ...errors import ChannelClosed, PeerLost, PhalanxError
from ...transports.stream import Stream
from ...wire.handshake import HandshakeStatus, Rejected
from ..ports import Accept, LinkPort
from .world import LaneKey, MeshWorld

__all__ = ["MeshPort"]


class MeshPort(LinkPort):
    """Opens one connection for each rank that is called. Hands those that others open to `accept`."""

    def __init__(self, world: MeshWorld, key: LaneKey, members: Sequence[int], accept: Accept) -> None:
        super().__init__(members, world)
        self._world = world
        self._key = key
        self._accept = accept
        self._closed = False
        self.oversubscribed = world.oversubscribed
        self.spare_cores, self.crew = world.spare_cores, world.crew

    def start(self) -> None:
        self._world.add_lane(self._key, self)

    def connects_to(self, world_rank: int) -> bool:
        return False

    def attach(self, world_rank: int, stream: Stream) -> None:
        """Takes a connection that a member has opened to this rank. Called in the reactor's thread."""
        if self._closed or world_rank not in self.members:
            stream.close()
        else:
            self._accept(self.members.index(world_rank), stream)

    def dial(self, dst: int, deadline: Deadline) -> Stream:
        rank = self.members[dst]

        def check() -> None:
            known = self.control.verdict(rank, (), 0.0)
            if known is not None:
                raise known
            if self._world.has_left(rank):
                raise ChannelClosed(rank, "it has left the world")

        check()
        try:
            return self._world.dial_channel(self._key, rank, deadline, check)
        except Rejected as error:
            if error.status in (HandshakeStatus.CLOSED, HandshakeStatus.BROKEN):
                raise ChannelClosed(rank, "it has closed its agent") from None
            raise

    def ask_why(self, member: int, wait: float) -> PhalanxError | None:
        rank = self.members[member]
        if self._closed:  # this side closes, and the other has heard of it: nobody waits for the reason
            return super().ask_why(member, 0.0)
        if rank == self.control.rank:
            return super().ask_why(member, wait)
        deadline = Deadline(wait)
        try:
            self.dial(member, deadline).close()  # it says so if it has closed its agent
        except ChannelClosed as closed:  # without a goodbye: perhaps the world has ended, and this rank will hear of it
            return super().ask_why(member, deadline.remaining()) or closed
        except PeerLost as gone:
            return gone
        except (PhalanxError, OSError):  # it cannot be asked
            return super().ask_why(member, deadline.remaining())
        return super().ask_why(member, 0.0)

    def memory_of(self, member: int) -> int | None:
        rank = self.members[member]
        return self._world.roster[rank].pid if self._world.shares_memory_with(rank) else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._world.remove_lane(self._key, broken=False)
        if self.on_close is not None:
            self.on_close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only. The other ranks notice nothing."""
        self._closed = True
        if self.on_abandon is not None:
            self.on_abandon()
