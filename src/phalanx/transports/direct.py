"""The steps of a collective: frames whose size both sides know, moved past queues and mailboxes.

A lane's queue and mailbox serve messages that may come at any time. The steps of a collective are expected, in order
and to the byte, so header and payload can be read straight into place in one call, and written in one. Both halves here
work on a channel that is at rest, between two frames. Any other frame that comes (a goodbye, an offer of a ring,
another operation) is given back to the channel, which handles it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..wire.frames import HEADER_SIZE
from .stream import IOV_MAX, Buffer, StreamEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from .channel import Inbound, Outbound

__all__ = [
    "LONG_PIECE",
    "PIECE",
    "DirectReceive",
    "DirectSend",
    "can_receive",
    "can_send",
    "give_back",
    "inbound_over",
    "outbound_over",
]

PIECE = 256 << 10
"""Bytes moved in one call while a rank both sends and receives: what comes is still in the cache when it is used."""
LONG_PIECE = 1 << 20
"""Bytes moved in one call while it does one of both: fewer calls, and the other side sleeps less often."""


def can_receive(channel: Inbound) -> bool:
    """True if the next byte of the stream begins a frame, and nothing before it comes or waits elsewhere."""
    return channel.resting and channel.certain and not channel._mailbox.ahead and not channel.stream.exact


def can_send(channel: Outbound) -> bool:
    """True if a frame that is written to the stream now comes next."""
    return not (channel._queue or channel._ended is not None or channel.stream.exact)


class DirectReceive:
    """One frame that is expected.

    Args:
        header: What it must begin with.
        size: Of the payload.
        view: Where the payload goes: `size` bytes, or with `use` a scratch buffer that is filled again and again.
        use: Told how many bytes of the payload lie in `view`, each time there are more. Returns how many of them are
            left in a scratch buffer, at its front.
    """

    __slots__ = ("_channel", "_filled", "_head", "_header", "_left", "_use", "_view", "done", "refused")

    def __init__(
        self,
        channel: Inbound,
        header: bytes,
        size: int,
        view: memoryview,
        use: Callable[[int], int] | None = None,
    ) -> None:
        self._channel = channel
        self._header = header
        self._head: memoryview | None = memoryview(bytearray(HEADER_SIZE))
        """The part of the header that is still to come; None once it is complete."""
        self._left = size
        """Bytes of the payload that are still to come."""
        self._view = view
        self._filled = 0
        self._use = use
        self.done = False
        self.refused = False
        """True if another frame came, and was given back to the channel."""

    def move(self, piece: int) -> bool:
        """Reads up to `piece` bytes of the payload. True if something was read.

        Raises:
            BaseException: The stream has ended; what the channel makes of it.
        """
        channel = self._channel
        try:
            with channel.lock:
                if channel.ended:  # another thread has ended it
                    raise StreamEnded("the connection was closed on this side")
                return self._read(channel, piece)
        except StreamEnded as ended:
            raise inbound_over(channel, ended) from None

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll when there is nothing to read."""
        stream = self._channel.stream
        return [(stream.fd, stream.read_events)]

    def _read(self, channel: Inbound, piece: int) -> bool:
        filled, head = self._filled, self._head
        room = self._view[filled : filled + min(self._left, piece)]  # a scratch buffer may end before
        if head is None:
            count = channel.stream.receive_into(room)
        else:
            count = channel.stream.receive_parts([head, room] if len(room) else [head])
        if not count:
            return False
        if head is not None:
            missing = len(head)
            if count < missing:
                self._head = head[count:]
                return True
            count -= missing
            self._head = None
            if head.obj != self._header:
                give_back(channel, bytes(head.obj) + bytes(room[:count]))
                self.refused = True
                return True
        self._left -= count
        filled += count
        if count and self._use is not None:
            filled = self._use(filled)
        self._filled = filled
        self.done = not self._left
        return True


class DirectSend:
    """One or more frames to one rank.

    Args:
        views: Headers and payloads. Their memory must stay as it is until it is done.
    """

    __slots__ = ("_channel", "_views", "done", "peer")

    def __init__(self, channel: Outbound, views: list[Buffer]) -> None:
        self._channel = channel
        self.peer = channel.dst
        self._views = views
        """The rest that is still to be sent."""
        self.done = False

    def move(self, piece: int) -> bool:
        """Writes up to `piece` bytes. True if something was written.

        Raises:
            BaseException: The stream has ended; what the channel makes of it.
        """
        channel = self._channel
        try:
            with channel.lock:
                return self._write(channel, piece)
        except StreamEnded as ended:
            raise outbound_over(channel, ended) from None

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to poll when there is no room to write."""
        stream = self._channel.stream
        return [(stream.fd, stream.write_events)]

    def _write(self, channel: Outbound, room: int) -> bool:
        views = self._views
        now: list[Buffer] = []
        for view in views:
            now.append(view[:room] if len(view) > room else view)
            room -= len(view)
            if room <= 0 or len(now) == IOV_MAX:
                break
        # Before it has: an interrupt may come as soon as bytes have left.
        begun, channel.halfway = channel.halfway, True
        count = channel.stream.send(now)
        if not count:
            channel.halfway = begun or channel.stream.must_repeat
            return False
        gone = 0
        while gone < len(views) and count >= len(views[gone]):
            count -= len(views[gone])
            gone += 1
        del views[:gone]
        if count:
            views[0] = views[0][count:]
        elif not views:
            channel.halfway = False
            self.done = True
        return True


def give_back(channel: Inbound, data: bytes) -> None:
    """Bytes of another frame than the expected: the channel looks at them first. Called with its lock held."""
    if len(data) > len(channel._buffer):
        channel._buffer = bytearray(data)
    else:
        channel._buffer[: len(data)] = data
    channel._start, channel._stop = 0, len(data)
    channel.resting = False


def inbound_over(channel: Inbound, ended: StreamEnded) -> BaseException:
    """Ends a channel whose stream ended during a read. Returns the error that the channel makes of it."""
    with channel.lock:
        if not channel.ended:
            channel.ended = True
            channel.resting = False
            channel._close_stream()
    return channel._on_end(channel, ended, channel.goodbye)


def outbound_over(channel: Outbound, ended: StreamEnded) -> BaseException:
    """Ends a channel whose stream ended during a write. Returns the error that the channel makes of it."""
    with channel.lock:
        goodbye = channel.said_goodbye()
    error = channel._on_end(ended, goodbye)
    channel.end(error)
    return error
