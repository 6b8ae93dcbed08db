"""A stream through shared memory, between two ranks on one host.

A channel begins on TCP. Once it has carried a few messages, its sender makes a ring in anonymous memory (a memfd, which
has no name to guess or to leave behind) and offers it in a frame. The receiver opens it through /proc, which the kernel
allows to the same user only, checks that it is the one that was meant, and says so inside the memory. When the sender
sees that, it sends one more frame, the switch, and everything after it goes through the ring. Neither side ever waits
for the other.

The TCP connection stays underneath. It is the sign of life; a zero byte on it wakes a thread that sleeps in `poll`; and
last words (a goodbye, or why a group is broken) go over it, because a ring may be full just then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from .._native import core
from ..errors import ProtocolError
from ..wire.frames import HEADER_SIZE, MAX_DESCRIPTION, FrameKind, pack_header
from .lending import NOTHING, Lending
from .shared_memory import NONCE_BYTES, NotTheMemory, make_memory, open_memory
from .stream import Buffer, Stream, StreamEnded

if TYPE_CHECKING:
    from .._core import RingIn, RingOut

__all__ = ["SWITCH", "InboundRing", "MadeRing", "OutboundRing", "RingOffer", "RingStream", "make_ring", "open_offer"]

logger = logging.getLogger("phalanx.transports")

SIZE = 512 << 10
"""Bytes of a ring: as many as stay in the cache while one side writes and the other reads."""
SMALLEST = 4096
LARGEST = 64 << 20
"""Bytes of a ring that another process may offer."""
OFFER_AFTER = 2
"""Messages that go over TCP first: a channel that carries one or two only is not worth a ring."""
ENOUGH = 16
"""Looks at the socket in a row, in case that the other side never ceases to wake."""
SWITCH = pack_header(FrameKind.RING, 0, 0, 0)
_LAST_WORDS = HEADER_SIZE + MAX_DESCRIPTION


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tells the receiver where the memory is: a descriptor of the sender's process."""

    fd: int
    nonce: bytes
    size: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Offer)


class RingStream(Stream):
    """Base of both ends: the socket that belongs to the ring."""

    read_events = write_events = select.POLLIN
    plain = False
    exact = True

    def __init__(self, stream: Stream, ring: RingIn | RingOut, aside: bytes) -> None:
        # Takes the socket over; the stream that had it is not used any more.
        self._socket = stream._socket
        self.fd = stream.fd
        self._half = ring
        self._aside = bytearray(aside.lstrip(b"\0"))
        """Bytes that came on the socket, without those that only wake."""
        self._ended: Callable[[], StreamEnded] | None = None
        """Makes the error of the end. That itself would know the frames it came through, and they this stream."""

    def _listen(self) -> bool:
        """Takes what came on the socket; False if there was nothing new."""
        if self._ended is not None:
            return False
        scratch = memoryview(bytearray(4096))
        try:
            count = super().receive_into(scratch)
        except StreamEnded as ended:
            self._ended = functools.partial(StreamEnded, ended.reason, clean=ended.clean)
            return True
        data = bytes(scratch[:count])
        self._aside += data if self._aside else data.lstrip(b"\0")
        if len(self._aside) > _LAST_WORDS:
            raise ProtocolError(
                f"{len(self._aside)} bytes came on the socket of a ring (at most {_LAST_WORDS} are allowed)"
            )
        return count > 0

    def _take_aside(self, view: memoryview) -> int:
        count = min(len(view), len(self._aside))
        view[:count] = self._aside[:count]
        del self._aside[:count]
        return count

    def sever(self) -> None:
        self._half.sever()
        super().sever()

    def close(self) -> None:
        self._half.close()
        # A socket that is closed with bytes unread is reset, and last words that are on their way may be lost.
        with contextlib.suppress(StreamEnded, ProtocolError):
            for _ in range(ENOUGH):
                if not self._listen():
                    break
        super().close()

    def abandon(self) -> None:
        self._half.abandon()
        super().abandon()


