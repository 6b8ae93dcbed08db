"""One connection of remote calls: it sends frames, handles those that come, and decides which thread moves the bytes.

The *mover* of a link is the thread that reads its bytes; there is one at a time, and it holds `mover_lock`. A thread
that waits for an answer becomes the mover if there is none, so it reads its answer itself, without a switch of threads.
While no thread waits, the agent's own thread is the mover (see `poller`).

A sender writes as much of a frame as the connection takes at once. The rest is queued, and the mover writes it later.
What is queued is a copy, unless the sender lends its memory: it may change its arrays as soon as `send` returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from ..deadline import Deadline
from ..errors import ChannelClosed, Closed, PhalanxError, ProtocolError, UsageError, copy_for_raise
from ..transports.duplex_ring import DuplexRing
from ..transports.lending import NOTHING, Lending
from ..transports.stream import IOV_MAX, Buffer, Stream, StreamEnded
from ..transports.waker import Waker
from ..wire.calls import HEADER_SIZE, CallKind, pack_header
from ..wire.codec import Limits
from .frame_reader import Frame, FrameReader
from .lanes import LANES_FROM, given_away
from .pipe import open_pipe
from .waiter import Waiter
from .workers import ArrivedCall

__all__ = ["CallLink"]

MAX_QUEUED = 8 << 20
"""Bytes that may wait to be sent before senders have to wait."""
WINDOW = 16
"""Items of a stream that may be under way before its reader has taken them."""
LONG_COPY = 64 << 10
"""Bytes from which a copy is worth releasing the GIL for."""
SPIN = 100e-6
"""Seconds that a mover looks for bytes again and again before it sleeps."""

FEW_TOGETHER, MANY_TOGETHER = 8, 16
"""Frames that are sent together at most, in memory and over a socket: the other rank is to have something to do."""
LONGEST_SLEEP = 0.5
"""Seconds after which a waiting thread looks again if there is a mover: a signal handler may have raised in the last
one before that could wake it."""
SHORT_REST = 1e-3
"""Seconds between two looks at a wait which the end of its link should have ended."""
_CUT_SHORT = "an interrupt or a lack of memory cut a message short"
LONGEST_HELD = 512
"""Bytes of a head that may wait for others."""

AT_ONCE = (False,)
"""The argument of `mover_lock.acquire`, which `map` calls where a thread waits for an answer. Python runs the handlers
of signals after its own calls, and so never between taking the lock and noting that it is taken."""


class _Unsent:
    """The rest of a frame that could not be written at once."""

    __slots__ = ("begun", "request", "views")

    def __init__(self, request: int, views: deque[memoryview], begun: bool) -> None:
        self.request = request
        """The number of the call, if it is a request."""
        self.views = views
        self.begun = begun
        """Whether a part of the frame is on its way, so that the rest has to follow."""


class CallLink(FrameReader):
    """One end of a connection of remote calls.

    Args:
        peer: The rank at the other end.
        spin: Seconds to look for bytes again and again before sleeping.
        lending: How long payloads go through shared memory.
    """

    def __init__(
        self,
        stream: Stream,
        peer: int,
        max_message: int,
        limits: Limits,
        *,
        spin: float,
        lending: Lending = NOTHING,
    ) -> None:
        super().__init__(open_pipe(stream, lending), max_message, limits)
        self._lending = lending
        self._look_at(stream)
        self.peer = peer
        self.ended: PhalanxError | None = None
        self.mover_lock = threading.Lock()
        """Held by the mover."""
        self.waits_inside: set[int] = set()
        """The threads that wait for an answer as the mover, or are about to, by their identifiers."""
        self._spin = spin
        # Re-entrant: a signal handler may close the agent in the middle of a send of its thread.
        self._sending = threading.RLock()
        self._ending = threading.RLock()
        self._unsent: deque[_Unsent] = deque()
        self.pipe.guard(self.mover_lock, self._sending, self._unsent)
        self.queued_bytes = 0
        """Bytes that wait to be sent."""
        self._is_writing = False
        """Whether bytes are being written, and not accounted for yet: a signal handler must not write in between."""
        self._is_cut = False
        """Whether a frame was cut short by an exception, so that nothing may follow it. Guarded by `_sending`."""
        self._waiting: list[Waiter] = []
        self._waker: Waker | None = None
        """Wakes the mover while it sleeps."""
        self._written = 0
        """The pipe's count of bytes, as far as they are accounted for here."""
        self._is_given_away = False
        self.is_parents = False
        """Whether this process is a forked child: then the connection is the parent's."""
        self.moved_by_waiter_at = 0.0
        """When a waiting thread was the mover last."""
        self.needs_poller = True
        """Whether the agent's thread has to be the mover while no other thread waits."""
        self.return_to_poller = False
        """Whether the agent's thread wants to become the mover as soon as the present one stops."""

    @property
    def stream(self) -> Stream:
        """The connection."""
        return self.pipe.stream

    def use(self, stream: Stream) -> None:
        """Switches to another stream on the same connection."""
        self.pipe = open_pipe(stream, self._lending)
        self.pipe.guard(self.mover_lock, self._sending, self._unsent)
        self._look_at(stream)
        self._written = self._taken = 0

    def _look_at(self, stream: Stream) -> None:
        self.sends_cheaply = isinstance(stream, DuplexRing)
        """Whether a frame is sent without a system call."""
        self.most_held = (FEW_TOGETHER if self.sends_cheaply else MANY_TOGETHER) - 1
        """Frames that wait for another one at most."""

    # -- what the two kinds of links do --------------------------------------------------------------------------------

    only_poller_moves = False
    """Whether only the agent's thread moves this link."""

    @property
    def is_paused(self) -> bool:
        """Whether the agent's thread must not read this link now."""
        return False

    @abstractmethod
    def handle(self, frame: Frame) -> None:
        """Handles a frame that was received. Called by the mover; must not block."""

    def take_call(self, spin: float, wait: float, waker: int) -> ArrivedCall | None:
        """A plain call, if one comes and nothing else; else None, and what came is for `move`.

        Called by the agent's thread, without `mover_lock`. Most calls come alone: they need no queue.

        Args:
            spin, wait, waker: As for `read_frames`.
        """
        return None

    def explain(self, error: Exception) -> PhalanxError:
        """The reason for the end of the connection, as callers should see it."""
        return error if isinstance(error, PhalanxError) else ChannelClosed(self.peer, str(error))

    @abstractmethod
    def on_end(self, why: PhalanxError) -> None:
        """Cleans up after the end of the connection. Called once."""

    def on_cut_short(self) -> None:
        """Finishes what an exception has kept the mover from finishing. Called by the mover."""

    def finish_after_end(self, waiter: Waiter) -> None:
        """Ends a wait that the end of the link has not ended: an interrupt may have kept a thread from doing so.

        Called with `mover_lock` held. By default it only rests for a moment, so that the wait does not spin.
        """
        time.sleep(SHORT_REST)

    def on_room(self) -> None:
        """Called when the queue has room again."""

    @abstractmethod
    def ask_poller(self) -> None:
        """Has the agent's thread move this link, because no other thread waits on it."""

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
        if payload >= LANES_FROM and self.lanes is not None:
            self.lanes.want()
        failure: Exception
        try:
            with self._sending:
                tried = False
                try:
                    self._check_whole()
                    if self.ended is not None:
                        raise self.why_ended()
                    count, tried = 0, not (self._unsent or self.pipe.midway or self._is_writing)
                    if tried:
                        self._is_writing = True
                        count = self.pipe.send(kind, call, head, buffers, payload)
                        if count == total:
                            self._written += count
                            self._is_writing = False
                            if self._unsent:  # of a signal handler that came meanwhile
                                self.write_queued()
                            return True
                        self.pipe.check()
                        if self.pipe.held:
                            self._queue_held()
                    # In one piece with the head, as it was tried: TLS wants a write repeated with no less than it had.
                    parts = [pack_header(kind, len(head), call, payload) + head, *buffers]
                    rest = deque(memoryview(part) for part in parts if len(part))
                    _drop(rest, count)
                    request = call if kind in (CallKind.REQUEST, CallKind.NOTIFY) else 0
                    begun = count > 0 or (tried and self.stream.must_repeat)
                    unsent = _Unsent(request, rest if lent else _copy(rest), begun)
                    if begun:  # a signal handler that came meanwhile has put its frames there
                        self._unsent.appendleft(unsent)
                    else:
                        self._unsent.append(unsent)
                    self.queued_bytes += total - count
                    self._written += count  # last: an exception before this line means that a frame was cut short
                except BaseException:
                    self._note_if_cut_short()
                    raise
                finally:
                    if tried:
                        self._is_writing = False
            self.wake_mover()  # it has to look for room, too
            return False
        except (StreamEnded, ProtocolError) as ended:
            failure = ended
        except BaseException:
            self._end_if_cut_short()
            raise
        self.end(failure)
        raise self.why_ended()

    def send_held(self) -> None:
        """Sends what was held."""
        try:
            with self._sending:
                try:
                    self._check_whole()
                    if self.ended is None and not self.pipe.send_held():
                        self.pipe.check()
                        self._queue_held()
                    waits = bool(self._unsent)
                except BaseException:
                    self._note_if_cut_short()
                    raise
        except (StreamEnded, ProtocolError) as ended:
            self.end(ended)
        except BaseException:
            self._end_if_cut_short()
            raise
        else:
            if waits:
                self.wake_mover()
                self.ask_poller()

    @property
    def writes(self) -> bool:
        return bool(self._unsent)

    @property
    def _is_midway(self) -> bool:
        """Whether this thread, which runs a signal handler now, was about to queue the rest of a frame.

        What the handler sends is queued, and goes once the handler has returned. Called with `_sending` held.
        """
        return self._is_writing or (self.pipe.midway and not (self._unsent and self._unsent[0].begun))

    def _queue_held(self) -> None:
        """Queues what was kept back and does not go now. Called with `_sending` held."""
        rest = self.pipe.take_held()
        if not rest:  # a signal handler that sends just now has taken it along
            return
        self._unsent.appendleft(_Unsent(0, deque([memoryview(rest)]), True))
        self.queued_bytes += len(rest)
        self._written += len(rest)  # last, as in `send`

    def write_queued(self) -> bool:
        """Writes what is queued, as far as it goes. True if something was written.

        Raises:
            StreamEnded: The connection has ended.
            ProtocolError: The other side broke the rules of shared memory.
        """
        moved = writes = False
        with self._sending:
            try:
                self._check_whole()
                while self._unsent and not self._is_midway:
                    first = self._unsent[0]
                    writes = self._is_writing = True
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
                    self._written += count  # last, as in `send`
                    writes = self._is_writing = False
            except BaseException:
                self._note_if_cut_short()
                raise
            finally:
                if writes:
                    self._is_writing = False
        if moved and self.queued_bytes <= MAX_QUEUED:
            self.on_room()
        if moved and self._waiting:
            for waiter in tuple(self._waiting):
                if waiter.done:  # it waits for room
                    waiter.wake()
        return moved

    def _note_if_cut_short(self) -> None:
        """Sees to it that nothing follows a frame that an exception has cut short; `_end_if_cut_short` does the rest.

        Called with `_sending` held: another thread may be waiting for it, to send.
        """
        if self._written != self.pipe.written:
            self._is_cut = True
            self.pipe.shut()

    def _check_whole(self) -> None:
        """Called with `_sending` held.

        Raises:
            StreamEnded: The last frame was cut short.
        """
        if self._is_cut:
            raise StreamEnded(_CUT_SHORT)

    def try_write_queued(self) -> None:
        """As `write_queued`, for a thread that is not the mover; ends the link if the connection has ended."""
        try:
            if self.write_queued():
                self.wake_mover()  # it may wait for the very room that was made here
        except (StreamEnded, ProtocolError) as ended:
            self.end(ended)

    def copy_unsent(self, call: int) -> None:
        """Copies the unsent rest of a call's request, so that its caller has its memory back."""
        try:
            with self._sending:
                for unsent in self._unsent:
                    if unsent.request == call:
                        unsent.views = _copy(unsent.views)
        except MemoryError:
            self.end(ChannelClosed(self.peer, "not enough memory to copy what waits to be sent"))

    def withdraw_request(self, call: int) -> bool:
        """Removes the request of a call from the queue. False if a part of it was sent; then its rest is copied."""
        with self._sending:
            for unsent in self._unsent:
                if unsent.request == call and not unsent.begun:
                    self._unsent.remove(unsent)
                    self.queued_bytes -= sum(map(len, unsent.views))
                    return True
        self.copy_unsent(call)
        return False

    # -- moving --------------------------------------------------------------------------------------------------------

    def move(self, spin: float = 0.0, wait: float = 0.0, waker: int = -1) -> bool:
        """Writes and reads what it can, and handles the frames; True if bytes were moved.

        If there is nothing to move, spins and then sleeps, as `read_frames`.

        Called with `mover_lock` held.
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
            self.on_cut_short()
            raise
        self._unhandled = False
        return moved or bool(frames) or self._plain > 0

    def _end_if_cut_short(self) -> None:
        """Ends the link if an exception came between moving bytes and accounting for them.

        That is Ctrl-C, another exception of a signal handler, or a lack of memory. Then it is not known where the next
        frame begins, or which answers were lost.
        """
        if self._unhandled or (self._written, self._taken) != (self.pipe.written, self.pipe.taken):
            self.end(ChannelClosed(self.peer, _CUT_SHORT))

    def wait(self, waiter: Waiter, deadline: Deadline) -> bool:
        """Blocks until `waiter` is done, as the mover if there is no other; False if the deadline came first.

        Raises:
            Closed: This process is a forked child, and nothing will ever come.
            UsageError: This is a signal handler, and the thread that it has interrupted is the mover.
        """
        if self.is_parents:
            raise Closed(f"a forked child cannot wait for what rank {self.peer} sends: the parent process gets it")
        if self.pipe.held:
            self.send_held()
        me = threading.get_ident()
        self.refuse_to_wait_inside(me)
        try:
            while not waiter.done:
                self.waits_inside.add(me)  # before it does: a signal may come as soon as it has the lock
                [moves] = map(self.mover_lock.acquire, AT_ONCE)
                if moves:
                    try:
                        self._move_until(waiter, deadline)
                        if self.ended is not None and not waiter.done:
                            self.finish_after_end(waiter)
                    finally:
                        self.mover_lock.release()
                        self.waits_inside.discard(me)
                        self.moved_by_waiter_at = time.monotonic()
                        self._after_moving()
                else:
                    self.waits_inside.discard(me)
                    woken = waiter.prepare_to_sleep()
                    self._waiting.append(waiter)
                    # The mover may have stopped just before: then no thread would wake this one.
                    while not waiter.done and self.mover_lock.locked() and not deadline.expired:
                        if woken.acquire(timeout=min(deadline.remaining(), LONGEST_SLEEP)):
                            break
                    with contextlib.suppress(ValueError):  # whoever woke this thread has taken it out
                        self._waiting.remove(waiter)
                if not waiter.done and deadline.expired:
                    if not self.mover_lock.locked():  # perhaps it was this thread that was woken to move
                        self._wake_another()
                    return False
        finally:
            self.waits_inside.discard(me)
        return True

    def refuse_to_wait_inside(self, me: int) -> None:
        """Refuses a signal handler to wait for what only the thread that it has interrupted could read.

        Args:
            me: The calling thread.

        Raises:
            UsageError: That is the mover.
        """
        if me in self.waits_inside and self.mover_lock.locked():
            raise UsageError(
                f"a signal handler cannot wait for rank {self.peer} now, because the thread that it has interrupted "
                "was reading from that rank (notify and call_async can be used there)"
            )

    def _move_until(self, waiter: Waiter, deadline: Deadline) -> None:
        if self._spin and not waiter.spun and self.move(self._spin) and waiter.done:
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
        """Hands the link over: to another waiting thread if there is one, else to the agent's thread."""
        self.mover_lock.release()
        self._after_moving()

    def _after_moving(self) -> None:
        """Finds the next mover, after this thread has released `mover_lock`."""
        self._wake_next()
        if self.return_to_poller or self._unsent or self.needs_poller:
            # The agent's thread may sleep on this link, and what would wake it was taken away here.
            self.return_to_poller = False
            self.ask_poller()

    def stop_moving(self) -> None:
        """Ends the mover's part, and wakes a waiting thread to take it."""
        self.mover_lock.release()
        if self._waiting or self.ended is not None:
            self._wake_next()

    def _wake_next(self) -> None:
        if self.ended is not None:
            self.dispose()
        if self._waiting:
            self._wake_another()

    def _wake_another(self) -> None:
        """Wakes a waiting thread, so that it becomes the mover."""
        while self._waiting:
            try:
                waiter = self._waiting.pop()
            except IndexError:
                return
            waiter.wake()
            if not waiter.done:
                return

    def wake_mover(self) -> None:
        """Wakes the mover, if it is a waiting thread that sleeps: something has changed."""
        waker = self._waker
        if waker is not None:
            waker.set()
        self.pipe.wake()

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self, error: Exception) -> None:
        """Ends the link. May be called by any thread, and more than once: the first reason counts."""
        try:
            if self._is_first_to_end(error):
                self._give_back()
        except BaseException:
            self._is_first_to_end(error)
            self._give_back()
            raise

    def _is_first_to_end(self, error: Exception) -> bool:
        with self._ending:
            if self.ended is not None:
                return False
            why = self.explain(error)
            with self._sending:
                self.ended = why
        return True

    def _give_back(self) -> None:
        """Tells everybody of the end. Called again, it does what an exception, as by Ctrl-C, has left."""
        assert self.ended is not None
        with self._sending:
            self.pipe.shut()
            self._unsent.clear()
            self.queued_bytes = 0
        self.on_end(self.ended)
        if not self._is_given_away:
            self.stream.sever()
        self.pipe.sever_lanes()
        self.wake_mover()
        for waiter in list(self._waiting):
            waiter.wake()
        self.dispose()

    def why_ended(self) -> BaseException:
        """The reason for the end, to be raised.

        A copy: the link would keep the traceback of its own one, which grows with every raise, and all that the frames
        in it hold.
        """
        assert self.ended is not None
        return copy_for_raise(self.ended, self.ended.operation or "", self.ended.rank)

    def give_stream_away(self) -> None:
        """Ends the link, but not the connection: it has become a lane of another link."""
        self._is_given_away = True
        self.end(given_away(self.peer))

    def say_goodbye(self) -> None:
        """Tells the other side that this one closes on purpose, if that can be sent at once."""
        with contextlib.suppress(PhalanxError):
            self.send(CallKind.GOODBYE, 0, b"")

    def dispose(self) -> None:
        """Closes the stream of a link that has ended. If there is a mover, it does so when it stops."""
        if self.ended is None:
            return
        [is_free] = map(self.mover_lock.acquire, AT_ONCE)
        if is_free:
            try:
                with self._sending:
                    self.stream.close()
                    self.pipe.close_lanes()
            finally:
                self.mover_lock.release()


def _copy(views: deque[memoryview]) -> deque[memoryview]:
    """The same bytes, in memory of their own."""
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
