"""A lane of the mesh: TCP connections that are opened when first used.

A connection carries one lane, so a flood on one group cannot hold up another, and closing one says goodbye for exactly
one lane. Whoever sends first opens it. Plain TCP is used in both directions then (`two_way`): if both open one at the
same time, that of the lower rank stays; should both be there nevertheless, each rank sends by its own. Inside TLS a
connection carries one direction, and so it does between ranks that can share memory, where it goes over to a ring.
"""

from __future__ import annotations

import functools
import logging
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..._native import core, plain_arrays
from ...background_thread import uninterrupted
from ...deadline import Deadline
from ...errors import ChannelClosed, PeerLost, PhalanxError, ProtocolError
from ...operating_system import hung_up
from ...rendezvous.error_codec import encode_error, shorten_error
from ...transports.channel import Inbound, Outbound
from ...transports.direct import outbound_over
from ...transports.lending import LEND_ALONE_FROM, Lending, lending_with
from ...transports.mailbox import PendingTransfer, Receive, Sink
from ...transports.ring import open_offer
from ...transports.ring_channel import RingInbound, RingOutbound
from ...transports.stream import Buffer, Stream, StreamEnded
from ...transports.two_way import WritingHalf, two_way
from ...transports.waker import Waker
from ...tuning import current
from ...wire.control import pack_error
from ...wire.frames import FrameKind, pack_header
from ...wire.handshake import HandshakeStatus, Rejected
from ..lane import Lane, payload_size
from ..polling import sleep
from .waiting_line import WaitingLine
from .world import MeshWorld

if TYPE_CHECKING:
    from ..._core import (
        FastMessages,
        PreparedChannelMessage,
        Recorder,
        RingIn,
        RingOut,
        StreamMessages,
    )

__all__ = ["MeshLane"]

logger = logging.getLogger("phalanx.backends")

PATIENT = (300, 100)
"""Looks of a fast message at its ring, and yields of its core, before it sleeps: some 10 and 50 us."""
OVERSUBSCRIBED = (0, 64)
"""The same where there are more ranks than cores, and the other rank may need this very core."""

CROSSING = 0.05
"""Seconds that a connection which the other rank opens at the same time is waited for before trying again."""

CROSSED_AFTER = 2.0
"""Seconds after which this rank gives up opening a connection if the other one's has come meanwhile. An answer takes
milliseconds; without one the other rank can accept none, as where it has no descriptors left."""

HUNG_UP = hung_up()
"""The event of a connection that the other side has closed, even if there is something left to read."""


