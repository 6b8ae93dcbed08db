"""One connection of remote calls: frames out, frames in, and who moves the bytes.

Whoever sends writes at once what goes at once; the rest waits in a queue, as a copy: the sender's memory is its own
again, and what it writes there next must not show in the message. Bytes that come are read by one thread at a time, the
*mover* of the link: the thread that waits for an answer, if there is one, else the agent's own. A mover also writes on
what is queued. So an answer is read by the very thread that waits for it, without a switch of threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..deadline import Deadline
from ..errors import ChannelClosed, InvalidMessage, PhalanxError, ProtocolError
from ..transports.stream import IOV_MAX, Buffer, Stream, StreamEnded
from ..transports.waker import Waker
from ..wire.calls import HEADER_SIZE, Kind, check_lengths, pack_header
from ..wire.codec import Limits
from .payload import NOT_FAST, CallFields, PlannedCall, PlannedValue, fast_call, fast_value, plan_call, plan_value
from .pipe import open_pipe

__all__ = ["CallLink", "Frame", "Waiter"]

BATCH = 64
"""Frames taken from one link before others have their turn."""
SLICE = 4 << 20
"""Bytes of a long payload read before others have their turn."""
SCRATCH = 256 << 10
MAX_QUEUED = 8 << 20
"""Bytes that may wait to be sent before senders have to wait."""
WINDOW = 16
"""Items of a stream that may be under way before its reader has taken them."""
LONG_COPY = 64 << 10
"""Bytes from which a copy is worth releasing the GIL for."""
SPIN = 100e-6
"""Seconds that a mover looks for an answer before it sleeps."""


class Frame:
    """Something that came."""

    __slots__ = ("call", "error", "head", "kind", "plan", "size", "target")

    def __init__(self, kind: Kind, call: int, head: bytes, size: int) -> None:
        self.kind = kind
        self.call = call
        self.head = head
        self.size = size
        """Bytes in all."""
        self.plan: PlannedValue | PlannedCall | None = None
        self.target: memoryview | None = None
        self.error: InvalidMessage | None = None
        """Why the head cannot be what it should be; the payload was dropped."""

    def value(self, limits: Limits) -> Any:
        """The value in a result or an item.

        Raises:
            InvalidMessage: It is malformed.
        """
        if self.error is not None:
            raise self.error
        if self.plan is not None:
            return self.plan.build(self.target)
        value = fast_value(self.head)
        return value if value is not NOT_FAST else plan_value(self.head, 0, limits).build()

    def request(self, limits: Limits) -> CallFields:
        """Name, target, seconds, arguments and keywords of a call.

        Raises:
            InvalidMessage: It is malformed.
        """
        if self.error is not None:
            raise self.error
        if self.plan is not None:
            call = self.plan.build(self.target)
        else:
            call = fast_call(self.head)
            if call is NOT_FAST:
                call = plan_call(self.head, 0, limits).build()
        return call  # type: ignore[no-any-return]


class Waiter:
    """What a thread waits for on a link."""

    __slots__ = ("_sleep", "done")

    def __init__(self) -> None:
        self.done = False
        self._sleep: Any = None

    def prepare_to_sleep(self) -> Any:
        """From now on `wake` is heard; returns what to sleep on, until then."""
        lock = self._sleep = threading.Lock()
        lock.acquire()
        return lock

    def wake(self) -> None:
        """It is done, or somebody has to move the bytes."""
        sleep, self._sleep = self._sleep, None
        if sleep is not None:
            sleep.release()


class _Unsent:
    """What is left of a frame that could not be written at once."""

    __slots__ = ("begun", "request", "views")

    def __init__(self, request: int, views: deque[memoryview], begun: bool) -> None:
        self.request = request
        """The number of the call, if it is a request."""
        self.views = views
        self.begun = begun
        """Whether a part of the frame is on its way, so that the rest has to follow."""


class CallLink(ABC):
    """One end of a connection.

    Args:
        peer: The rank at the other end.
        spin: Seconds to look for bytes again and again before sleeping.
    """

    def __init__(self, stream: Stream, peer: int, max_message: int, limits: Limits, *, spin: float) -> None:
        self.pipe = open_pipe(stream)
        self.peer = peer
        self.ended: PhalanxError | None = None
        self.mover_lock = threading.Lock()
        """Held by the mover."""
        self._max_message = max_message
        self.limits = limits
        self._spin = spin
        # Re-entrant: a signal handler may close the agent in the middle of a send of its thread.
        self._sending = threading.RLock()
        self._ending = threading.RLock()
        self._unsent: deque[_Unsent] = deque()
        self.queued_bytes = 0
        """Bytes that wait to be sent."""
        self._frame: Frame | None = None
        self._target: memoryview | None = None
        """Where the rest of `_frame` goes."""
        self._left = 0
        """How much of it is to come; without `_target` it is dropped."""
        self._long_head: npt.NDArray[np.uint8] | None = None
        """The head that is on its way to `_target`, if it is that, and not a payload."""
        self._waiting: list[Waiter] = []
        self._waker: Waker | None = None
        """Of a mover that sleeps."""
        self._written = self._taken = 0
        """What of the pipe's counts this side has noted."""
        self._unhandled = False
        """Whether frames were taken from the pipe that are not yet handled."""
        self.moved_by_waiter_at = 0.0
        """When somebody who waited for something moved it last."""
        self.needs_poller = True
        """Whether the agent's thread has to move this link: nobody waits for what comes on it."""
        self.return_to_poller = False
        """Whether the agent's thread wants to move this link when its mover has done."""

    @property
    def stream(self) -> Stream:
        """The connection."""
        return self.pipe.stream

    def use(self, stream: Stream) -> None:
        """Goes over to another stream on the same connection."""
        self.pipe = open_pipe(stream)
        self._written = self._taken = 0

    # -- what the two kinds of links do --------------------------------------------------------------------------------

    only_poller_moves = False
    """Whether only the agent's thread moves this link."""

    @property
    def is_paused(self) -> bool:
        """Whether the agent's thread must not read this link now."""
        return False

    @abstractmethod
    def handle(self, frame: Frame) -> None:
        """Takes a frame that came. Called by the mover; must not wait."""

    def explain(self, error: Exception) -> PhalanxError:
        """Why the connection has ended, in the words of whoever knows best."""
        return error if isinstance(error, PhalanxError) else ChannelClosed(self.peer, str(error))

    @abstractmethod
    def on_end(self, why: PhalanxError) -> None:
        """The connection has ended, for whatever reason. Called once."""

    def on_room(self) -> None:  # noqa: B027 - only one kind of links needs it
        """Some of what was queued is sent, and more may be."""

    @abstractmethod
    def ask_poller(self) -> None:
        """Something has to be moved, and nobody waits for it: the agent's thread shall."""

    # -- out -----------------------------------------------------------------------------------------------------------

    def send(
        self,
        kind: int,
        call: int,
        head: bytes,
        buffers: Sequence[Buffer] = (),
        payload: int = 0,
        *,
        lent: bool = False,
    ) -> bool:
        """Sends a frame; False if a part of it waits in the queue.

        Args:
            lent: The buffers stay as they are until the frame is sent, or until `copy_unsent` or `withdraw_request` of
                this call. If not, they are the sender's again when this returns: what waits is a copy.

        Raises:
            PhalanxError: The link has ended.
            MemoryError: There is no memory for the copy. If the frame had begun, the link has ended.
        """
        total = HEADER_SIZE + len(head) + payload
        failure: Exception
        try:
            with self._sending:
                if self.ended is not None:
                    raise self.ended
                count, tried = 0, not self._unsent
                if tried:
                    count = self.pipe.send(kind, call, head, buffers, payload)
                    if count == total:
                        self._written += count
                        return True
                    self.pipe.check()
                # In one piece with the head, as it was tried: TLS wants a write repeated with no less than it had.
                parts = [pack_header(kind, len(head), call, payload) + head, *buffers]
                rest = deque(memoryview(part) for part in parts if len(part))
                _drop(rest, count)
                request = call if kind in (Kind.REQUEST, Kind.NOTIFY) else 0
                begun = count > 0 or (tried and self.stream.must_repeat)
                self._unsent.append(_Unsent(request, rest if lent else _copy(rest), begun))
                self.queued_bytes += total - count
                self._written += count  # at last: whatever is raised before this line finds a frame that is cut short
            self.wake_mover()  # it has to look for room, too
            return False
        except (StreamEnded, ProtocolError) as ended:
            failure = ended
        except BaseException:
            self._end_if_cut_short()
            raise
        self.end(failure)
        assert self.ended is not None
        raise self.ended

    def write_queued(self) -> bool:
        """Writes on what is queued. True if something was written.

        Raises:
            StreamEnded: The connection has ended.
            ProtocolError: The other side broke the rules of shared memory.
        """
        moved = False
        with self._sending:
            while self._unsent:
                first = self._unsent[0]
                count = self.pipe.send_rest(list(first.views)[:IOV_MAX])
                if not count:
                    first.begun = first.begun or self.stream.must_repeat
                    self.pipe.check()
                    break
                moved = first.begun = True
                _drop(first.views, count)
                self.queued_bytes -= count
                if not first.views:
                    self._unsent.popleft()
                self._written += count  # at last, as in `send`
        if moved and self.queued_bytes <= MAX_QUEUED:
            self.on_room()
        if moved and self._waiting:
            for waiter in tuple(self._waiting):
                if waiter.done:  # it waits for room
                    waiter.wake()
        return moved

    def try_write_queued(self) -> None:
        """Writes on; an end of the connection ends the link."""
        try:
            self.write_queued()
        except (StreamEnded, ProtocolError) as ended:
            self.end(ended)

    def copy_unsent(self, call: int) -> None:
        """The memory that was lent for a call's request is the caller's again: what is not sent of it is copied."""
        try:
            with self._sending:
                for unsent in self._unsent:
                    if unsent.request == call:
                        unsent.views = _copy(unsent.views)
        except MemoryError:
            self.end(ChannelClosed(self.peer, "there is no memory for what waits to be sent"))

    def withdraw_request(self, call: int) -> bool:
        """The request of a call is not wanted any more. True if none of it was sent; else its rest is taken over."""
        with self._sending:
            for unsent in self._unsent:
                if unsent.request == call and not unsent.begun:
                    self._unsent.remove(unsent)
                    self.queued_bytes -= sum(map(len, unsent.views))
                    return True
        self.copy_unsent(call)
        return False

    # -- in ------------------------------------------------------------------------------------------------------------

    def read_frames(self, spin: float, wait: float, waker: int) -> list[Frame]:
        """Reads what is there, up to a bound; looks and then sleeps for so many seconds if nothing is.

        Called by the mover.

        Raises:
            StreamEnded: The connection has ended.
            ProtocolError: What came is no frame.
        """
        frames: list[Frame] = []
        if self._frame is not None:
            if self._fill(self._frame):
                self._unhandled = True
                frames.append(self._frame)
                self._frame = None
            elif wait > 0:
                self.pipe.sleep(wait, waker, bool(self._unsent))
                return frames
            else:
                return frames
        if frames:
            spin = wait = 0.0
        found = self.pipe.pull(spin, BATCH, wait, waker, bool(self._unsent))
        self._taken += len(found)
        if not found:
            if not frames:
                self.pipe.check()
            return frames
        self._unhandled = True
        for kind_value, call, head, payload, *long_head in found:
            size = long_head[0] if head is None else len(head)
            kind = check_lengths(kind_value, size, payload, self._max_message)
            frame = Frame(kind, call, head, size + payload)
            if not payload and head is not None:
                frames.append(frame)
                continue
            self._begin(frame, size, payload)
            if self._fill(frame):
                frames.append(frame)
            else:
                self._frame = frame
        return frames

    def _begin(self, frame: Frame, head_size: int, payload: int) -> None:
        """A frame comes that is not there at once."""
        if frame.head is not None:
            self._plan(frame, payload)
            return
        if head_size > self.limits.max_head:
            raise ProtocolError(f"a head of {head_size} bytes is announced (at most {self.limits.max_head})")
        self._long_head = np.empty(head_size, np.uint8)
        self._target = self._long_head.data
        self._left = head_size

    def _plan(self, frame: Frame, payload: int) -> None:
        """Decides where a payload goes, once the head is there. All of the head is checked first."""
        plan = plan_call if frame.kind in (Kind.REQUEST, Kind.NOTIFY) else plan_value
        self._left = payload
        self._target = None
        try:
            made = frame.plan = plan(frame.head, payload, self.limits)
            frame.target = self._target = made.allocate()
        except InvalidMessage as error:
            frame.error = error
        except MemoryError:
            frame.error = InvalidMessage(f"there is no memory for a message of {payload} bytes")

    def _fill(self, frame: Frame) -> bool:
        """Reads on into a frame that is under way; True once it is complete."""
        enough = self._left - SLICE
        while self._left:
            if self._left < enough:
                return False
            room = self._target
            if room is None:  # it is dropped
                room = memoryview(bytearray(min(self._left, SCRATCH)))
            count = self.pipe.fill(room[:SLICE])
            self._taken += count
            if not count:
                self.pipe.check()
                return False
            self._left -= count
            if self._target is not None:
                self._target = room[count:]
        self._target = None
        if self._long_head is None:
            return True
        frame.head, self._long_head = self._long_head.tobytes(), None
        payload = frame.size - len(frame.head)
        if not payload:
            return True
        self._plan(frame, payload)
        return self._fill(frame)

    # -- moving --------------------------------------------------------------------------------------------------------

    def move(self, spin: float = 0.0, wait: float = 0.0, waker: int = -1) -> bool:
        """Moves what can be moved; looks, and then sleeps, if there is nothing. True if something was moved.

        Called by whoever holds `moving`.
        """
        if self.ended is not None:
            return False
        try:
            moved = bool(self._unsent) and self.write_queued()
            if self._unsent:
                spin = 0.0  # the other side waits for the rest
            frames = self.read_frames(spin, 0.0 if moved else wait, waker)
            for frame in frames:
                if self.ended is not None:  # by the frame before it
                    break
                self.handle(frame)
        except (StreamEnded, ProtocolError) as ended:
            self.end(ended)
            return True
        except BaseException:
            self._end_if_cut_short()
            raise
        self._unhandled = False
        return moved or bool(frames)

    def _end_if_cut_short(self) -> None:
        """Ctrl-C, whatever else a signal handler raises, or a lack of memory.

        If it came between moving bytes and noting that, nobody knows any more where the next frame begins, or which
        answers were lost: the link ends.
        """
        if self._unhandled or (self._written, self._taken) != (self.pipe.written, self.pipe.taken):
            self.end(ChannelClosed(self.peer, "an interrupt, or a lack of memory, cut a message short"))

    def wait(self, waiter: Waiter, deadline: Deadline) -> bool:
        """Waits for a waiter, and moves the bytes if nobody else does; False if the deadline came first."""
        while not waiter.done:
            if self.mover_lock.acquire(blocking=False):
                try:
                    self._move_until(waiter, deadline)
                finally:
                    self.moved_by_waiter_at = time.monotonic()
                    self.hand_over()
            else:
                woken = waiter.prepare_to_sleep()
                self._waiting.append(waiter)
                # The mover may have left just before: then nobody would wake this thread.
                if not waiter.done and self.mover_lock.locked():
                    woken.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX))
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
            if not waiter.done and deadline.expired:
                if not self.mover_lock.locked():  # perhaps it was this thread that was woken to move
                    self._wake_another()
                return False
        return True

    def _move_until(self, waiter: Waiter, deadline: Deadline) -> None:
        if self.move(self._spin) and waiter.done:
            return
        waker = Waker.take()
        try:
            self._waker = waker
            while not waiter.done and self.ended is None:
                waker.clear()
                if waiter.done:
                    return
                if not self.move(0.0, deadline.remaining(), waker.fd) and deadline.expired:
                    return
        finally:
            self._waker = None
            waker.give_back()

    def hand_over(self) -> None:
        """Who waited has what it waited for: another that waits takes over, or the agent's thread."""
        self.stop_moving()
        if self.return_to_poller or self._unsent or self.needs_poller:
            # The agent's thread may sleep on this link, and what would wake it was taken away here.
            self.return_to_poller = False
            self.ask_poller()

    def stop_moving(self) -> None:
        """The mover leaves."""
        self.mover_lock.release()
        if self.ended is not None:
            self.dispose()
        if self._waiting:
            self._wake_another()

    def _wake_another(self) -> None:
        """Somebody who waits has to move the bytes."""
        while self._waiting:
            try:
                waiter = self._waiting.pop()
            except IndexError:
                return
            waiter.wake()
            if not waiter.done:
                return

    def wake_mover(self) -> None:
        """Something has changed that the mover has to look at."""
        waker = self._waker
        if waker is not None:
            waker.set()

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self, error: Exception) -> None:
        """Ends the link, from any thread. The first reason counts."""
        with self._ending:
            if self.ended is not None:
                return
            why = self.explain(error)
            with self._sending:
                self.ended = why
                self._unsent.clear()
                self.queued_bytes = 0
        self.on_end(why)
        self.stream.sever()
        self.wake_mover()
        for waiter in list(self._waiting):
            waiter.wake()
        self.dispose()

    def say_goodbye(self) -> None:
        """Tells the other side that this one closes on purpose, if that can be said at once."""
        with contextlib.suppress(PhalanxError):
            self.send(Kind.GOODBYE, 0, b"")

    def dispose(self) -> None:
        """Gives the connection of a link that has ended back, unless somebody moves it: then that one does."""
        if self.ended is not None and self.mover_lock.acquire(blocking=False):
            with self._sending:
                self.stream.close()
            self.mover_lock.release()


def _copy(views: deque[memoryview]) -> deque[memoryview]:
    """The same bytes in memory that nobody else can write to."""
    if all(type(view.obj) is bytes for view in views):
        return views
    size = sum(map(len, views))
    if size < LONG_COPY:
        return deque([memoryview(b"".join(views))])
    copy = np.empty(size, np.uint8)  # NumPy copies without the GIL
    start = 0
    for view in views:
        copy[start : start + len(view)] = np.frombuffer(view, np.uint8)
        start += len(view)
    return deque([copy.data])


def _drop(views: deque[memoryview], count: int) -> None:
    """Removes the first `count` bytes."""
    while count:
        if count < len(views[0]):
            views[0] = views[0][count:]
            return
        count -= len(views.popleft())
