"""A rank's connections on the classic wire: one per pair of ranks, shared by all groups.

Plain messages of the spec are `Backend.send` and `recv`. Groups and sub-groups send Phalanx frames between them, each
escaped by a bit in its length that no real length has, so their traffic never meets. A ferrotorch rank understands the
plain messages only: in a world with such peers, groups send plain messages, too, on the backend's own stream.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Literal

from ...arguments import shown
from ...config import Options
from ...deadline import Deadline
from ...errors import ChannelClosed, ConfigError, PeerLost, PhalanxError
from ...rendezvous.host import host_id, hostname
from ...transports.mailbox import Mailbox
from ...transports.stream import Stream, StreamEnded
from ...types import Address
from ...wire.control import Member
from ..bounded_set import BoundedSet
from ..control_plane import ControlPlane
from ..lane import Lane
from .channels import PLAIN_LANE_ID, ClassicInbound, ClassicOutbound

__all__ = ["CLASSIC_BIND", "ClassicWorld", "Peers", "as_peers"]

Peers = Literal["phalanx", "ferrotorch"]

CLASSIC_BIND = Address("127.0.0.1", 0)
LAST_READ = 1.0
"""Seconds that closing reads what still comes from ranks that do not stop sending."""


def as_peers(peers: Peers) -> Peers:
    """The argument `peers` of a backend, checked.

    Raises:
        ConfigError: It is neither of the two.
    """
    if peers not in ("phalanx", "ferrotorch"):
        raise ConfigError(f"peers={shown(peers)} is not valid (expected 'phalanx' or 'ferrotorch')")
    return peers


class ClassicWorld(ControlPlane):
    """A rank's connections to the others. There is no directory: a loss is seen only by the ranks connected to it.

    Args:
        peers: With `"ferrotorch"` nothing but plain messages goes over the wire.
    """

    def __init__(
        self, rank: int, size: int, streams: dict[int, Stream], options: Options, peers: Peers = "phalanx"
    ) -> None:
        super().__init__(rank)
        self.size = size
        self.peers = peers
        self.options = options
        self.roster = [Member(peer, hostname(), host_id(), 0, "", 0, 0) for peer in range(size)]
        self.connected = frozenset(streams)
        self._lock = threading.RLock()
        self._mailboxes: dict[bytes, Mailbox] = {}
        self._nowhere = Mailbox()
        self._nowhere.fail(ChannelClosed(rank, "this group was closed on this rank"))
        self._lanes: list[Lane] = []
        self._closed_lanes: BoundedSet[bytes] = BoundedSet()
        """Messages for these lanes are dropped."""
        self.inbound = {
            peer: ClassicInbound(
                stream,
                peer,
                plain=self.mailbox(PLAIN_LANE_ID),
                mailbox_for=self.mailbox_for,
                options=options,
                on_end=lambda channel, ended, _goodbye: self.lost(channel.src, str(ended)),
            )
            for peer, stream in streams.items()
        }
        self.outbound = {
            peer: ClassicOutbound(stream, peer, functools.partial(self._sending_ended, peer))
            for peer, stream in streams.items()
        }

    def add_lane(self, lane: Lane) -> None:
        """Wakes the threads that wait for a lane whenever a connection has brought something."""
        with self._lock:
            self._lanes.append(lane)

    def mailbox(self, lane_id: bytes) -> Mailbox:
        """The mailbox of a lane, also of one that this rank has not opened yet."""
        with self._lock:
            return self._mailboxes.setdefault(lane_id, Mailbox())

    def mailbox_for(self, lane_id: bytes) -> Mailbox:
        """The mailbox for a message. One for a lane that was closed here is dropped."""
        with self._lock:
            return self._nowhere if lane_id in self._closed_lanes else self.mailbox(lane_id)

    def wake_lanes(self) -> None:
        """Wakes the waiting threads of all lanes, because they share the connections."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.wake_all()

    def forget_lane(self, lane: Lane) -> None:
        """Undoes `add_lane`."""
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)

    def remove_lane(self, lane: Lane, lane_id: bytes) -> None:
        """Forgets a lane that was closed, and drops what still comes for it."""
        self.forget_lane(lane)
        with self._lock:
            self._mailboxes.pop(lane_id, None)
            self._closed_lanes.add(lane_id)

    def _sending_ended(self, peer: int, ended: Exception, _goodbye: bool) -> PhalanxError:
        # What that rank sent before it went can still be read. The reader will see the end.
        return self._lost.get(peer) or PeerLost(peer, str(ended))

    def lost(self, peer: int, reason: str) -> PhalanxError:
        """Handles the end of a connection: fails receives from that rank in all lanes, now and later."""
        with self._condition:
            error = self._lost.setdefault(peer, PeerLost(peer, reason))
        with self._lock:
            mailboxes = list(self._mailboxes.values())
        for mailbox in mailboxes:
            mailbox.gone(peer, error)
        return error

    def close(self, timeout: float) -> None:
        """Closes all connections."""
        closed = ChannelClosed(self.rank, "this backend was closed on this rank")
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:  # of groups that outlive their backend
            lane.close()
        deadline = Deadline(min(timeout, LAST_READ))
        scratch = memoryview(bytearray(64 << 10))
        for peer, sender in self.outbound.items():
            sender.stream.finish_sending()
            # Unread bytes would turn the close into a reset, which could overtake what was sent last.
            with self.inbound[peer].lock, contextlib.suppress(StreamEnded, ValueError):
                while self.inbound[peer].stream.receive_into(scratch) and not deadline.expired:
                    pass
            self.inbound[peer].end(closed)
            sender.end(closed)

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        for channel in self.inbound.values():
            channel.stream.abandon()