class MeshLane(Lane):
    """A lane whose channels are TCP connections."""

    direct = True

    def __init__(self, world: MeshWorld, context: bytes, number: int, members: Sequence[int]) -> None:
        super().__init__(members.index(world.rank), members, world)
        self._world = world
        self._key = (context, number)
        self._inbound: dict[int, RingInbound] = {}
        self._outbound: dict[int, RingOutbound] = {}
        self._backward: dict[int, RingInbound] = {}
        """The other direction of connections that this rank has opened, by which a member answers if it opens none."""
        self._spare: dict[int, tuple[WritingHalf, RingInbound]] = {}
        """The other direction of connections that members have opened, as long as this rank has not sent."""
        self._connecting_to: set[int] = set()
        """Members to which this rank opens a connection for both, or has."""
        self._fast_messages: FastMessages | None = None
        self._stream_messages: StreamMessages | None = None
        self._waiting_line: WaitingLine | None = None
        """Where there is a core."""
        self._dialling = [threading.Lock() for _ in self.members]
        self.oversubscribed, self.spare_cores, self.crew = world.oversubscribed, world.spare_cores, world.crew
        if core is not None:
            self.wait_policy = core.WaitPolicy(self.oversubscribed)
        world.add_lane(self._key, self)

    def attach(self, world_rank: int, stream: Stream) -> None:
        """Takes the channel that a member has opened to this rank. Called in the reactor's thread."""
        if self.error is not None or world_rank not in self.members:
            stream.close()
            return
        src = self.members.index(world_rank)
        spare: WritingHalf | None = None
        if self._stays_plain(src, stream):
            stream, spare = two_way(stream, self._world.lingering)
        channel = self._new_inbound(stream, src, self.inbound_ended)
        with self._guard:
            taken = src in self._inbound or self.error is not None
            if not taken:
                self._inbound[src] = channel
                if spare is not None:
                    self._spare[src] = spare, channel
                self._receives_by_stream(channel)
        if taken:
            # A member opens one channel. A second one is an error of the member.
            logger.warning("rank %d: dropped a second channel of rank %d in one lane", self._world.rank, world_rank)
            stream.close()
            if spare is not None:
                spare.close()
        else:
            self.wake_all()

    def _new_inbound(
        self,
        stream: Stream,
        src: int,
        on_end: Callable[[Inbound, Exception, bool], BaseException],
        ascertained: Callable[[RingInbound], None] | None = None,
    ) -> RingInbound:
        options = self._world.options
        return RingInbound(
            stream,
            src,
            self.mailbox,
            max_message=options.max_message,
            max_object=options.max_object,
            on_end=on_end,
            open_ring=functools.partial(self._open_ring, src),
            switched=self._receives_by_ring,
            ascertained=ascertained,
        )

    def connects_to(self, world_rank: int) -> bool:
        return world_rank in self.members and self.members.index(world_rank) in self._connecting_to

    def start_send(
        self, dst: int, kind: FrameKind, tag: int, description: bytes, payload: Sequence[Buffer], deadline: Deadline
    ) -> PendingTransfer:
        self.post_prepared()
        channel = self._outbound.get(dst)
        if channel is None:
            try:
                channel = self._open(dst, deadline)
            except PhalanxError as error:
                failed = PendingTransfer()
                failed.complete(error)
                return failed
        header = pack_header(kind, tag, len(description), payload_size(payload))
        return channel.send([header, description, *payload])

    def post(self, src: int | None, tag: int | None, sink: Sink) -> Receive:
        self.post_prepared()
        return super().post(src, tag, sink)

    def post_prepared(self) -> None:
        line = self._waiting_line
        if line is not None and line.prepared:
            line.post()

    def take_back_prepared(self, prepared: PreparedChannelMessage) -> None:
        prepared.leave()

    def close(self) -> None:
        super().close()
        if self._waiting_line is not None:
            self._waiting_line.join()

    def is_open_to(self, dst: int) -> bool:
        return dst in self._outbound

    def outbound(self, dst: int, deadline: Deadline) -> RingOutbound:
        return self._outbound.get(dst) or self._open(dst, deadline)

    def inbound(self, src: int | None) -> Iterable[Inbound]:
        if src is None:
            with self._guard:
                return list((self._backward | self._inbound).values())
        channel = self._inbound.get(src) or self._backward.get(src)
        return () if channel is None else (channel,)

    def streams(self) -> list[Stream]:
        with self._guard:
            return [c.stream for c in self._all_inbound()] + [c.stream for c in self._outbound.values()]

    def _all_inbound(self) -> list[RingInbound]:
        return [*self._inbound.values(), *self._backward.values()]

    def unsent(self) -> list[PendingTransfer]:
        self.post_prepared()
        with self._guard:
            channels = list(self._outbound.values())
        return [outgoing for channel in channels for outgoing in channel.unsent()]

    def _open(self, dst: int, deadline: Deadline) -> RingOutbound:
        """The channel to a member. One that has been opened when Ctrl-C comes stays: the member expects no second."""
        return uninterrupted(lambda: self._open_once(dst, deadline), "phalanx-opens")

    def _open_once(self, dst: int, deadline: Deadline) -> RingOutbound:
        lock = self._dialling[dst]
        if not lock.acquire(timeout=deadline.remaining()):
            raise self._world.no_answer(self.members[dst], deadline)
        try:
            channel = self._outbound.get(dst)
            if channel is None:
                stream, twin = self._way_to(dst, deadline)
                if not self.oversubscribed:
                    stream.keep_in_cache()
                channel = RingOutbound(
                    stream,
                    dst,
                    functools.partial(self._sending_ended, dst),
                    offers=self._shares_memory_with(dst),
                    lending=self._lending,
                    switched=self._sends_by_ring,
                    twin=twin,
                )
                with self._guard:
                    if self.error is None:
                        self._outbound[dst] = channel
                        self._sends_by_stream(channel)
                        if twin is not None and twin is self._inbound.get(dst):
                            del self._spare[dst]
                        elif twin is not None:
                            self._backward[dst] = twin
                self.wake_all()  # a thread that waits for the member may now hear from it
                if self.error is not None:
                    stream.close()
                    if twin is not None:
                        twin.stream.close()
                    raise self.error
            return channel
        finally:
            if dst not in self._outbound:
                self._connecting_to.discard(dst)
            lock.release()

    def _way_to(self, dst: int, deadline: Deadline) -> tuple[Stream, RingInbound | None]:
        """A stream on which to send to a member, and the channel that reads from the same connection, if one does."""
        while (spare := self._spare.get(dst)) is None:
            if self._world.options.tls is None and not self._shares_memory_with(dst):
                self._connecting_to.add(dst)
            try:
                stream = self._dial(dst, deadline)
            except Rejected as error:
                if error.status is not HandshakeStatus.CROSSED:
                    raise
                self._connecting_to.discard(dst)
                self._await_spare(dst, deadline.sooner(CROSSING))
                if deadline.expired:
                    raise self._world.no_answer(self.members[dst], deadline) from None
                continue
            if not self._stays_plain(dst, stream):
                return stream, None
            reading, writing = two_way(stream, self._world.lingering)
            return writing, self._new_inbound(reading, dst, self._backward_ended, self._receives_backward)
        return spare

    def _await_spare(self, dst: int, deadline: Deadline) -> None:
        """Waits until the member's connection is here, which it opens just now; not for ever, because it may fail."""
        waker = Waker.take()
        self.add_sleeper(waker)
        try:
            while not (dst in self._spare or self.error is not None or deadline.expired):
                sleep(waker, (), deadline)
                waker.clear()
        finally:
            self.remove_sleeper(waker)
            waker.give_back()

    def _backward_ended(self, channel: Inbound, ended: Exception, goodbye: bool) -> BaseException:
        """The member may send, or have sent, by a connection of its own that is not here yet.

        It has none if it left the world, nor if it did not say goodbye: then this one is broken, which was its way.
        """
        alone = channel.src not in self._inbound and (not goodbye or self._world.has_left(self.members[channel.src]))
        return self.inbound_ended(channel, ended, goodbye) if channel.certain or alone else ended

    def _receives_backward(self, channel: RingInbound) -> None:
        with self._guard:
            self._receives_by_stream(channel)

    def _sending_ended(self, dst: int, ended: Exception, goodbye: bool) -> PhalanxError:
        return self.channel_error(dst, ended, goodbye, self._outbound[dst].last_word)

    def check_members(self) -> None:
        with self._guard:
            inbound = {c.stream.fd: c for c in self._all_inbound() if not c.ended}
            outbound = {c.stream.fd: c for c in self._outbound.values() if not c.ended}
        super().check_members()  # only now: a lane that another thread ends has no channels left to look at
        poller = select.poll()
        for fd in (*inbound, *outbound):
            poller.register(fd, HUNG_UP)
        closed = [fd for fd, _ in poller.poll(0)]
        said: list[bytes] = []
        for fd in closed:
            heard = inbound.get(fd)
            if heard is not None:
                while heard.pump():
                    pass
                said.append(heard.last_word)
            if fd in outbound and (heard is None or not heard.certain):
                outbound_over(outbound[fd], StreamEnded("the connection was closed by the other side"))
                said.append(outbound[fd].last_word)
        # A member that said goodbye, or died, may have been done with its part.
        if self.error is not None and (any(said) or not _is_death(self.error)):
            raise self.error

    def told(self, rank: int, last_word: bytes) -> PhalanxError:
        error = self.whole_account(super().told(rank, last_word))
        if error is self.error:
            return error
        # What breaks the group for one member breaks it for all, also where no directory can say so.
        self._world.on_break(self._key[0], rank, encode_error(error))
        return self.error if isinstance(self.error, PhalanxError) else error

    def _dial(self, dst: int, deadline: Deadline) -> Stream:
        world, rank = self._world, self.members[dst]
        enough = time.monotonic() + CROSSED_AFTER

        def check() -> None:
            if self.error is not None:
                raise self.error
            if dst in self._spare and time.monotonic() > enough:
                raise Rejected(HandshakeStatus.CROSSED)
            if world.has_left(rank):
                raise ChannelClosed(rank, "it has left the world")

        check()
        try:
            return world.dial_channel(self._key, rank, deadline, check)
        except Rejected as error:
            if error.status is HandshakeStatus.CLOSED:
                raise ChannelClosed(rank, "it has closed this group") from None
            if error.status is HandshakeStatus.BROKEN:  # this rank will hear why in a moment
                raise self.channel_error(dst, StreamEnded(error.message), False) from None
            raise

    def _end_channels(self, error: BaseException, goodbye: bool) -> None:
        self._world.remove_lane(self._key, broken=not goodbye)
        for fast in (self._fast_messages, self._stream_messages):
            if fast is not None:
                fast.close()
        if self._waiting_line is not None:
            self._waiting_line.end()
        if goodbye:
            word = pack_header(FrameKind.GOODBYE, 0, 0, 0)
        else:
            cause = pack_error(shorten_error(encode_error(error)))
            word = pack_header(FrameKind.BROKEN, 0, len(cause), 0) + cause
        with self._guard:
            inbound, outbound = self._all_inbound(), list(self._outbound.values())
            spare, self._spare = self._spare, {}
        for sender in outbound:
            sender.say(word)
            sender.end(error)
        for channel in inbound:
            channel.end(error, goodbye=word)
        for stream, _ in spare.values():
            stream.close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors only."""
        self.interrupt(False)
        for inbound in self._all_inbound():
            inbound.abandon()
        for outbound in self._outbound.values():
            outbound.abandon()

    # -- rings ---------------------------------------------------------------------------------------------------------

    def _shares_memory_with(self, member: int) -> bool:
        return self._world.shares_memory_with(self.members[member])

    def _open_ring(self, src: int, description: bytes, stream: Stream) -> RingIn | None:
        if not self._shares_memory_with(src):
            raise ProtocolError("it offered shared memory, but it cannot share memory with this rank")
        return open_offer(description, self._world.roster[self.members[src]].pid, stream, self._lending)

    @property
    def _lending(self) -> Lending:
        """How long messages go: where few help, two cores that copy at the same time are as quick up to some length."""
        lending = lending_with(self.spare_cores, self.crew)
        alone = lending.lend_from and self.spare_cores == 0
        return lending._replace(lend_from=LEND_ALONE_FROM) if alone else lending

    def fast_messages(self, recorder: Recorder, timeout: float) -> FastMessages | StreamMessages | None:
        if core is None:
            return None
        world = self._world
        if not any(map(self._shares_memory_with, range(self.size))):
            limit = world.options.max_message
            with self._guard:
                self._stream_messages = core.StreamMessages(
                    self.size, self.mailbox, plain_arrays(), recorder, timeout, limit, self.oversubscribed
                )
                for channel in self._all_inbound():  # those that were here first
                    if channel.certain:
                        self._receives_by_stream(channel)
            self._attend(self._stream_messages)
            return self._stream_messages
        spins, yields = OVERSUBSCRIBED if self.oversubscribed else PATIENT
        self._fast_messages = core.FastMessages(
            self.size, self.mailbox, plain_arrays(), recorder, timeout, world.options.max_message, spins, yields
        )
        self._attend(self._fast_messages)
        return self._fast_messages

    def _attend(self, fast: FastMessages | StreamMessages) -> None:
        """Sees to messages that no thread waits for."""
        line = self._waiting_line = WaitingLine()
        self.prepared = line.prepared
        fast.attend_by(line.alarm, line.start)

    # -- plain TCP -----------------------------------------------------------------------------------------------------

    def _stays_plain(self, peer: int, stream: Stream) -> bool:
        """True if a channel is TCP without TLS, and will not go over to a ring."""
        return stream.plain and not self._shares_memory_with(peer)

    def plain_channels(
        self, writes: Sequence[int], reads: Sequence[int]
    ) -> tuple[list[Outbound], list[Inbound]] | None:
        with self._guard:
            outbound = [self._outbound[peer] for peer in writes if peer in self._outbound]
            inbound = [channel for peer in reads for channel in self.inbound(peer) if channel.certain]
        if len(outbound) < len(writes) or len(inbound) < len(reads):
            return None
        plain = all(self._stays_plain(sender.dst, sender.stream) for sender in outbound)
        plain = plain and all(self._stays_plain(channel.src, channel.stream) for channel in inbound)
        return ([*outbound], [*inbound]) if plain else None

    def _receives_by_stream(self, channel: RingInbound) -> None:
        if self._stream_messages is not None and self._stays_plain(channel.src, channel.stream):
            self._stream_messages.open_in(channel.src, channel)

    def _sends_by_stream(self, channel: RingOutbound) -> None:
        if self._stream_messages is not None and self._stays_plain(channel.dst, channel.stream):
            self._stream_messages.open_out(channel.dst, channel, channel.queue)

    # ------------------------------------------------------------------------------------------------------------------

    def _receives_by_ring(self, channel: RingInbound, ring: RingIn) -> None:
        ring.ask_ahead_from(_long_message())
        if self._fast_messages is not None:
            self._fast_messages.open_in(channel.src, ring, channel)

    def _sends_by_ring(self, channel: RingOutbound, ring: RingOut) -> None:
        ring.ask_ahead_from(_long_message())
        if self._fast_messages is not None:
            self._fast_messages.open_out(channel.dst, ring, channel, channel.queue)


def _long_message() -> int:
    """Bytes of a message from which copies ask ahead: what its sender reads, and its receiver writes, fits no cache."""
    return current(0.0).ahead_from // 2


def _is_death(error: BaseException) -> bool:
    """True if a process has ended; False if a rank has given up what it was doing."""
    return isinstance(error, PeerLost) and not error.remote_traceback
