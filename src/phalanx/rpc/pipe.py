"""Frames on a stream: with one call of the core each where there is one, else in Python."""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._native import core
from ..errors import ProtocolError
from ..transports.duplex_ring import DuplexRing
from ..transports.lending import NOTHING, Lending
from ..transports.stream import IOV_MAX, Buffer, Stream, StreamEnded, ended_with
from ..wire.calls import HEADER_SIZE, pack_header, split_header

if TYPE_CHECKING:
    from .._core import FramePipe

__all__ = ["NOT_POSTED", "POSTED", "READ_AHEAD", "Pipe", "SaidGoodbye", "open_pipe"]

READ_AHEAD = 64 << 10
"""Bytes that are read at once where a frame is expected, so that many small frames cost one call."""
SLICE = 4 << 20
"""Bytes of a long payload that are read before other links have their turn."""
LENT_SLICE = 16 << 20
"""The same where several threads read them."""
_CLOSED, _SEVERED, _BROKEN, _BESIDE, _NO_FRAME, _NO_PART, _GOODBYE = range(-1, -8, -1)  # see cpp/phalanx/frame_pipe.hpp

NOT_POSTED, POSTED = range(2)

Found = tuple[int, int, "bytes | None", int, int]
"""Kind, call number, head, length of the payload and length of the head of a frame. A head that is too long to be read
ahead is None."""


class SaidGoodbye(StreamEnded):
    """The other side has closed its agent, and said so beside the rings: it did not know yet that they are in use."""


