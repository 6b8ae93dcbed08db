"""Ports for backends without connections for remote calls: their streams are made of the messages of a lane.

A lane accepts any number of messages, so the streams limit themselves: a sender has at most a window of bytes that the
reader has not taken, and the reader reports how many it took.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ChannelClosed, NoConnection, ProtocolError
from ..transports.mailbox import Envelope, PendingTransfer, Receive, Sink
from ..transports.stream import Buffer, Stream, StreamEnded
from ..transports.waker import Waker
from ..wire.frames import FrameKind
from .lane import Lane
from .ports import Accept, LinkPort

if TYPE_CHECKING:
    from .control_plane import ControlPlane

__all__ = ["LanePort"]

FORTH, BACK = 1, 2
"""Tags: FORTH of bytes from the rank that opened the stream, BACK of bytes to it."""
TAKEN = 2
"""Added to the tag of a stream's bytes: a report of how many their reader took."""
LONGEST = 256 << 10
"""Bytes of one message."""
WINDOW = 1 << 20
"""Bytes that a stream may have sent and its reader not yet taken."""
TELL_AFTER = WINDOW // 4
"""Bytes that a reader takes before it says so."""
_FOREVER = Deadline(float("inf"))
_COUNT = struct.Struct("<Q")


class LanePort(LinkPort):
    """Opens streams on a lane of its own. The lane's background thread moves the bytes."""

    def __init__(self, lane: Lane, control: ControlPlane, accept: Accept) -> None:
        super().__init__(lane.members, control)
        self._lane = lane
        self._accept = accept
        self._lock = threading.RLock()
        self._streams: dict[tuple[int, int], LaneStream] = {}
        """By the member and the tag of the bytes that come from it."""
        self._closed = False

    def start(self) -> None:
        for src in range(self._lane.size):
            if src != self._lane.rank:
                with contextlib.suppress(NoConnection):  # the star has none between most ranks
                    self._expect(src)

    def dial(self, dst: int, deadline: Deadline) -> Stream:
        with self._lock:
            if self._lane.error is not None:
                raise self._lane.error
            stream = self._streams[dst, BACK] = LaneStream(self, dst, sends=FORTH, receives=BACK)
        return stream

    def close(self) -> None:
        self._closed = True
        self._lane.flush(Deadline(1.0))
        self._lane.close()

    def send(self, dst: int, tag: int, data: bytes, done: Callable[[PendingTransfer], None]) -> None:
        """Sends one message. An empty one says that a stream has ended."""
        operation = self._lane.start_send(dst, FrameKind.RAW, tag, b"", [data] if data else [], _FOREVER)
        operation.on_done(functools.partial(done, operation))
        self._lane.move_in_background(operation, _FOREVER, _never)

    def _expect(self, src: int) -> None:
        sink = _PieceSink()
        receive = self._lane.post(src, None, sink)
        receive.on_done(functools.partial(self._arrived, src, receive, sink))
        self._lane.move_in_background(receive, _FOREVER, _never)

    def _arrived(self, src: int, receive: Receive, sink: _PieceSink) -> None:
        if isinstance(receive.error, ProtocolError):  # too long: no `LaneStream` sends that
            self._expect(src)
            return
        if receive.error is not None or self._closed:
            error = receive.error or ChannelClosed(self.members[self._lane.rank], "this agent was closed")
            with self._lock:
                streams = [self._streams[key] for key in self._streams if key[0] == src]
            for stream in streams:
                stream.end(StreamEnded(str(error)))
            return
        assert receive.envelope is not None
        self._deliver(src, receive.envelope.tag, sink.data)
        self._expect(src)

    def _deliver(self, src: int, tag: int, data: bytearray) -> None:
        if tag not in (FORTH, BACK):
            told = self._streams.get((src, FORTH + BACK + TAKEN - tag))
            if told is not None and len(data) == _COUNT.size:
                told.taken(_COUNT.unpack(data)[0])
            return
        fresh = None
        with self._lock:
            stream = self._streams.get((src, tag))
            if (stream is None or stream.ended is not None) and tag == FORTH and data:
                stream = fresh = self._streams[src, FORTH] = LaneStream(self, src, sends=BACK, receives=FORTH)
        if stream is not None:
            stream.deliver(data)
        if fresh is not None:
            self._accept(src, fresh)


