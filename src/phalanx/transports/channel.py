"""Frames on a stream: the reading half hands messages to mailboxes, the writing half keeps a queue.

Channels have no threads of their own. A thread that waits for something moves the bytes: `pump` reads and `push`
writes as much as is possible without waiting, and both complete what they can, also for other threads.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager as Lock
from typing import Any

from ..errors import ProtocolError, UsageError
from ..wire.frames import HEADER_SIZE, MAX_DESCRIPTION, FrameHeader, FrameKind, parse_header
from .mailbox import Arrival, Envelope, Mailbox, PendingTransfer
from .stream import IOV_MAX, Buffer, Stream, StreamEnded

__all__ = ["Inbound", "Outbound", "OutgoingFrame", "Torn"]

READ_AHEAD = 64 << 10
"""Bytes read at once where a header is expected: a small message costs one call. Long payloads are read in place."""
SCRATCH = 256 << 10
SLICE = 16 << 20
"""Bytes moved in one go. A thread that ends a channel waits for its lock, and must not wait for gigabytes."""


HALFWAY = "a message to it was interrupted halfway"


class Torn(Exception):
    """An interrupt came between moving bytes and counting them, so it is unknown where the next frame begins."""


def nested() -> UsageError:
    """The error of a signal handler that uses a channel in the middle of a frame of the thread that it interrupts."""
    return UsageError(
        "a signal handler cannot send or receive here: the thread that it interrupts is in the middle of a message on "
        "the same channel (set a flag in the handler, and send where the program looks at it)"
    )


class Inbound:
    """Reads frames from a stream into a mailbox.

    Args:
        src: The rank (of the lane) at the other end.
        on_end: Called once when the stream is over, with what ended it (`ProtocolError` for bytes that are no frame,
            `Torn`, or `StreamEnded`) and whether the other side said goodbye first; returns the error for a message
            that was cut short.
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
    ) -> None:
        self.stream = stream
        self.src = src
        self.lock: Lock[Any] = threading.RLock()
        self.moving = False
        """True while the thread that holds the lock is in the middle of a frame."""
        self.ended = False
        self.resting = True
        """True if the next byte of the stream begins a frame: then the core may read it past this channel."""
        self.certain = True
        """True if what the rank sends comes by this channel; False as long as it may still open another one for it."""
        self._mailbox = mailbox
        self._max_message = max_message
        self._max_object = max_object
        self._on_end = on_end
        self._buffer = bytearray(READ_AHEAD)
        self._start = self._stop = 0
        self._need = self._first_need()
        self._head = bytearray()
        self._header: FrameHeader | None = None
        self._arrival: Arrival | None = None
        self._settled: list[PendingTransfer] = []
        self._finished: list[Arrival] = []
        self._refused: list[Arrival] = []
        self._over: Exception | None = None
        """The end of the stream as decided under the lock; `_tell` reports it without the lock."""
        self._paused = False
        self.goodbye = False
        """True once the other side has said that it closes on purpose."""
        self.last_word = b""
        """Why the other side found its group broken, if it said so before it closed."""

    # -- what a wire decides; the classic wire overrides these ---------------------------------------------------------

    def _first_need(self) -> int:
        return HEADER_SIZE

    def _parse(self, head: bytes) -> Arrival | None:
        """Takes the bytes that were needed; returns the message that begins, or sets `_need` to read on."""
        if self._header is None:
            header = parse_header(head, max_message=self._max_message, max_object=self._max_object)
            if header.description:
                self._header = header
                self._need = header.description
                return None
            return self._begin(self._mailbox, header, b"")
        header, self._header = self._header, None
        return self._begin(self._mailbox, header, head)

    def _begin(self, mailbox: Mailbox, header: FrameHeader, description: bytes) -> Arrival | None:
        self._need = self._first_need()
        if header.kind is FrameKind.GOODBYE:
            self.goodbye = True
            return None
        if header.kind is FrameKind.BROKEN:
            self.last_word = description
            return None
        if header.kind is FrameKind.RING:
            self._ring(description)
            return None
        self.certain = True
        envelope = Envelope(self.src, header.kind, header.tag, description, header.payload)
        arrival = mailbox.begin(envelope, self.lock)
        if arrival.refused_by is not None:
            self._settled.append(arrival.refused_by)
            self._refused.append(arrival)
        return arrival

    def _ring(self, description: bytes) -> None:
        """The other side offers a ring in shared memory, or goes over to it; see `ring_channel`."""
        raise ProtocolError("it offers a ring in shared memory, which this channel does not support")

    def _close_stream(self) -> None:
        self.stream.close()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def read_ahead(self) -> bool:
        """True if bytes were read ahead and not used yet: polling the stream does not show them."""
        return self._stop > self._start or self.stream.pending

    def pump(self, wanted: Sequence[PendingTransfer] = ()) -> bool:
        """Reads on until a message is complete or nothing is there. True if there may be more at once.

        Never raises for the stream's sake: an end is told by `on_end`.

        Args:
            wanted: Nothing is read once all of these are done: what comes next may be for the fast path.
        """
        try:
            return self._pump(wanted)
        except BaseException:  # an interrupt: threads that wait for what has arrived must not wait for ever
            self._tell()
            raise

    def _pump(self, wanted: Sequence[PendingTransfer]) -> bool:
        reason: Exception | None = None
        interrupt: BaseException | None = None
        with self.lock:
            if self.ended or (wanted and all(operation.done for operation in wanted)):
                return False
            if self.moving:
                raise nested()
            self._paused = False
            more = bool(self._finished)  # by another thread, which is about to tell it
            try:
                self.moving = True
                more = more or self._advance() is not None
            except (StreamEnded, ProtocolError) as ended:
                reason = ended
            except MemoryError:
                reason = ProtocolError("there is not enough memory for the message that it announced")
            except BaseException as error:  # Ctrl-C, or whatever else a signal handler raises
                reason, interrupt = Torn("a receive from it was interrupted halfway"), error
                if self._arrival in self._finished:
                    self._arrival = None
            finally:
                self.moving = False
            if reason is not None:
                self._over = reason
                self.ended = True
                self._close_stream()
            self._note_rest()
            more = more or self._paused
        if self._settled or self._finished or reason is not None:
            self._tell()
        if interrupt is not None:
            raise interrupt
        return more

    def _note_rest(self) -> None:
        begun = self._arrival is not None or self._header is not None or self._head
        self.resting = not (begun or self._stop > self._start or self.ended)

    def _tell(self) -> None:
        """Tells the waiting threads what was decided under the lock.

        An item is forgotten only after it was told: an interrupt in between has it told twice, which does no harm.
        """
        for operation in tuple(self._settled):
            operation.announce()
            with contextlib.suppress(ValueError):  # another thread told it, too
                self._settled.remove(operation)
        for arrival in tuple(self._finished):
            arrival.mailbox.finish(arrival)
            with contextlib.suppress(ValueError):
                self._finished.remove(arrival)
        for arrival in tuple(self._refused):
            if arrival.receive is not None and not arrival.receive.done:
                arrival.mailbox.on_refusal(arrival.receive)
            with contextlib.suppress(ValueError):
                self._refused.remove(arrival)
        if self._over is not None:
            failure = self._on_end(self, self._over, self.goodbye)
            cut, self._arrival = self._arrival, None
            if cut is not None:
                cut.mailbox.cut(cut, failure)
            self._over = None

    def end(self, error: BaseException, *, goodbye: bytes = b"") -> None:
        """Closes the stream from this side; a message that is half here fails with `error`.

        Args:
            goodbye: Last bytes for the other side, so that it can tell a close from a crash.
        """
        with self.lock:
            if not self.ended:
                self.ended = True
                if goodbye:
                    with contextlib.suppress(StreamEnded):
                        self.stream.say(goodbye)
            self._close_stream()  # also if an interrupt has cut that short, and this is called once more
            arrival, self._arrival = self._arrival, None
            self._note_rest()
        if arrival is not None:
            arrival.mailbox.cut(arrival, error)

    def release(self, mailbox: Mailbox, error: BaseException) -> None:
        """A mailbox is closed while others still use the stream: its message that is half here is dropped."""
        with self.lock:
            arrival = self._arrival
            if arrival is None or arrival.mailbox is not mailbox:
                return
            arrival.view = None
        mailbox.cut(arrival, error)

    def _advance(self) -> Arrival | None:
        while True:
            arrival = self._arrival
            if arrival is not None:
                if not self._read_payload(arrival):
                    return None
                self._finished.append(arrival)
                self._arrival = None
                return arrival
            if not self._read_head():
                return None
            head, self._head = bytes(self._head), bytearray()
            self._arrival = self._parse(head)

    def _read_head(self) -> bool:
        while True:
            missing = self._need - len(self._head)
            available = self._stop - self._start
            taken = min(missing, available)
            if taken:
                self._head += self._buffer[self._start : self._start + taken]
                self._start += taken
            if taken == missing:
                return True
            self._start = 0
            wanted = min(missing - taken, READ_AHEAD) if self.stream.exact else READ_AHEAD
            self._stop = self.stream.receive_into(memoryview(self._buffer)[:wanted])
            if not self._stop:
                return False

    def _read_payload(self, arrival: Arrival) -> bool:
        size = arrival.envelope.size
        enough = arrival.received + SLICE
        while arrival.received < size:
            if arrival.received >= enough:
                self._paused = True
                return False
            missing = size - arrival.received
            available = self._stop - self._start
            if available:
                taken = min(missing, available)
                if arrival.view is not None:
                    chunk = memoryview(self._buffer)[self._start : self._start + taken]
                    arrival.view[arrival.received : arrival.received + taken] = chunk
                self._start += taken
                arrival.received += taken
                continue
            if arrival.view is not None:
                target = arrival.view[arrival.received :]
            else:
                target = memoryview(bytearray(min(missing, SCRATCH)))
            count = self.stream.receive_into(target)
            if not count:
                return False
            arrival.received += count
        return True