def corruption(ring: RingIn | RingOut) -> str:
    """Says what is wrong with the counters of a ring that the core has found to be broken."""
    read, written = ring.broken_counts
    if read > written:
        return f"corrupt ring: read counter {read} is ahead of write counter {written}"
    return f"corrupt ring: write counter {written} is impossible where the read counter is {read}"


class InboundRing(RingStream):
    """The receiver's end. What it sends goes over TCP: it has nothing to say but last words.

    Args:
        stream: The channel's TCP connection so far.
        aside: What was read from it after the switch.
    """

    def __init__(self, stream: Stream, ring: RingIn, aside: bytes) -> None:
        super().__init__(stream, ring, aside)
        self.ring = ring

    @property
    def pending(self) -> bool:
        return self.ring.pending or bool(self._aside)

    def receive_into(self, view: memoryview) -> int:
        if not len(view):
            return 0
        for _ in range(ENOUGH):
            if self.ring.severed:
                raise StreamEnded("the connection was reset")
            count = self.ring.read_into(view)
            if count:
                return count
            if self.ring.broken:
                raise ProtocolError(corruption(self.ring))
            # Whatever came on the socket now may have been sent after more was written to the ring.
            if not self._listen():
                if self._aside:
                    return self._take_aside(view)
                if self._ended is not None:
                    raise self._ended()
                return 0
        return 0


class OutboundRing(RingStream):
    """The sender's end. What it receives came over TCP: last words."""

    def __init__(self, stream: Stream, ring: RingOut) -> None:
        super().__init__(stream, ring, b"")
        self.ring = ring

    def send(self, views: Sequence[Buffer]) -> int:
        for _ in range(ENOUGH):
            if self._ended is not None:
                raise self._ended()
            if self.ring.severed or self.ring.other_closed or self._aside:
                raise StreamEnded("the connection was closed")
            count = self.ring.write(views)
            if count:
                return count
            if self.ring.broken:
                raise StreamEnded(corruption(self.ring))
            try:
                if not self._listen():
                    return 0
            except ProtocolError as error:
                raise StreamEnded(str(error)) from None
        return 0

    def say(self, word: bytes) -> None:
        super().send([word])

    def receive_into(self, view: memoryview) -> int:
        for _ in range(ENOUGH):
            if not self._listen():
                break
        if self._ended is not None and not self._aside:
            raise self._ended()
        return self._take_aside(view)


class MadeRing:
    """A ring to write to, the descriptor of its memory, and the words that offer it.

    The descriptor stays open until the other side has opened it, and `close_memory` is called. Where this object is
    lost on the way, as to a signal handler that raises, the descriptor goes with it.
    """

    __slots__ = ("_pid", "memory", "offer", "ring")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.memory = -1
        self.ring: RingOut
        self.offer = b""

    def close_memory(self) -> None:
        """May be called twice."""
        memory, self.memory = self.memory, -1
        if memory >= 0:
            with contextlib.suppress(OSError):
                os.close(memory)

    def __del__(self) -> None:
        # In a forked child it may be another's by now. An interrupt may have come before there was one.
        if getattr(self, "memory", -1) >= 0 and self._pid == os.getpid():
            self.close_memory()


def make_ring(stream: Stream, lending: Lending = NOTHING) -> MadeRing | None:
    """A ring to write to; None if there is no memory.

    Args:
        lending: From which length messages may be read where they lie.
    """
    assert core is not None
    made = MadeRing()
    try:
        made.memory, nonce = make_memory("phalanx-ring", core.RING_CONTROL_BYTES + SIZE)
        made.ring = core.RingOut(made.memory, SIZE, stream.fd, nonce)
    except OSError as error:
        made.close_memory()
        _warn_once(f"no shared memory could be made: {error}")
        return None
    made.ring.lends_from, made.ring.exchanges_from = lending.lend_from, lending.lend_in_exchanges_from
    made.offer = _encoder.encode(Offer(made.memory, nonce, SIZE))
    return made


