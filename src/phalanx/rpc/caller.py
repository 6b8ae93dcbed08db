"""The caller's end of a link: calls that wait for their answers."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ..deadline import Deadline
from ..errors import (
    Cancelled,
    FunctionNotFound,
    InvalidArgument,
    InvalidMessage,
    PhalanxError,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    UsageError,
    copy_for_raise,
    of_call,
)
from ..slate.calls import CALLS
from ..transports.lending import Lending
from ..transports.stream import Stream
from ..transports.waker import Waker
from ..wire.calls import CallKind, too_long
from ..wire.codec import Limits
from .context import CallContext, running_call
from .frame_reader import Frame
from .lanes import CallerLanes
from .link import AT_ONCE, LONGEST_HELD, MAX_QUEUED, SHORT_REST, CallLink
from .payload import NOT_FAST, FrameBody, decode_error, encode_value, fast_value, read_value
from .pending_call import ItemReader, PendingCall
from .pipe import NOT_POSTED, POSTED, Found, SaidGoodbye
from .poller import LinkPoller
from .signature import convert_result
from .waiter import ConditionWaiter, SlotWaiter, Waiter
from .workers import current

__all__ = ["CallerLink"]

GRACE = 1e-3
"""Seconds until the agent's thread reads the answers of asynchronous calls. A thread that waits for a future before
that reads them itself, which is faster."""
LONGEST_GRACE = 5e-3
"""The same while more calls are being started."""
LONGEST_IN_HAND = 50e-3
"""Seconds that a thread may need to finish a call of a link that has ended. After that, an interrupt has kept it."""
BUSY = 4
"""Calls under way with which the other rank is busy for a while: those behind them may be sent together."""

_ENDLESS = math.inf
_REQUEST = int(CallKind.REQUEST)  # the core takes a plain int sooner
_RESULT, _ERROR = CallKind.RESULT, CallKind.ERROR  # the members of an enum are slow to look up
_ERRORS: dict[str, type[RpcError]] = {
    "not found": FunctionNotFound,
    "argument": InvalidArgument,
    "message": InvalidMessage,
}
"""The exception for each kind of error that a server reports, if the function itself did not raise."""


class CallerLink(CallLink):
    """Sends calls to one rank, and gives each answer to the thread or future that waits for it.

    Args:
        rank: This rank, as a rank of the world; errors name it.
        world_rank: The other rank, as a rank of the world.
        max_in_flight: Calls that may wait for their answers; further ones wait for a slot.
        why_ended: Returns the error that explains the end of the connection.
        why_closed: The same after a goodbye.
        forget: Called when the connection has ended.
        open_stream: Makes the reader of a call that yields items.
    """

    def __init__(
        self,
        stream: Stream,
        peer: int,
        poller: LinkPoller,
        max_message: int,
        limits: Limits,
        *,
        spin: float,
        lending: Lending,
        rank: int,
        world_rank: int,
        max_in_flight: int,
        why_ended: Callable[[Exception], PhalanxError],
        why_closed: Callable[[], PhalanxError],
        forget: Callable[[CallerLink], None],
        open_stream: Callable[[CallerLink, PendingCall], ItemReader],
    ) -> None:
        super().__init__(stream, peer, max_message, limits, spin=spin, lending=lending)
        self.needs_poller = False
        self.rank = rank
        self.world_rank = world_rank
        self.poller = poller
        self._max_in_flight = max_in_flight
        self._why_ended, self._why_closed = why_ended, why_closed
        self._forget = forget
        self._open_stream = open_stream
        self._numbers = itertools.count(1)
        self.calls: dict[int, PendingCall] = {}
        self._in_hand: PendingCall | None = None
        """The call that the mover takes off the list and finishes: an interrupt in between must not lose it."""
        self._unattended = 0
        """Calls whose answer goes to a future: no thread may be waiting for it."""
        self._in_grace = False
        """Whether the agent's thread will check soon if another thread reads the answers."""
        self._grace_began = 0.0
        self._newest: Deadline | None = None
        """That of the call which was started last without a thread that waits for it."""
        self._expire_at = float("inf")
        """When `_expire_calls` runs next."""
        self._counting = threading.RLock()  # re-entrant: a signal handler may make a call
        """Guards `_unattended` and what follows from it, and the beginning of a stream against its deadline."""
        self._waiting_for_slot: deque[SlotWaiter] = deque()
        """Calls that wait until fewer are in flight, the first one first."""

    def ask_poller(self) -> None:
        self.poller.watch(self)

    # -- calling -------------------------------------------------------------------------------------------------------

    def call(self, pending: PendingCall, outgoing: FrameBody) -> Any:
        """Sends a request and waits for its answer in this thread."""
        if self.waits_inside:
            self.refuse_to_wait_inside(threading.get_ident())
        try:
            context = running_call.get()
            has_slot = not self._waiting_for_slot and len(self.calls) < self._max_in_flight  # `_has_slot`, sooner
            in_callback = context is None and current.is_worker  # of a future
            is_plain = has_slot and context is None and not in_callback and not outgoing.payload
            head = self._exchange(pending, outgoing.head) if is_plain else False
            if head is False:
                self.start(pending, outgoing)
                if self._unsent:
                    self._refuse_to_wait_midway()
            if context is not None:
                return self._call_from_handler(pending, context)
            if in_callback:
                with self.poller.blocking():
                    return self.finish(pending)
            if not isinstance(head, bytes):
                head = self._take_answer(pending) if self.pipe.native is not None and not self._unsent else None
                if head is None:
                    return self.finish(pending)
        except BaseException:  # Ctrl-C, perhaps: no thread will ever read the answer, nor hand the link over
            self.abandon(pending, None)
            self._after_moving()
            raise
        self._answered(pending, True)
        return self.plain_result(pending, head)

    def _refuse_to_wait_midway(self) -> None:
        with self._sending:
            if self._is_midway:
                raise UsageError(
                    f"a signal handler cannot wait for rank {self.world_rank} now, because the thread that it has "
                    "interrupted was sending to that rank (notify and call_async can be used there)"
                )

    def _exchange(self, pending: PendingCall, request: bytes) -> bytes | bool | None:
        """Sends a plain request, and returns the head of its answer, if that is plain too and comes first; else None.

        One call of the core does it all. False if that is not possible now, and nothing was sent.
        """
        pending.number = number = next(self._numbers)
        self.calls[number] = pending
        head = self.pipe.exchange(number, request, self._spin, pending.deadline.at)
        if self._waiting or self.needs_poller or self.return_to_poller or self._unsent or self.ended:
            self._after_moving()
        if head is False:
            self.calls.pop(number, None)
            if self._waiting_for_slot:
                self._free_slot()
            return False
        pending.spun = True
        if head is None:
            if self.pipe.held:  # the connection took only a part of the request
                self.send_held()
            return None
        return self._note_answer(pending, head)  # type: ignore[arg-type]  # it is not True

    def _note_answer(self, pending: PendingCall, head: bytes) -> bytes | None:
        """Takes a call off the list whose answer this thread has read; None if it has ended otherwise."""
        if self._unattended:
            self.moved_by_waiter_at = time.monotonic()
        if len(head) > self.max_message:
            self.end(too_long(len(head), self.max_message))
        if self.calls.pop(pending.number, None) is None:
            return None
        if self._waiting_for_slot:
            self._free_slot()
        return head

    def plain_result(self, pending: PendingCall, head: bytes) -> Any:
        """Returns the answer of a call, from its head: it has no payload."""
        value = fast_value(head)
        if value is NOT_FAST:
            value = read_value(head, self.limits)
        return value if pending.returns is None else convert_result(value, pending.returns, pending.name)

    def _answered(self, pending: PendingCall, ok: bool) -> None:
        """Counts a call that has its answer, or the reason why there is none. To be called once for each."""
        if pending.unattended:
            self._unattend(pending)
        deadline = pending.deadline
        if deadline.seconds != _ENDLESS:  # it began when its deadline was set
            name, rank = pending.name, self.world_rank
            row = CALLS.rows.get((name, rank)) or CALLS.row(name, rank)
            row[0] += 1
            if not ok:
                row[1] += 1
            row[2] += time.monotonic() - deadline.at + deadline.seconds

    def _take_answer(self, pending: PendingCall) -> bytes | None:
        """Waits for a short result, and returns its head: it needs no `Frame`. None if anything else comes first."""
        moves = False
        me = threading.get_ident()
        self.refuse_to_wait_inside(me)
        try:
            self.waits_inside.add(me)  # before it does: a signal may come as soon as it has the lock
            [moves] = map(self.mover_lock.acquire, AT_ONCE)
            # Before this thread got the lock, another may have handled the answer, or ended the link and closed its
            # socket. And what follows the first frame of a stream is not the answer of its call.
            if not moves or pending.done or self.ended is not None or self._frame is not None:
                return None
            head = None if pending.spun else self.pipe.answer(pending.number, self._spin)
            pending.spun = True
            if head is None:
                head = self._sleep_for_answer(pending)
        finally:
            if moves:
                self.mover_lock.release()
            self.waits_inside.discard(me)
            if moves and (self._waiting or self.needs_poller or self.return_to_poller or self._unsent or self.ended):
                self._after_moving()
        return None if head is None else self._note_answer(pending, head)

    def _sleep_for_answer(self, pending: PendingCall) -> bytes | None:
        waker = Waker.take()
        try:
            self._waker = waker
            waker.clear()
            if pending.done or self._unsent or self.ended is not None:  # just before there was a waker
                return None
            return self.pipe.answer(pending.number, 0.0, pending.deadline.remaining(), waker.fd)
        finally:
            self._waker = None
            waker.give_back()

    def _call_from_handler(self, pending: PendingCall, context: CallContext) -> Any:
        def give_up() -> None:
            words = f"{pending.name!r} on rank {self.world_rank}: given up, as was the call that made it"
            self.abandon(pending, Cancelled(words))

        context.on_cancel(give_up)
        try:
            with self.poller.blocking():
                return self.finish(pending)
        finally:
            context.forget(give_up)

    def start(self, pending: PendingCall, outgoing: FrameBody, *, lent: bool = True) -> None:
        """Sends a request; blocks while too many calls have no answer.

        Args:
            lent: The caller leaves its arrays alone until the call is done. If not, it may change them after this.
        """
        # A long one is lent in any case: by the time that there is room, little of it is left to be copied.
        is_long = outgoing.payload > MAX_QUEUED
        number = next(self._numbers)
        try:
            if self._has_slot:
                pending.number = number
                self.calls[number] = pending
            else:
                self._wait_for_slot(pending, number)
            head = outgoing.head
            if not outgoing.payload:
                if not lent and self._may_hold(head) and self.pipe.hold(_REQUEST, number, head, self._most_held()):
                    if self.mover_lock.locked() or not self._in_grace:  # just now: who is to send it has looked already
                        self.send_held()
                    return
                if (posted := self.pipe.post(_REQUEST, number, head)) != NOT_POSTED:
                    if posted != POSTED:
                        self.send_held()
                    return
            if not self.send(_REQUEST, number, head, outgoing.buffers, outgoing.payload, lent=lent or is_long):
                self._wait_for_room(pending)
                if is_long and not lent:
                    self.copy_unsent(number)
        except BaseException:
            self._withdraw(number)
            raise

    def _may_hold(self, head: bytes) -> bool:
        """Whether a request may wait for others: if the other rank is busy, and something will send it soon.

        That is a thread that waits for a call, or the agent's thread after `GRACE`.
        """
        return (
            not self.sends_cheaply
            and self._in_grace
            and len(self.calls) > BUSY
            and len(head) <= LONGEST_HELD
            and not self.needs_poller
            and not self.mover_lock.locked()
        )

    def _most_held(self) -> int:
        # The other rank is to begin soon. And answers may have come since `_may_hold`.
        return max(0, min(self.most_held, len(self.calls) // 2 - 1))

    def notify(self, name: str, deadline: Deadline, outgoing: FrameBody) -> None:
        """Sends a request without an answer. The caller may change its arrays when this returns."""
        number = next(self._numbers)
        if self.send(CallKind.NOTIFY, number, outgoing.head, outgoing.buffers, outgoing.payload, lent=True):
            return
        if not outgoing.buffers and self.queued_bytes <= MAX_QUEUED:
            self.ask_poller()
            return
        try:
            self._wait_for_room(PendingCall(name, deadline, None), 0 if outgoing.buffers else MAX_QUEUED)
        except BaseException:
            self.withdraw_request(number)
            raise

    def finish(self, pending: PendingCall) -> Any:
        """Waits for the answer, and returns or raises what it says."""
        if not pending.done and not self.wait(pending, pending.deadline):
            late = self.timed_out(pending)
            self.abandon(pending, late)
            if not pending.done:  # another thread has its answer in hand, but the time is over
                raise late
        return self.result(pending)

    def result(self, pending: PendingCall) -> Any:
        """Returns or raises the answer of a finished call."""
        if pending.head is not None:
            return self.plain_result(pending, pending.head)
        if pending.error is not None:
            raise of_call(copy_for_raise(pending.error, pending.name, self.rank))
        frame = pending.frame
        assert frame is not None
        if frame.kind is _RESULT:
            value = frame.value(self.limits)
            return value if pending.returns is None else convert_result(value, pending.returns, pending.name)
        if frame.kind is CallKind.STREAM:
            stream, pending.opened = pending.opened, None
            return stream
        raise self.error_of(frame, pending)

    def error_of(self, frame: Frame, pending: PendingCall) -> RpcError:
        """The exception for an error that the server reports."""
        kind, type_name, message, traceback = decode_error(frame.head)
        error_type = _ERRORS.get(kind)
        if error_type is not None:
            return error_type(message, rank=self.rank, peer=self.world_rank, operation=pending.name)
        words = f"{pending.name!r} on rank {self.world_rank} raised {type_name}: {message}"
        if traceback:
            words += f"\n\nTraceback of rank {self.world_rank}:\n{traceback.rstrip()}"
        return RemoteError(
            words,
            remote_type=type_name,
            remote_traceback=traceback,
            peer=self.world_rank,
            operation=pending.name,
        )

    def timed_out(self, pending: PendingCall) -> RpcTimeout:
        """The error for a call whose deadline has passed."""
        return RpcTimeout(
            f"{pending.name!r} on rank {self.world_rank}: no answer within {pending.deadline.seconds:g} s",
            missing=[self.world_rank],
            seconds=pending.deadline.seconds,
            rank=self.rank,
            peer=self.world_rank,
            operation=pending.name,
        )

    def abandon(self, pending: PendingCall, error: BaseException | None) -> None:
        """Gives a call up, unless it is finished: tells the server, and stops using the caller's memory."""
        if self._withdraw(pending.number, unless_done=error is not None):
            if error is not None and pending.stream is None:
                self._answered(pending, False)
            pending.finish(error)
            self.wake_mover()  # it may be the very thread that waits for this call

    def _withdraw(self, number: int, *, unless_done: bool = False) -> bool:
        """Forgets a call and tells the server; False if the call was finished.

        Args:
            unless_done: Not if it is a stream that has begun, which is somebody's by now.
        """
        with self._counting:
            if unless_done and (known := self.calls.get(number)) is not None and known.done:
                return False
            pending = self.calls.pop(number, None)
        if pending is None:
            return False
        self._unattend(pending)
        if self._waiting_for_slot:
            self._free_slot()
        self._cancel_on_server(number)
        return True

    def _cancel_on_server(self, number: int) -> None:
        if self.ended is None and not self.withdraw_request(number):
            self._send_control(CallKind.CANCEL, number)

    def _send_control(self, kind: CallKind, number: int, head: bytes = b"") -> None:
        try:
            sent = self.send(kind, number, head)
        except PhalanxError:
            return
        if not sent:
            self.ask_poller()

    # -- bounds --------------------------------------------------------------------------------------------------------

    @property
    def _has_slot(self) -> bool:
        """Whether one more call may begin now. Those that wait go first."""
        return not self._waiting_for_slot and len(self.calls) < self._max_in_flight

    def _wait_for_slot(self, pending: PendingCall, number: int) -> None:
        """Blocks until it is this call's turn to be in flight, and enters it under that number."""
        waiting, me, deadline = self._waiting_for_slot, SlotWaiter(), pending.deadline
        # A call of a signal handler cannot wait for the one that it has interrupted.
        enter = waiting.appendleft if any(other.thread == me.thread for other in tuple(waiting)) else waiting.append
        with self.poller.blocking():
            try:
                enter(me)
                while (waiting[0] is not me or len(self.calls) >= self._max_in_flight) and self.ended is None:
                    if not me.bell.acquire(timeout=min(deadline.remaining(), 0.1)) and deadline.expired:
                        raise self.timed_out(pending)
                pending.number = number
                self.calls[number] = pending  # before the next one looks
            finally:
                if me in waiting:  # else an interrupt came before it was
                    waiting.remove(me)  # first of all: a signal handler may raise after any call
                if waiting and len(self.calls) < self._max_in_flight:
                    self._free_slot()

    def _free_slot(self) -> None:
        """Wakes the first of those that wait for a slot; it wakes the next one, if there are more slots."""
        with contextlib.suppress(IndexError):  # none is left
            self._waiting_for_slot[0].wake()

    def _wait_for_room(self, pending: PendingCall, allowed: int = MAX_QUEUED) -> None:
        """Blocks until at most `allowed` bytes are queued."""
        waiter = ConditionWaiter(lambda: self.queued_bytes <= allowed or self.ended is not None)
        if waiter.done and self.ended is None:
            return
        with self.poller.blocking():
            if not self.wait(waiter, pending.deadline):
                raise self.timed_out(pending)
        if self.ended is not None:
            raise copy_for_raise(self.ended, pending.name, self.rank)

    @property
    def is_full(self) -> bool:
        """True if another call would have to wait before it is sent."""
        return not self._has_slot or self.queued_bytes > MAX_QUEUED

    # -- calls for which no thread waits -------------------------------------------------------------------------------

    def start_unattended(self, pending: PendingCall, outgoing: FrameBody) -> None:
        """Sends a request whose answer goes to a future; the agent's thread reads it, and watches the deadline."""
        with self._counting:
            self._unattended += 1
            pending.unattended = True
        try:
            self.start(pending, outgoing, lent=False)
        except BaseException:
            self._unattend(pending)
            raise
        if pending.number not in self.calls and pending.deadline.expired:
            # Given up before it was sent, perhaps: then the server was told before it knew of the call.
            self._cancel_on_server(pending.number)
        self._newest = pending.deadline
        if not self.needs_poller and not self._in_grace:
            self._in_grace = True
            self._grace_began = now = time.monotonic()
            self.poller.call_at(now + GRACE, self._poll_after_grace)
        if pending.deadline.at < self._expire_at:
            self._expire_at = pending.deadline.at
            self.poller.call_at(self._expire_at, self._expire_calls)

    def _poll_after_grace(self) -> None:
        """Has the agent's thread read the answers, unless a thread that waits for one did so just now."""
        self._in_grace = False
        if self.pipe.held:
            self.send_held()
        if not self._unattended or self.needs_poller:
            return
        now = time.monotonic()
        if self.mover_lock.locked() or now - self.moved_by_waiter_at < GRACE or self._starts_more(now):
            self._in_grace = True
            self.poller.call_at(now + GRACE, self._poll_after_grace)
        else:
            self.poll_now()

    def _starts_more(self, now: float) -> bool:
        """Whether calls are still being started, so that the thread which does so may be about to wait for them."""
        newest = self._newest
        if newest is None or now - self._grace_began > LONGEST_GRACE:
            return False
        return now - (newest.at - newest.seconds) < GRACE

    def poll_now(self) -> None:
        """Has the agent's thread read the answers from now on."""
        if not self.needs_poller:
            self.needs_poller = True
            if self.pipe.held:
                self.send_held()
            self.poller.watch(self)

    def _expire_calls(self) -> None:
        """Fails the calls whose deadline has passed, and runs again at the next deadline."""
        now = time.monotonic()
        self._expire_at = float("inf")
        for pending in list(self.calls.values()):
            if not pending.unattended:
                continue
            if pending.deadline.at <= now:
                self.abandon(pending, self.timed_out(pending))
            else:
                self._expire_at = min(self._expire_at, pending.deadline.at)
        if self._expire_at < float("inf"):
            self.poller.call_at(self._expire_at, self._expire_calls)

    def begin_unattended(self) -> None:
        """Notes that something is expected for which no thread waits."""
        with self._counting:
            self._unattended += 1
        self.poll_now()

    def end_unattended(self, count: int = 1) -> None:
        """Notes that something for which no thread waited has come, or so many."""
        with self._counting:
            self._unattended -= count
            # If it does not read them yet, it will look after `GRACE` whether it has to.
            self.needs_poller = bool(self.queued_bytes) or (self.needs_poller and self._unattended > 0)

    def _unattend(self, pending: PendingCall) -> None:
        with self._counting:
            if pending.unattended:
                pending.unattended = False
                self.end_unattended()

    # -- what comes ----------------------------------------------------------------------------------------------------

    def take_plain(self, found: list[Found]) -> int:
        calls, longest = self.calls, self.max_message
        now = time.monotonic()
        taken = unattended = 0
        counted: str | None = None
        row: list[float] = []
        for kind, number, head, payload, size in found:
            if kind != _RESULT or payload or head is None or size > longest:
                break
            taken += 1
            self._in_hand = calls.get(number)
            pending = calls.pop(number, None)
            if pending is None:  # the call was given up
                continue
            if pending.stream is not None:
                self._end_stream(pending, Frame(_RESULT, number, head, size))
                continue
            name, deadline = pending.name, pending.deadline
            if name is not counted:  # calls under way together are often of one function
                row, counted = CALLS.row(name, self.world_rank), name
            row[0] += 1
            row[2] += now - (deadline.at - deadline.seconds)
            unattended += pending.unattended
            pending.head = head
            pending.done = True
            if pending.on_finish is not None or pending._sleep is not None:
                pending.tell()
        self._in_hand = None
        if unattended:
            self.end_unattended(unattended)
        if self._waiting_for_slot:
            self._free_slot()
        return taken

    def handle(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is _RESULT or kind is _ERROR:
            self._in_hand = self.calls.get(frame.call)
            pending = self.calls.pop(frame.call, None)
            if pending is None:
                return  # the call was given up
            if self._waiting_for_slot:
                self._free_slot()
            if pending.stream is None:
                self._answered(pending, kind is _RESULT)
                pending.frame = frame
                pending.finish()
            else:
                self._end_stream(pending, frame)
            self._in_hand = None
        elif kind is CallKind.STREAM or kind is CallKind.ITEM:
            self._handle_stream(frame)
        elif kind is CallKind.GOODBYE:
            self.end(self._why_closed())
        elif kind is CallKind.LANES and isinstance(self.lanes, CallerLanes):
            self.lanes.handle(frame.call, frame.head)
        else:
            self.end(ProtocolError(f"protocol error: unexpected {kind.name} frame from a server"))

    @staticmethod
    def _end_stream(pending: PendingCall, frame: Frame) -> None:
        stream = None if pending.stream is None else pending.stream()
        if stream is not None:
            stream._end(frame)

    def _handle_stream(self, frame: Frame) -> None:
        pending = self.calls.get(frame.call)
        if pending is None:
            return
        if frame.kind is CallKind.STREAM and pending.stream is None:
            with self._counting:  # its deadline may pass just now: either it is given up before, or it is done
                if frame.call not in self.calls:
                    return
                pending.opened = self._open_stream(self, pending)
                pending.stream = weakref.ref(pending.opened)
                pending.frame = frame
                pending.done = True
            self._answered(pending, True)
            pending.tell()
            if pending.future is not None:
                future = pending.future()
                pending.opened = None if future is None else future.take_stream()
        elif frame.kind is CallKind.ITEM and pending.stream is not None:
            stream = pending.stream()
            if stream is not None and not stream._put(frame):
                self.end(ProtocolError(f"protocol error: more items of call {frame.call} than were asked for"))
        elif frame.kind is CallKind.ITEM:
            self.end(ProtocolError(f"protocol error: item for call {frame.call}, which is not a stream"))
        else:
            self.end(ProtocolError(f"protocol error: the stream of call {frame.call} began twice"))

    def explain(self, error: Exception) -> PhalanxError:
        if isinstance(error, SaidGoodbye):
            return self._why_closed()
        known = isinstance(error, PhalanxError) and not isinstance(error, ProtocolError)
        return error if known else self._why_ended(error)  # type: ignore[return-value]

    def on_end(self, why: PhalanxError) -> None:
        self._forget(self)
        while self.calls:
            try:
                _, pending = self.calls.popitem()
            except KeyError:
                break
            self._fail(pending, why)
        for waiter in tuple(self._waiting_for_slot):
            waiter.wake()

    def _fail(self, pending: PendingCall, why: PhalanxError) -> None:
        """Finishes a call whose link has ended."""
        if pending.stream is None:
            self._answered(pending, False)
            pending.finish(why)
        elif (stream := pending.stream()) is not None:
            stream._fail(why)

    def on_cut_short(self) -> None:
        pending, self._in_hand = self._in_hand, None
        if pending is not None and self.ended is not None and (pending.stream is not None or not pending.done):
            self._fail(pending, self.ended)

    def finish_after_end(self, waiter: Waiter) -> None:
        if self.ended is None or not isinstance(waiter, PendingCall) or not waiter.number:
            super().finish_after_end(waiter)
            return
        self.abandon(waiter, self.ended)  # if it is still on the list
        ends = time.monotonic() + LONGEST_IN_HAND
        while not waiter.done and time.monotonic() < ends:
            time.sleep(SHORT_REST)
        if not waiter.done:
            self._fail(waiter, self.ended)

    def free(self, number: int) -> None:
        """Tells the server that the handle of one of its objects is gone."""
        if self.ended is None:
            self._send_control(CallKind.FREE, 0, encode_value(number, self.limits).head)

    def grant(self, number: int, items: int) -> None:
        """Tells the server that the reader of a stream can take more items."""
        self._send_control(CallKind.CREDIT, number, encode_value(items, self.limits).head)

    def cancel_stream(self, number: int) -> None:
        """Tells the server that the reader of a stream wants no more items."""
        self._withdraw(number)