def _never() -> None:
    """Stands for the end of a deadline that never comes."""


class _PieceSink(Sink):
    """Takes a message of any length that a stream sends."""

    def __init__(self) -> None:
        self.data = bytearray()

    def open(self, envelope: Envelope) -> memoryview:
        if envelope.size > LONGEST:
            raise ProtocolError(f"a message of {envelope.size} bytes (at most {LONGEST} are allowed)")
        self.data = bytearray(envelope.size)
        return memoryview(self.data)


class LaneStream(Stream):
    """One end of a stream that is made of messages."""

    write_events = Stream.read_events

    def __init__(self, port: LanePort, peer: int, *, sends: int, receives: int) -> None:
        self._port = port
        self._peer = peer
        self._sends = sends
        self._receives = receives
        self._waker = Waker()
        self.fd = self._waker.fd
        self._lock = threading.RLock()
        self._came: deque[memoryview] = deque()
        self._untold = 0
        """Bytes that were taken since the last report to the sender."""
        self._under_way = 0
        self.ended: StreamEnded | None = None

    @property
    def pending(self) -> bool:
        return bool(self._came)

    @property
    def peer(self) -> str:
        return f"rank {self._peer}"

    def woken(self) -> None:
        self._waker.clear()

    def may_sleep(self) -> bool:
        return not self._came and self.ended is None

    def receive_into(self, view: memoryview) -> int:
        with self._lock:
            if not self._came:
                if self.ended is not None:
                    raise self.ended
                return 0
            first = self._came[0]
            count = min(len(first), len(view))
            view[:count] = first[:count]
            if count == len(first):
                self._came.popleft()
            else:
                self._came[0] = first[count:]
            self._untold += count
            told = self._untold if self._untold >= TELL_AFTER else 0
            self._untold -= told
        if told and self.ended is None:
            self._port.send(self._peer, self._receives + TAKEN, _COUNT.pack(told), _no_matter)
        return count

    def send(self, views: Sequence[Buffer]) -> int:
        if self.ended is not None:
            raise self.ended
        with self._lock:
            room = min(LONGEST, WINDOW - self._under_way)
            pieces: list[Buffer] = []
            total = 0
            for view in views:
                if total == room:
                    break
                pieces.append(view[: room - total])
                total += len(pieces[-1])
            self._under_way += total
        if total:
            self._port.send(self._peer, self._sends, b"".join(pieces), self._sent)
        return total

    def _sent(self, operation: PendingTransfer) -> None:
        if operation.error is not None:
            self.end(StreamEnded(str(operation.error)))

    def taken(self, count: int) -> None:
        """Makes room: the reader has taken `count` bytes."""
        with self._lock:
            self._under_way = max(0, self._under_way - count)
        self._waker.set()

    def deliver(self, data: bytearray) -> None:
        """Takes bytes that have come. An empty message means the end."""
        if not data:
            self.end(StreamEnded("the connection was closed by the other side", clean=True))
            return
        with self._lock:
            self._came.append(memoryview(data))
        self._waker.set()

    def end(self, ended: StreamEnded) -> None:
        """Ends the stream; what has come can still be read."""
        with self._lock:
            if self.ended is None:
                self.ended = ended
        self._waker.set()

    def close(self) -> None:
        if self.ended is None:
            self.end(StreamEnded("the connection was closed on this side"))
            self._port.send(self._peer, self._sends, b"", _no_matter)

    def sever(self) -> None:
        self.end(StreamEnded("the connection was reset"))

    def abandon(self) -> None:
        self.ended = StreamEnded("this process was forked")


def _no_matter(_operation: PendingTransfer) -> None:
    """Ignores the result: the next message on the stream shows a failure."""
