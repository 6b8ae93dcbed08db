"""Channels that may switch to a ring in shared memory, and exchange messages with the fast path.

The fast path (in the core) takes a channel's lock when it is free, moves one whole message through the ring, and
releases the lock. It does so only between frames, and when nothing waits to be sent or received before that message. A
message that it cannot finish in time is handed over, and the lane completes it like any other.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager as Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._native import core
from ..errors import ProtocolError, UsageError
from ..wire.frames import FrameHeader, FrameKind
from .channel import Inbound, Outbound, OutgoingFrame, Torn
from .direct import give_back
from .lending import Lending
from .mailbox import Arrival, BufferSink, Envelope, Mailbox, PendingTransfer, Receive
from .ring import SWITCH, InboundRing, RingOffer
from .stream import Stream, StreamEnded

if TYPE_CHECKING:
    from .._core import RingIn, RingOut

__all__ = [
    "RingInbound",
    "RingOutbound",
    "all_handed_over",
    "bytes_of",
    "forget_handed_over",
    "last_handed_over",
    "note_handed_over",
]

_local = threading.local()


def new_lock() -> Lock[Any]:
    """The lock of a channel. With a core it is the core's own, which the fast path takes without a call into Python."""
    return threading.RLock() if core is None else core.ChannelLock()


def last_handed_over() -> PendingTransfer | None:
    """The transfer that the fast path handed over last in this thread. This call forgets it.

    A caller that is interrupted at that moment has not got the transfer yet, and takes it back by this.
    """
    operations = all_handed_over()
    return operations[-1] if operations else None


def all_handed_over() -> list[PendingTransfer]:
    """As `last_handed_over`, all that was handed over since it was asked last: an exchange may leave two."""
    operations: list[PendingTransfer] = getattr(_local, "operations", [])
    _local.operations = []
    return operations


def note_handed_over(operation: PendingTransfer) -> None:
    """Notes what the fast path hands over in this thread, for `last_handed_over`."""
    _local.operations = [*getattr(_local, "operations", ()), operation]


