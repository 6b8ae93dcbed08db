"""Lanes on the classic wire: one connection per pair of ranks, shared by all groups.

Plain messages of the spec are `Backend.send` and `recv`. Groups and sub-groups send Phalanx frames between them, each
escaped by a bit in its length that no real length has, so their traffic never meets. A ferrotorch rank understands the
plain messages only: in a world with such peers, groups send plain messages, too, on the backend's own stream.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Literal

from ...arguments import shown
from ...config import Options
from ...deadline import Deadline
from ...errors import ChannelClosed, ConfigError, NoConnection, PeerLost, PhalanxError, UnsupportedOp
from ...rendezvous.host import host_id, hostname
from ...transports.channel import Inbound, Outbound
from ...transports.mailbox import Arrival, Envelope, Mailbox, PendingTransfer, Receive, Sink
from ...transports.stream import Buffer, Stream, StreamEnded
from ...types import Address
from ...wire.classic import frames as wire
from ...wire.control import Member
from ...wire.frames import HEADER_SIZE, FrameHeader, FrameKind, pack_header, parse_header
from ..base import RAW_LANE, WORLD_CONTEXT, derive_context, payload_size
from ..control_plane import ControlPlane
from ..lane import Lane
from ..recent import Recent

__all__ = ["CLASSIC_BIND", "ClassicWorld", "Peers", "check_peers"]

Peers = Literal["phalanx", "ferrotorch"]

CLASSIC_BIND = Address("127.0.0.1", 0)
LANE_ID_SIZE = 16
LAST_READ = 1.0
"""Seconds that closing reads what still comes from ranks that do not stop sending."""


def check_peers(peers: str) -> None:
    """Refuses a kind of peers that does not exist.

    Raises:
        ConfigError: It is neither of the two.
    """
    if peers not in ("phalanx", "ferrotorch"):
        raise ConfigError(f"peers={shown(peers)} is not valid (expected 'phalanx' or 'ferrotorch')")


class ClassicWorld(ControlPlane):
    """A rank's connections to the others. There is no directory: a loss is seen by those who were connected.

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
        self._lanes: list[_ClassicLane] = []
        self._closed_lanes: Recent[bytes] = Recent()
        """To drop what comes late."""
        self.inbound = {
            peer: _ClassicInbound(stream, peer, self, options.max_message, options.max_object)
            for peer, stream in streams.items()
        }
        self.outbound = {
            peer: _ClassicOutbound(stream, peer, functools.partial(self._sending_ended, peer))
            for peer, stream in streams.items()
        }

    def open_lane(self, context: bytes, number: int, members: tuple[int, ...]) -> Lane:
        """A lane among these world ranks."""
        is_own = context == WORLD_CONTEXT and number == RAW_LANE
        kind = _ClassicLane if is_own or self.peers == "phalanx" else _BorrowedLane
        plain = is_own or kind is _BorrowedLane
        lane_id = bytes(LANE_ID_SIZE) if plain else derive_context(context, "lane", number)
        lane = kind(self, lane_id, members, self.mailbox(lane_id), plain=plain)
        with self._lock:
            self._lanes.append(lane)
        return lane

    def mailbox(self, lane_id: bytes) -> Mailbox:
        """The mailbox of a lane, also of one that this rank has not opened yet."""
        with self._lock:
            return self._mailboxes.setdefault(lane_id, Mailbox())

    def mailbox_for(self, lane_id: bytes) -> Mailbox:
        """Where a message goes. What comes for a lane that was closed here goes nowhere."""
        with self._lock:
            return self._nowhere if lane_id in self._closed_lanes else self.mailbox(lane_id)

    def wake_lanes(self) -> None:
        """Makes every waiting thread look again: all lanes share the connections."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.wake_all()

    def forget_lane(self, lane: _ClassicLane) -> None:
        """Wakes a lane no more."""
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)

    def remove_lane(self, lane: _ClassicLane) -> None:
        """Forgets a lane that was closed, and drops what still comes for it."""
        self.forget_lane(lane)
        with self._lock:
            self._mailboxes.pop(lane.lane_id, None)
            self._closed_lanes.add(lane.lane_id)

    def _sending_ended(self, peer: int, ended: Exception, _goodbye: bool) -> PhalanxError:
        # What that rank sent before it went can still be read. That there is no more, the reader will see.
        return self._lost.get(peer) or PeerLost(peer, str(ended))

    def lost(self, peer: int, reason: str) -> PhalanxError:
        """A connection ended: nothing more will come from that rank, in any lane, nor in one that is opened later."""
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


class _ClassicOutbound(Outbound):
    """Shares its stream with the reader, so it neither reads from it nor closes it."""

    def said_goodbye(self) -> bool:
        return False

    def _close_stream(self) -> None:
        self.stream.finish_sending()


class _ClassicInbound(Inbound):
    """Reads plain messages and escaped frames, and finds the mailbox of each."""

    def __init__(self, stream: Stream, src: int, world: ClassicWorld, max_message: int, max_object: int) -> None:
        super().__init__(
            stream,
            src,
            world.mailbox(bytes(LANE_ID_SIZE)),
            max_message=max_message,
            max_object=max_object,
            on_end=lambda channel, ended, _goodbye: world.lost(channel.src, str(ended)),
        )
        self._world = world
        self._escaped = False
        self._target = self._mailbox

    def _first_need(self) -> int:
        return wire.LENGTH_SIZE

    def _parse(self, head: bytes) -> Arrival | None:
        if self._header is not None:  # the description of an escaped frame
            header, self._header, self._escaped = self._header, None, False
            return self._begin(self._target, header, head)
        if self._escaped:
            self._target = self._world.mailbox_for(head[:LANE_ID_SIZE])
            header = parse_header(head[LANE_ID_SIZE:], max_message=self._max_message, max_object=self._max_object)
            if header.description:
                self._header = header
                self._need = header.description
                return None
            self._escaped = False
            return self._begin(self._target, header, b"")
        length, self._escaped = wire.parse_length(head, self._max_message + self._max_object)
        if self._escaped:
            self._need = LANE_ID_SIZE + HEADER_SIZE
            return None
        return self._begin(self._mailbox, FrameHeader(FrameKind.RAW, 0, 0, length), b"")

    def _begin(self, mailbox: Mailbox, header: FrameHeader, description: bytes) -> Arrival | None:
        if header.kind is FrameKind.GOODBYE:  # of one lane: the connection serves the others
            self._need = self._first_need()
            self._settled += mailbox.mark_gone(self.src, ChannelClosed(self.src, "it has closed this group"))
            return None
        return super()._begin(mailbox, header, description)


class _ClassicLane(Lane):
    """A lane whose mailbox speaks of world ranks, because a connection serves lanes with different members."""

    def __init__(
        self, world: ClassicWorld, lane_id: bytes, members: tuple[int, ...], mailbox: Mailbox, *, plain: bool
    ) -> None:
        super().__init__(members.index(world.rank), members, world)
        self.mailbox = mailbox
        self.mailbox.sources = world.connected if plain else frozenset(members) & world.connected
        self.lane_id = lane_id
        self._world = world
        self._plain = plain

    def source_of(self, envelope: Envelope) -> int:
        return self.members.index(envelope.src)

    def mailbox_source(self, src: int) -> int:
        self._check_connected(src)
        return self.members[src]

    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        self._check_connected(dst)
        if self.error is not None:
            failed = PendingTransfer()
            failed.complete(self.error)
            return failed
        channel = self._world.outbound[self.members[dst]]
        size = payload_size(payload)
        if self._plain:
            return channel.send([wire.pack_length(size), *payload])
        header = pack_header(kind, tag, len(description), size)
        length = LANE_ID_SIZE + HEADER_SIZE + len(description) + size
        head = wire.pack_escaped_length(length) + self.lane_id + header
        return channel.send([head, description, *payload])

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        if src is None:
            return [channel for peer, channel in self._world.inbound.items() if peer in self.members]
        return (self._world.inbound[src],)

    def wake_readers(self) -> None:
        self._world.wake_lanes()

    def streams(self) -> list[Stream]:
        return [channel.stream for peer, channel in self._world.inbound.items() if peer in self.members]

    def unsent(self) -> list[PendingTransfer]:
        return [outgoing for channel in self._world.outbound.values() for outgoing in channel.unsent()]

    def peer_of(self, channel: Outbound) -> int:
        return channel.dst

    def _check_connected(self, peer: int) -> None:
        rank = self.members[peer]
        if rank not in self._world.connected:
            raise NoConnection(
                f"rank {self._world.rank} has no connection to rank {rank} on the star, where all traffic goes through "
                "rank 0 (MeshBackend connects every rank with every other)",
                rank=self._world.rank,
                peer=rank,
            )

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        self._world.remove_lane(self)
        for channel in self._world.inbound.values():
            channel.release(self.mailbox, error)
        if not goodbye or self._plain:  # the classic wire itself has no word for it
            return
        word = (
            wire.pack_escaped_length(LANE_ID_SIZE + HEADER_SIZE)
            + self.lane_id
            + pack_header(FrameKind.GOODBYE, 0, 0, 0)
        )
        for member in self.members:
            sender = self._world.outbound.get(member)
            if sender is not None:
                sender.send([word])


class _BorrowedLane(_ClassicLane):
    """A group's lane among ferrotorch's ranks: the backend's own stream, which outlives the group.

    Its messages are bytes and nothing else, so only what fits that is sent and received.
    """

    def __init__(
        self, world: ClassicWorld, lane_id: bytes, members: tuple[int, ...], mailbox: Mailbox, *, plain: bool
    ) -> None:
        super().__init__(world, lane_id, members, mailbox, plain=plain)
        self._posted: list[Receive] = []

    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        self._check_plain(tag, is_array=kind in (FrameKind.RAW, FrameKind.ARRAY))
        return super().start_send(dst, kind, tag, description, payload, deadline)

    def post(self, src: int | None, tag: int | None, sink: Sink) -> Receive:
        self._check_plain(tag or 0, is_array=sink.takes_plain_bytes)
        receive = super().post(src, tag, sink)
        with self._guard:
            self._posted = [one for one in (*self._posted, receive) if not (one.done or one.withdrawn)]
        return receive

    def _check_plain(self, tag: int, *, is_array: bool) -> None:
        if tag or not is_array:
            raise UnsupportedOp(
                "ferrotorch's messages are bytes without tag, dtype or shape: send and receive arrays with tag=0, and "
                "give recv an `out`"
            )

    def _end(self, error: BaseException, *, goodbye: bool) -> None:
        if not goodbye:
            super()._end(error, goodbye=goodbye)  # the stream is out of step: nothing on it makes sense any more
            return
        with self._guard:
            self.error = self.error or error
        self.interrupt(goodbye)
        for receive in self._posted:
            if self.mailbox.withdraw(receive):
                receive.complete(error)
        self._world.forget_lane(self)
        self.wake_all()
