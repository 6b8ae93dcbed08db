"""Ports for backends without connections for remote calls: their streams are made of the messages of a lane.

A lane accepts any number of messages, so the streams limit themselves: a sender has at most a window of bytes that the
reader has not taken, and the reader reports how many it took.

A rank may open a stream to another after its last one has ended. Streams are numbered, so that bytes of the last one
which are still on their way are never taken for those of the new one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..deadline import Deadline
from ..errors import ChannelClosed, NoConnection, PhalanxError, ProtocolError
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
"""Kinds of messages: FORTH has bytes from the rank that opened the stream, BACK has bytes to it."""
TAKEN = 2
"""Added to the kind of a stream's bytes: a report of how many their reader took."""
KINDS = 8
"""A tag is this times the number of the stream, plus the kind of the message."""
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
        self._numbers = itertools.count()
        self._opened: dict[int, LaneStream] = {}
        """The last stream that this rank has opened to each member."""
        self._accepted: dict[int, LaneStream] = {}
        """The last stream that each member has opened to this rank."""
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
            stream = LaneStream(self, dst, next(self._numbers), sends=FORTH, receives=BACK)
            self._opened[dst] = stream
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

    def send_end(self, dst: int, tag: int) -> None:
        """Says that a stream has ended, if no connection is needed to say so. From any thread; never waits."""
        if not self._closed and self._lane.error is None and self._lane.is_open_to(dst):
            with contextlib.suppress(PhalanxError):  # then all streams have ended
                self.send(dst, tag, b"", _no_matter)

    def _expect(self, src: int) -> None:
        """Takes the messages that have come, and has the next one taken when it comes."""
        while True:  # not by recursion: hundreds may have come
            sink = _PieceSink()
            receive = self._lane.post(src, None, sink)
            if not receive.done:
                break
            if not self._take(src, receive, sink):
                return
        receive.on_done(functools.partial(self._arrived, src, receive, sink))
        self._lane.move_in_background(receive, _FOREVER, _never)

    def _arrived(self, src: int, receive: Receive, sink: _PieceSink) -> None:
        if self._take(src, receive, sink):
            self._expect(src)

    def _take(self, src: int, receive: Receive, sink: _PieceSink) -> bool:
        """Gives a message to its stream. False if no other will come."""
        if isinstance(receive.error, ProtocolError):  # too long: no `LaneStream` sends that
            return True
        if receive.error is not None or self._closed:
            error = receive.error or ChannelClosed(self.members[self._lane.rank], "this agent was closed")
            with self._lock:
                streams = [self._opened.get(src), self._accepted.get(src)]
            for stream in streams:
                if stream is not None:
                    stream.end(StreamEnded(str(error)))
            return False
        assert receive.envelope is not None
        self._deliver(src, receive.envelope.tag, sink.data)
        return True

    def _deliver(self, src: int, tag: int, data: bytearray) -> None:
        number, kind = divmod(tag, KINDS)
        if kind == FORTH:
            self._deliver_forth(src, number, data)
            return
        # Of what this rank sent and the other took, FORTH is the kind of a stream that this rank opened.
        stream = (self._accepted if kind == BACK + TAKEN else self._opened).get(src)
        if stream is None or stream.number != number:
            return  # it was on its way when its stream ended
        if kind == BACK:
            stream.deliver(data)
        elif kind in (FORTH + TAKEN, BACK + TAKEN) and len(data) == _COUNT.size:
            stream.taken(_COUNT.unpack(data)[0])

    def _deliver_forth(self, src: int, number: int, data: bytearray) -> None:
        before = fresh = None
        with self._lock:
            stream = self._accepted.get(src)
            if (stream is None or stream.number < number) and data:
                before = stream
                stream = fresh = self._accepted[src] = LaneStream(self, src, number, sends=BACK, receives=FORTH)
        if before is not None:
            before.end(StreamEnded("the other side has opened a new connection"))
        if stream is not None and stream.number == number:
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

    plain = False
    write_events = Stream.read_events

    def __init__(self, port: LanePort, peer: int, number: int, *, sends: int, receives: int) -> None:
        self._port = port
        self._peer = peer
        self.number = number
        """The number of the stream, which the rank that opened it has given."""
        self._sends = number * KINDS + sends
        self._takes = number * KINDS + receives + TAKEN
        """The tags of its bytes, and of its reports."""
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
            self._port.send(self._peer, self._takes, _COUNT.pack(told), _no_matter)
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
            if self.ended is None:
                self._came.append(memoryview(data))
        self._waker.set()

    def end(self, ended: StreamEnded) -> bool:
        """Ends the stream; what has come can still be read. False if it had ended before."""
        with self._lock:
            first = self.ended is None
            if first:
                self.ended = ended
        self._waker.set()
        return first

    def close(self) -> None:
        self._end_both("the connection was closed on this side")

    def sever(self) -> None:
        self._end_both("the connection was reset")

    def _end_both(self, why: str) -> None:
        """Ends the stream here and at the other side, which has no other way to know."""
        if self.end(StreamEnded(why)):
            self._port.send_end(self._peer, self._sends)

    def abandon(self) -> None:
        self.ended = StreamEnded("this process was forked")


def _no_matter(_operation: PendingTransfer) -> None:
    """Ignores the result: the next message on the stream shows a failure."""