def forget_handed_over(operation: PendingTransfer) -> None:
    """Undoes `note_handed_over`: others would keep its memory alive with it."""
    _local.operations = [other for other in getattr(_local, "operations", ()) if other is not operation]


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The memory of an array that the fast path has taken."""
    return np.asarray(array).reshape(-1).view(np.uint8).data  # of a tensor, the fast path takes its flat memory


class RingInbound(Inbound):
    """Reads frames from TCP and, once the sender has switched, from a ring.

    Args:
        open_ring: Opens what is offered; None if it cannot.
        switched: Is told of the ring once it is in use.
        ascertained: Is told once it is certain that the rank sends by this channel. None: it is from the beginning.
    """

    def __init__(
        self,
        stream: Stream,
        src: int,
        mailbox: Mailbox,
        *,
        max_message: int,
        max_object: int,
        on_end: Callable[[Inbound, Exception, bool], BaseException],
        open_ring: Callable[[bytes, Stream], RingIn | None],
        switched: Callable[[RingInbound, RingIn], None],
        ascertained: Callable[[RingInbound], None] | None = None,
    ) -> None:
        super().__init__(stream, src, mailbox, max_message=max_message, max_object=max_object, on_end=on_end)
        self.lock = new_lock()
        self.certain = ascertained is None
        self._ascertained = ascertained
        self._open_ring = open_ring
        self._switched = switched
        self._offered: RingIn | None = None
        self._was_offered = False

    def _begin(self, mailbox: Mailbox, header: FrameHeader, description: bytes) -> Arrival | None:
        arrival = super()._begin(mailbox, header, description)
        if self.certain and self._ascertained is not None:
            self._ascertained(self)
            self._ascertained = None
        return arrival

    def _ring(self, description: bytes) -> None:
        if description:
            if self._was_offered:
                raise ProtocolError("it offers a second ring (a channel has one)")
            self._was_offered = True
            self._offered = self._open_ring(description, self.stream)
            return
        ring, self._offered = self._offered, None
        if ring is None:
            raise ProtocolError("it switched to a ring that this rank has not accepted")
        aside = bytes(self._buffer[self._start : self._stop])
        self._start = self._stop = 0
        self.stream = InboundRing(self.stream, ring, aside)
        self._switched(self, ring)

    def _advance(self) -> Arrival | None:
        stream = self.stream
        if isinstance(stream, InboundRing):
            stream.ring.resting = False
        finished = super()._advance()
        if isinstance(self.stream, InboundRing):
            # Only where the next byte begins a frame may the fast path go on.
            self.stream.ring.resting = self._arrival is None and self._header is None and not self._head
        return finished

    def hand_over(
        self, out: npt.NDArray[Any], tag: int, description: bytes, received: int, noted: bool = True
    ) -> Receive:
        """Goes on with a message of which the fast path has received a part. Called with the lock held.

        Args:
            noted: For `last_handed_over`.
        """
        view = bytes_of(out)
        envelope = Envelope(self.src, FrameKind.ARRAY, tag, description, len(view))
        receive, self._arrival = self._mailbox.adopt(envelope, self.lock, BufferSink(view), received)
        self.resting = False
        if isinstance(self.stream, InboundRing):
            self.stream.ring.resting = False
        if noted:
            note_handed_over(receive)
        return receive

    def tear(self) -> None:
        """Ends the channel: the fast path was interrupted before somebody could go on with the rest of a message."""
        with self.lock:
            if not self.ended:
                self._over, self.ended = Torn("a receive from it was interrupted halfway"), True
                self._close_stream()
                self._note_rest()
        self._tell()

    def give_back(self, data: bytes) -> None:
        """Bytes that the fast path has read, and that are not what it waits for. Called with the lock held."""
        give_back(self, data)

    def _close_stream(self) -> None:
        if self._offered is not None:
            self._offered.close()
        super()._close_stream()

    def abandon(self) -> None:
        """In a forked child: lets go of everything without a word. Its fast path finds the channel ended."""
        self.ended, self.resting = True, False
        if self._offered is not None:
            self._offered.abandon()
        self.stream.abandon()


class RingOutbound(Outbound):
    """Writes frames to TCP and, once the receiver has accepted one, to a ring.

    Args:
        offers: Whether to offer a ring at all.
        twin: The channel that reads from the same connection, if one does: it hears the other side's goodbye.
        lending: From which length the receiver may read messages where they lie.
        switched: Is told of the ring once it is in use.
    """

    def __init__(
        self,
        stream: Stream,
        dst: int,
        on_end: Callable[[Exception, bool], BaseException],
        *,
        offers: bool,
        lending: Lending,
        switched: Callable[[RingOutbound, RingOut], None],
        twin: Inbound | None = None,
    ) -> None:
        super().__init__(stream, dst, on_end)
        self._twin = twin
        self.lock = new_lock()
        self._offer = RingOffer(lambda ring: switched(self, ring), lending) if offers else None
        self._switch: OutgoingFrame | None = None

    def go_on_with(self, outgoing: OutgoingFrame) -> None:
        if self._offer is not None:
            with self.lock:
                self._offer_ring()
        super().go_on_with(outgoing)

    def _offer_ring(self) -> None:
        if self._offer is None or self._queue or self._ended is not None:
            return
        frame = self._offer.next_frame(self.stream)
        if frame is not None:
            outgoing = OutgoingFrame([frame], self)
            if frame is SWITCH:
                self._switch = outgoing
            self._queue.append(outgoing)

    def _write(self, outgoing: OutgoingFrame) -> bool:
        if not super()._write(outgoing):
            return False
        if outgoing is self._switch and self._offer is not None:
            # Before it leaves the queue: an interrupt in between then ends the channel, as in the middle of a frame.
            self.stream = self._offer.switch(self.stream)
            self._offer = self._switch = None
        return True

    def said_goodbye(self) -> bool:
        if self._twin is None:
            return super().said_goodbye()
        with contextlib.suppress(UsageError):  # a signal handler in the middle of a frame there
            while self._twin.pump():
                pass
        self.last_word = self._twin.last_word
        return self._twin.goodbye

    @property
    def queue(self) -> deque[OutgoingFrame]:
        """The bytes that are still to be sent."""
        return self._queue

    def hand_over(self, array: npt.NDArray[Any], sent: int, head: bytes = b"", noted: bool = True) -> OutgoingFrame:
        """Goes on with a message of which the fast path has sent a part. Called with the lock held.

        Args:
            sent: Bytes of the array that are on their way.
            head: The rest of what comes before the array.
            noted: For `last_handed_over`.
        """
        outgoing = OutgoingFrame([head, bytes_of(array)[sent:]], self)
        outgoing.begun = True
        if self._ended is None:
            self._queue.appendleft(outgoing)  # a signal handler may have queued another one
        else:  # by a signal handler, since
            outgoing.settle(self._ended)
        if noted:
            note_handed_over(outgoing)
        return outgoing

    def _close_stream(self) -> None:
        if self._offer is not None:
            self._offer.close()
        super()._close_stream()

    def abandon(self) -> None:
        """In a forked child: lets go of everything without a word. Its fast path finds the channel ended."""
        self._ended = StreamEnded("this process was forked")
        if self._offer is not None:
            self._offer.close()
        self.stream.abandon()
