"""Lanes on the classic wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...deadline import Deadline
from ...errors import NoConnection, UnsupportedOp
from ...transports.channel import Inbound, Outbound
from ...transports.mailbox import Envelope, Mailbox, PendingTransfer, Receive, Sink
from ...transports.stream import Buffer, Stream
from ...wire.classic import frames as wire
from ...wire.frames import HEADER_SIZE, FrameKind, pack_header
from ..contexts import RAW_LANE, WORLD_CONTEXT, derive_context
from ..lane import Lane, payload_size
from .channels import LANE_ID_SIZE, PLAIN_LANE_ID
from .world import ClassicWorld

__all__ = ["open_classic_lane"]


def open_classic_lane(world: ClassicWorld, context: bytes, number: int, members: tuple[int, ...]) -> Lane:
    """A lane among these world ranks."""
    is_own = context == WORLD_CONTEXT and number == RAW_LANE
    kind = _ClassicLane if is_own or world.peers == "phalanx" else _BorrowedLane
    plain = is_own or kind is _BorrowedLane
    lane_id = PLAIN_LANE_ID if plain else derive_context(context, "lane", number)
    lane = kind(world, lane_id, members, world.mailbox(lane_id), plain=plain)
    world.add_lane(lane)
    return lane


class _ClassicLane(Lane):
    """A lane on shared connections. Its mailbox uses world ranks, because lanes have different members."""

    def __init__(
        self, world: ClassicWorld, lane_id: bytes, members: tuple[int, ...], mailbox: Mailbox, *, plain: bool
    ) -> None:
        super().__init__(members.index(world.rank), members, world)
        self._use_mailbox(mailbox, world.connected if plain else frozenset(members) & world.connected)
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
        self._world.remove_lane(self, self.lane_id)
        for channel in self._world.inbound.values():
            channel.release(self.mailbox, error)
        if not goodbye or self._plain:  # plain messages cannot say that a lane is closed
            return
        word = (
            wire.pack_escaped_length(LANE_ID_SIZE + HEADER_SIZE)
            + self.lane_id
            + pack_header(FrameKind.GOODBYE, 0, 0, 0)
        )
        for member in self.members:
            sender = self._world.outbound.get(member)
            if sender is not None:
                sender.follow([word])


class _BorrowedLane(_ClassicLane):
    """A group's lane among ferrotorch's ranks: the backend's own stream, which outlives the group.

    Its messages are bytes without tag or type, so it refuses everything that needs one of these.
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