class RingOffer:
    """The ring of a channel before it is used: the sender's side of the agreement.

    Args:
        switched: Is told of the ring once it is in use.
        lending: As for `make_ring`.
    """

    def __init__(self, switched: Callable[[RingOut], None], lending: Lending = NOTHING) -> None:
        self._switched = switched
        self._lending = lending
        self._messages = 0
        self._made: MadeRing | None = None

    def next_frame(self, stream: Stream) -> bytes | None:
        """The frame that must be sent before the next message: the offer, the switch, or none."""
        self._messages += 1
        if self._messages <= OFFER_AFTER:
            return None
        if self._messages == OFFER_AFTER + 1:
            return self._make(stream)
        return SWITCH if self._made is not None and self._made.ring.accepted else None

    def _make(self, stream: Stream) -> bytes | None:
        self._made = make_ring(stream, self._lending)
        if self._made is None:
            return None
        return pack_header(FrameKind.RING, 0, len(self._made.offer), 0) + self._made.offer

    def switch(self, stream: Stream) -> OutboundRing:
        """The stream of everything that follows the switch."""
        assert self._made is not None
        self._made.close_memory()  # both have mapped it
        self._switched(self._made.ring)
        return OutboundRing(stream, self._made.ring)

    def close(self) -> None:
        """Gives back what is not in use: the channel has ended. May be called twice."""
        if self._made is not None:
            self._made.ring.abandon()
            self._made.close_memory()


def open_offer(description: bytes, pid: int, stream: Stream, lending: Lending = NOTHING) -> RingIn | None:
    """Maps the ring that a process on this host offers; None if that cannot be done.

    Args:
        lending: Whose threads read along where a message is lent; `NOTHING`: no message is read there.

    Raises:
        ProtocolError: It is no offer of a ring.
    """
    try:
        offer = _decoder.decode(description)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed offer of a ring: {error}") from None
    possible = SMALLEST <= offer.size <= LARGEST and offer.size & (offer.size - 1) == 0
    if len(offer.nonce) != NONCE_BYTES or not possible or not 0 <= offer.fd < 1 << 31:
        raise ProtocolError(
            f"malformed offer of a ring: {offer.size} bytes in descriptor {offer.fd}, nonce of {len(offer.nonce)} "
            f"(expected a power of two from {SMALLEST} to {LARGEST} bytes, and a nonce of {NONCE_BYTES})"
        )
    if core is None:
        return None
    try:
        ring = _map(offer, pid, stream)
    except (FileNotFoundError, NotTheMemory):
        ring = None
    except OSError as error:
        _warn_once(f"the shared memory that process {pid} offers cannot be opened: {error}")
        return None
    if ring is not None and lending != NOTHING:
        ring.borrow_from(pid, lending.crew, lending.helpers)
    if ring is None:  # the sender may have closed the channel since, and its descriptor be another's by now
        logger.debug("descriptor %d of process %d is not the ring that it offered", offer.fd, pid)
    return ring


def _map(offer: Offer, pid: int, stream: Stream) -> RingIn | None:
    """The ring; None if it is another's by now.

    Raises:
        OSError: The descriptor cannot be opened, or not be mapped.
    """
    assert core is not None
    memory = open_memory(pid, offer.fd, core.RING_CONTROL_BYTES + offer.size, offer.nonce)
    try:
        ring: RingIn = core.RingIn(memory, offer.size, stream.fd)
    finally:
        os.close(memory)
    if ring.accept(offer.nonce):
        return ring
    ring.abandon()
    return None


@functools.cache
def _warn_once(words: str) -> None:
    """Every channel will meet the same problem."""
    logger.warning("%s; messages use TCP, which is slower", words)