class Pipe(ABC):
    """Sends and receives frames. One thread may write while another reads."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    native: FramePipe | None = None
    slice = SLICE

    @abstractmethod
    def send(self, kind: int, call: int, head: bytes, buffers: Sequence[Buffer], payload: int) -> int:
        """Writes as much of a frame as the connection takes; returns the number of bytes.

        If it takes not even all that was kept back, that is 0, and the rest of it is still kept: see `take_held`.
        """

    held = 0
    """Frames that were kept back, by `hold` or `post`."""
    midway = False
    """Whether a part of a frame was written, and the rest given out, with which `send_rest` has not gone on."""

    def send_held(self) -> bool:
        """Writes what was kept back. False if a part of it does not go now: it is still kept, for `take_held`."""
        return True

    def take_held(self) -> bytes:
        """Takes out what was kept back. These bytes count as written."""
        return b""

    @abstractmethod
    def send_rest(self, buffers: Sequence[Buffer]) -> int:
        """Writes more of a frame that `send` did not write wholly; returns the number of bytes."""

    @abstractmethod
    def pull(self, spin: float, most: int, wait: float = 0.0, waker: int = -1, writes: bool = False) -> list[Found]:
        """The frames that are there, at most `most`. If there are none, spins and then sleeps.

        After a frame with a payload or a long head, call `fill` until that is complete. If there are none, call
        `check`.

        Args:
            spin: Seconds to look for bytes again and again.
            wait: Seconds to sleep at most, until something can be read or written.
            waker: A descriptor that ends the sleep.
            writes: Whether to wake up when something can be written.

        Raises:
            ProtocolError: The bytes are not a frame.
            StreamEnded: The connection has ended.
        """

    def answer(self, call: int, spin: float, wait: float = 0.0, waker: int = -1) -> bytes | None:
        """The head of the result of a call, if that is the next frame and has no payload; else None.

        What is taken here is not counted by `taken`.

        Args:
            spin, wait, waker: As for `pull`.
        """
        return None

    # -- short ways, which only the core has ---------------------------------------------------------------------------

    def guard(self, moving: Any, sending: Any, unsent: Any) -> None:  # noqa: B027
        """Opens the short ways, with the locks of whoever reads and whoever writes, and the queue of what waits.

        `post`, `hold`, `exchange` and `request` take these locks themselves, and do nothing if one is taken or
        something waits in the queue. What they send and take is not counted by `written` and `taken`: no interrupt can
        come in between.
        """

    def shut(self) -> None:  # noqa: B027
        """Closes the short ways. Called with the lock of whoever writes."""

    def post(self, kind: int, call: int, head: bytes) -> int:
        """Sends a frame without a payload: `POSTED`, or `NOT_POSTED` if nothing of it was sent, and is left to `send`.

        What was kept back goes before it. If only a part goes, the rest is kept back, and this returns another number:
        then call `send_held`.
        """
        return NOT_POSTED

    def hold(self, kind: int, call: int, head: bytes, most: int) -> bool:
        """Keeps a frame without a payload back, to save system calls and wake-ups: the next one takes it along.

        Whoever calls this sees to it that `send_held` is called soon. False if `most` are kept already, or it cannot be
        kept: then `post` or `send` it.
        """
        return False

    def exchange(self, call: int, head: bytes, spin: float, until: float) -> bytes | bool | None:
        """Sends a request as `post` does, and waits for its answer as `answer` does; False if nothing was sent.

        Args:
            spin: As for `pull`.
            until: The moment on the monotonic clock until which it may sleep.
        """
        return False

    def wake(self) -> None:  # noqa: B027
        """Ends the sleep of an `exchange`, if there is one. From any thread."""

    def request(self, spin: float, wait: float = 0.0, waker: int = -1) -> tuple[int, bytes] | None:
        """Number and head of a request, if that is the next frame, has no payload, and no other is there; else None.

        Args:
            spin, wait, waker: As for `pull`.
        """
        return None

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def open_lanes(self, streams: Sequence[Stream]) -> None:
        """Lets payloads come over these connections from now on; see `lanes`. The streams may be closed."""
        raise NotImplementedError  # only a pipe of the core has lanes, and a link without one is offered none

    def sever_lanes(self) -> None:  # noqa: B027 - only one kind of pipes has them
        """Breaks them. From any thread."""

    def close_lanes(self, forked: bool = False) -> None:  # noqa: B027
        """Gives their descriptors back. Only while no thread reads or writes, and at the end of the connection.

        Args:
            forked: In a forked child: they are the parent's, which still uses them.
        """

    @abstractmethod
    def fill(self, view: memoryview, wait: float = 0.0, waker: int = -1) -> int:
        """Reads the bytes that follow into `view`; returns their number.

        Args:
            wait: Seconds that it may sleep at a time if they do not come. A pipe need not make use of it.
            waker: A descriptor that ends the sleep.
        """

    @abstractmethod
    def may_sleep(self) -> bool:
        """True if poll will report everything that comes from now on; False if there is something to read.

        A frame that was read ahead counts as something to read, because poll does not report it.
        """

    @abstractmethod
    def sleep(self, seconds: float, waker: int, writes: bool) -> None:
        """Sleeps until something can be read, or written if `writes`, or the waker is set."""

    @abstractmethod
    def woken(self) -> None:
        """To be called by the reader after poll has reported something, before it reads."""

    @property
    @abstractmethod
    def ahead(self) -> bytes:
        """The bytes that were read ahead and not returned yet."""

    @property
    @abstractmethod
    def written(self) -> int:
        """The number of bytes that were ever written."""

    @property
    @abstractmethod
    def taken(self) -> int:
        """The number of frames that `pull`, plus the bytes that `fill`, ever returned."""

    @abstractmethod
    def check(self) -> None:
        """To be called after a method returned less than it was asked for: raises if the connection has ended.

        Raises:
            StreamEnded: The connection has ended.
            ProtocolError: The other side broke the rules of shared memory, or its bytes are not a frame.
        """


def open_pipe(stream: Stream, lending: Lending = NOTHING) -> Pipe:
    """The fastest pipe for a stream."""
    if core is not None and type(stream) in (Stream, DuplexRing):
        return _NativePipe(stream, lending)
    return _StreamPipe(stream)


class _NativePipe(Pipe):
    def __init__(self, stream: Stream, lending: Lending) -> None:
        super().__init__(stream)
        assert core is not None
        if isinstance(stream, DuplexRing):
            native = core.FramePipe(
                stream.fd,
                stream.inbound,
                stream.outbound,
                READ_AHEAD,
                lend_from=lending.lend_from,
                lend_for=lending.lend_for,
                pid=stream.pid,
                crew=lending.crew,
                helpers=lending.helpers,
            )
            self.slice = LENT_SLICE if lending.lend_from else SLICE
        else:
            native = core.FramePipe(stream.fd, None, None, READ_AHEAD)
        self.native = native
        self.send_held = native.send_held  # type: ignore[method-assign]
        self.take_held = native.take_held  # type: ignore[method-assign]
        self.send = native.send  # type: ignore[method-assign]
        self.send_rest = native.send_rest  # type: ignore[method-assign]
        self.pull = native.pull  # type: ignore[method-assign]
        self.answer = native.answer  # type: ignore[method-assign]
        self.guard = native.guard  # type: ignore[method-assign]
        self.shut = native.shut  # type: ignore[method-assign]
        self.post = native.post  # type: ignore[method-assign]
        self.hold = native.hold  # type: ignore[method-assign]
        self.exchange = native.exchange  # type: ignore[method-assign]
        self.wake = native.wake  # type: ignore[method-assign]
        self.request = native.request  # type: ignore[method-assign]
        self.fill = native.fill  # type: ignore[method-assign]
        self.may_sleep = native.may_sleep  # type: ignore[method-assign]
        self.sleep = native.sleep  # type: ignore[method-assign]
        self.woken = native.woken  # type: ignore[method-assign]

    def send(self, kind: int, call: int, head: bytes, buffers: Sequence[Buffer], payload: int) -> int:
        raise NotImplementedError  # the core's own, see above

    def send_rest(self, buffers: Sequence[Buffer]) -> int:
        raise NotImplementedError

    def fill(self, view: memoryview, wait: float = 0.0, waker: int = -1) -> int:
        raise NotImplementedError

    @property
    def held(self) -> int:  # type: ignore[override]
        assert self.native is not None
        return self.native.held

    @property
    def midway(self) -> bool:  # type: ignore[override]
        assert self.native is not None
        return self.native.midway

    def open_lanes(self, streams: Sequence[Stream]) -> None:
        assert self.native is not None
        sockets: list[int] = []
        try:
            for stream in streams:
                sockets.append(os.dup(stream.fd))  # noqa: PERF401 - those before one that fails are closed below
        except OSError:  # there are no more descriptors to be had
            for socket in sockets:
                os.close(socket)
            raise
        self.native.open_lanes(sockets)
        self.slice = LENT_SLICE

    def sever_lanes(self) -> None:
        assert self.native is not None
        self.native.sever_lanes()

    def close_lanes(self, forked: bool = False) -> None:
        assert self.native is not None
        self.native.close_lanes(forked)

    def may_sleep(self) -> bool:
        raise NotImplementedError

    def sleep(self, seconds: float, waker: int, writes: bool) -> None:
        raise NotImplementedError

    def woken(self) -> None:
        raise NotImplementedError

    def pull(self, spin: float, most: int, wait: float = 0.0, waker: int = -1, writes: bool = False) -> list[Found]:
        raise NotImplementedError

    @property
    def ahead(self) -> bytes:
        assert self.native is not None
        return self.native.ahead

    @property
    def written(self) -> int:
        assert self.native is not None
        return self.native.written

    @property
    def taken(self) -> int:
        assert self.native is not None
        return self.native.taken

    def check(self) -> None:
        assert self.native is not None
        ended = self.native.ended
        if ended == 0:
            return
        if ended == _BROKEN:
            raise ProtocolError("corrupt ring: its read and write counters contradict each other")
        if ended == _BESIDE:
            raise ProtocolError("protocol error: bytes on the socket, although a ring was agreed on")
        if ended == _NO_PART:
            raise ProtocolError("protocol error: a part of a payload that does not fit the payload")
        if ended == _NO_FRAME:
            found = self.ahead[:HEADER_SIZE].hex()
            raise ProtocolError(f"protocol error: expected the header of a frame, got {found}")
        if ended == _GOODBYE:
            raise SaidGoodbye("it has closed its agent", clean=True)
        if ended == _SEVERED:
            raise StreamEnded("the connection was reset")
        raise ended_with(0 if ended == _CLOSED else ended)


class _StreamPipe(Pipe):
    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._buffer = bytearray(READ_AHEAD)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        self._written = self._taken = 0
        self._reading = self._writing = 0
        """1 while bytes are moved and not accounted for yet: an exception in between, as by Ctrl-C, would lose them."""

    def send(self, kind: int, call: int, head: bytes, buffers: Sequence[Buffer], payload: int) -> int:
        return self.send_rest([pack_header(kind, len(head), call, payload) + head, *buffers])

    def send_rest(self, buffers: Sequence[Buffer]) -> int:
        self._writing = 1
        count = self.stream.send(buffers[:IOV_MAX])
        self._written += count
        self._writing = 0
        return count

    def pull(self, spin: float, most: int, wait: float = 0.0, waker: int = -1, writes: bool = False) -> list[Found]:
        frames = self._pull(most)
        if not frames and wait > 0:
            self.sleep(wait, waker, writes)
            frames = self._pull(most)
        return frames

    def sleep(self, seconds: float, waker: int, writes: bool) -> None:
        if not self.may_sleep():
            return
        poller = select.poll()
        poller.register(waker, select.POLLIN)
        if self.stream.fd >= 0:
            poller.register(self.stream.fd, self.stream.read_events | (self.stream.write_events if writes else 0))
        if any(fd != waker for fd, _ in poller.poll(min(seconds, 1e6) * 1e3)):
            self.stream.woken()

    def may_sleep(self) -> bool:
        return not self._has_frame and self.stream.may_sleep()

    @property
    def _has_frame(self) -> bool:
        """Whether `pull` has something to give without reading: a frame, or the header of one with a long head."""
        available = self._stop - self._start
        if available < HEADER_SIZE:
            return False
        try:
            whole = HEADER_SIZE + split_header(self._buffer, self._start)[1]
        except ProtocolError:
            return True  # `pull` will say so
        return whole <= available or whole > READ_AHEAD

    def woken(self) -> None:
        self.stream.woken()

    def _pull(self, most: int) -> list[Found]:
        self._reading = 1
        frames: list[Found] = []
        received = False
        while len(frames) < most:
            available = self._stop - self._start
            if available >= HEADER_SIZE:
                kind, head_size, call, payload = split_header(self._buffer, self._start)
                at = self._start + HEADER_SIZE
                if HEADER_SIZE + head_size <= available:
                    self._start = at + head_size
                    self._taken += 1
                    frames.append((kind, call, bytes(self._view[at : self._start]), payload, head_size))
                    if payload:
                        break
                    continue
                if HEADER_SIZE + head_size > READ_AHEAD:
                    self._start = at
                    self._taken += 1
                    frames.append((kind, call, None, payload, head_size))
                    break
            if received or frames:
                break
            received = True
            if self._start:
                self._view[:available] = self._view[self._start : self._stop]
                self._start, self._stop = 0, available
            self._stop += self.stream.receive_into(self._view[available:])
        self._reading = 0
        return frames

    def fill(self, view: memoryview, wait: float = 0.0, waker: int = -1) -> int:
        self._reading = 1
        count = min(self._stop - self._start, len(view))
        view[:count] = self._view[self._start : self._start + count]
        self._start += count
        while count < len(view):
            more = self.stream.receive_into(view[count:])
            if not more:
                break
            count += more
        self._taken += count
        self._reading = 0
        return count

    @property
    def ahead(self) -> bytes:
        return bytes(self._view[self._start : self._stop])

    @property
    def written(self) -> int:
        return self._written + self._writing

    @property
    def taken(self) -> int:
        return self._taken + self._reading

    def check(self) -> None:
        """Does nothing: the methods raise by themselves."""