class OutgoingFrame(PendingTransfer):
    """A frame that is being sent."""

    __slots__ = ("begun", "channel", "views")

    def __init__(self, views: Sequence[Buffer], channel: Outbound) -> None:
        super().__init__()
        self.channel = channel
        self.views: deque[memoryview] = deque(memoryview(view) for view in views if len(view))
        self.begun = False


class Outbound:
    """Writes frames to a stream, in the order in which they were queued.

    Args:
        on_end: Turns what ended the stream, and whether the other side said goodbye, into the error for the queue.
    """

    def __init__(self, stream: Stream, dst: int, on_end: Callable[[Exception, bool], BaseException]) -> None:
        self.stream = stream
        self.dst = dst
        self._on_end = on_end
        self.lock: Lock[Any] = threading.RLock()
        self._queue: deque[OutgoingFrame] = deque()
        self._ended: BaseException | None = None
        self.moving = False
        """True while the thread that holds the lock is in the middle of a frame."""
        self._paused = False
        """True if the last push ended before it had to: nothing will wake a thread that sleeps until it may go on."""
        self.halfway = False
        """True if a part of a frame was written past the queue (see `direct`): no last words can follow it."""
        self.last_word = b""
        """Why the other side found its group broken, if it said so before it closed."""

    @property
    def ended(self) -> bool:
        """True if nothing more can be sent."""
        return self._ended is not None

    @property
    def idle(self) -> bool:
        """True if nothing waits to be sent."""
        return not self._queue

    def unsent(self) -> list[OutgoingFrame]:
        """The frames that are not yet sent."""
        with self.lock:
            return list(self._queue)

    def send(self, views: Sequence[Buffer]) -> OutgoingFrame:
        """Adds a frame to the queue, and writes what goes at once. Its memory must stay as it is until it is done.

        Raises:
            UsageError: This thread is in the middle of another frame: a signal handler calls.
        """
        with self.lock:
            if self.moving:
                raise nested()
        return self.follow(views)

    def follow(self, views: Sequence[Buffer]) -> OutgoingFrame:
        """As `send`, also in the middle of a frame of this thread: then it goes after that one."""
        outgoing = OutgoingFrame(views, self)
        try:
            self.go_on_with(outgoing)
        except BaseException:  # Ctrl-C: the caller will never know of this frame
            with self.lock:
                is_halfway = outgoing.begun and outgoing in self._queue
                if not is_halfway and outgoing in self._queue:
                    self._queue.remove(outgoing)
            if is_halfway:
                self.tear()
            raise
        return outgoing

    def go_on_with(self, outgoing: OutgoingFrame) -> None:
        """Adds a frame to the queue, unless it was added before, and writes what goes at once.

        A caller that keeps the frame calls this again after an interrupt.
        """
        with self.lock:
            if not (outgoing.begun or outgoing.done or outgoing in self._queue):
                if self._ended is None:
                    self._queue.append(outgoing)
                else:
                    outgoing.settle(self._ended)
        self.push()

    def push(self) -> bool:
        """Writes on until the queue is empty or the stream takes no more. True if it stopped before: call it again."""
        completed: list[OutgoingFrame] = []
        try:
            return self._push(completed)
        except BaseException:  # an interrupt: threads that wait for these must not wait for ever
            for outgoing in completed:
                outgoing.announce()
            raise

    def _push(self, completed: list[OutgoingFrame]) -> bool:
        reason: Exception | None = None
        interrupt: BaseException | None = None
        goodbye = False
        with self.lock:
            if self.moving:  # whoever was interrupted goes on with the queue
                return False
            self._paused = False
            try:
                self.moving = True
                while self._queue and self._write(outgoing := self._queue[0]):
                    if self._queue and self._queue[0] is outgoing:  # else a signal handler has ended the channel since
                        completed.append(outgoing)
                        outgoing.settle()
                        self._queue.popleft()
            except StreamEnded as ended:
                reason, goodbye = ended, self.said_goodbye()
            except BaseException as error:  # Ctrl-C, or whatever else a signal handler raises
                interrupt = error
                if self._queue and self._queue[0].done:
                    self._queue.popleft()
                elif self._queue and self._queue[0].begun:
                    reason = Torn(HALFWAY)
            finally:
                self.moving = False
        for outgoing in completed:
            outgoing.announce()
        if reason is not None:
            self.end(self._on_end(reason, goodbye))
        if interrupt is not None:
            raise interrupt
        return self._paused

    def tear(self) -> None:
        """Ends the channel: its caller was interrupted before somebody could go on with the rest of a message."""
        self.end(self._on_end(Torn(HALFWAY), False))

    def withdraw(self, outgoing: OutgoingFrame, cut: BaseException) -> bool:
        """Takes a frame back; False if all of it was sent.

        If a part of it is on the wire, nothing more can follow: the channel ends with `cut`.
        """
        with self.lock:
            taken = outgoing in self._queue
            if taken:
                self._queue.remove(outgoing)
                outgoing.withdrawn = True
        if taken and outgoing.begun:
            self.end(cut)
        return taken

    def say(self, word: bytes) -> None:
        """Sends last words, just before the end; they are lost if a message before them cannot be sent at once."""
        self.push()
        with self.lock, contextlib.suppress(StreamEnded):
            if self._ended is None and not self._queue and not self.halfway and not self.moving:
                self.stream.say(word)

    def end(self, error: BaseException) -> None:
        """Nothing more can be sent: everything in the queue fails."""
        with self.lock:
            if self._ended is None:
                self._ended = error
            queue = list(self._queue)
            for outgoing in queue:
                outgoing.settle(self._ended)
            self._queue.clear()
            self._close_stream()
        for outgoing in queue:
            outgoing.announce()

    def _close_stream(self) -> None:
        self.stream.close()

    def said_goodbye(self) -> bool:
        """True if the other side closed its half on purpose. Called after a write has failed."""
        last = bytearray(HEADER_SIZE + MAX_DESCRIPTION)
        with contextlib.suppress(StreamEnded, ProtocolError, ValueError):
            count = self.stream.receive_into(memoryview(last))
            header = parse_header(last[:HEADER_SIZE], max_message=0, max_object=0)
            if header.kind is FrameKind.BROKEN:
                self.last_word = bytes(last[HEADER_SIZE:count])
            return header.kind is FrameKind.GOODBYE
        return False

    def _write(self, outgoing: OutgoingFrame) -> bool:
        views = outgoing.views
        total = 0
        while views:
            if total >= SLICE:
                self._paused = True
                return False
            # Before it has: an interrupt may come as soon as bytes have left.
            begun, outgoing.begun = outgoing.begun, True
            count = self.stream.send([*itertools.islice(views, IOV_MAX)])
            if not count:
                outgoing.begun = begun or self.stream.must_repeat
                return False
            total += count
            while views and count >= len(views[0]):
                count -= len(views.popleft())
            if count:
                views[0] = views[0][count:]
        return True
