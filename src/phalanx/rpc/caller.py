"""The caller's end of a link: calls that wait for their answers."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..deadline import Deadline
from ..errors import (
    Cancelled,
    ChannelClosed,
    FunctionNotFound,
    InvalidArgument,
    InvalidMessage,
    PhalanxError,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    copy_for_raise,
    of_call,
)
from ..transports.stream import Stream
from ..wire.calls import CallKind
from ..wire.codec import Limits
from .context import CallContext, current_call
from .link import QUEUED, Frame, Goal, Link
from .payload import NOT_QUICK, Outgoing, decode_error, encode_value, plan_value, quick_value
from .signature import convert_result

if TYPE_CHECKING:
    from typing_extensions import Self

    from .poller import Service

__all__ = ["CallerLink", "RemoteStream", "RpcFuture"]

GRACE = 1e-3
"""Seconds until the agent's thread reads the answers of calls that were made asynchronously. Who waits for a future
before that reads them itself, which is quicker."""
WINDOW = 16
"""Items of a stream that may be under way before its reader has taken them."""

_ERRORS: dict[str, type[RpcError]] = {
    "not found": FunctionNotFound,
    "argument": InvalidArgument,
    "message": InvalidMessage,
    "cancelled": Cancelled,
}
"""What the server says went wrong, where the function itself did not raise."""


class Pending(Goal):
    """A call that waits for its answer."""

    __slots__ = ("deadline", "error", "frame", "future", "name", "number", "opened", "returns", "stream")

    def __init__(self, name: str, deadline: Deadline, returns: Any) -> None:
        super().__init__()
        self.name = name
        self.deadline = deadline
        self.returns = returns
        self.number = 0
        self.frame: Frame | None = None
        self.error: BaseException | None = None
        self.future: RpcFuture | None = None
        self.stream: weakref.ref[RemoteStream] | None = None
        """Where items go; a stream that nobody holds any more takes none."""
        self.opened: RemoteStream | None = None
        """The same stream, until the caller has it."""

    def finish(self, error: BaseException | None = None) -> None:
        """The answer is there, or will not come."""
        self.error = error
        self.done = True
        future, self.future = self.future, None
        if future is not None:
            future.complete()
        self.wake()


class CallerLink(Link):
    """Sends calls to one rank and gives the answers to whoever waits for them.

    Args:
        members: The world rank of each rank, which errors speak of.
        why: Tells why the connection ended.
        forget: Is told when it has.
    """

    def __init__(
        self,
        stream: Stream,
        peer: int,
        service: Service,
        max_message: int,
        limits: Limits,
        *,
        look: float,
        rank: int,
        world_rank: int,
        max_in_flight: int,
        why: Callable[[Exception], PhalanxError],
        forget: Callable[[CallerLink], None],
    ) -> None:
        super().__init__(stream, peer, max_message, limits, look=look)
        self.watched = False
        self.rank = rank
        self.world_rank = world_rank
        self.service = service
        self._max_in_flight = max_in_flight
        self._why = why
        self._forget = forget
        self._numbers = itertools.count(1)
        self.calls: dict[int, Pending] = {}
        self._unattended = 0
        """Calls for which no thread waits."""
        self._in_grace = False
        """Whether the agent's thread will look soon whether somebody reads the answers."""
        self._sweep_at = float("inf")
        """When somebody looks for calls whose deadline has come."""
        self._places = threading.Condition()
        self._wanting_places = 0

    def needs_mover(self) -> None:
        self.service.watch(self)

    # -- calling -------------------------------------------------------------------------------------------------------

    def call(self, pending: Pending, outgoing: Outgoing) -> Any:
        """Sends a request and waits for its answer in this thread."""
        self.start(pending, outgoing)
        context = current_call()
        if context is not None:
            return self._call_from_handler(pending, context)
        return self.finish(pending)

    def _call_from_handler(self, pending: Pending, context: CallContext) -> Any:
        def give_up() -> None:
            words = f"{pending.name!r} on rank {self.world_rank}: the caller of the handler that called it gave up"
            self._abandon(pending, Cancelled(words))

        context.on_cancel(give_up)
        try:
            with self.service.waits():
                return self.finish(pending)
        finally:
            context.forget(give_up)

    def start(self, pending: Pending, outgoing: Outgoing, *, lent: bool = True) -> None:
        """Sends a request; waits if too many are under way.

        Args:
            lent: Its arrays stay as they are until the call is done. If not, they are the caller's again after this.
        """
        if len(self.calls) >= self._max_in_flight:
            self._wait_for_place(pending)
        pending.number = number = next(self._numbers)
        self.calls[number] = pending
        # A long one is lent in any case: by the time that there is room, little of it is left to be copied.
        is_long = outgoing.payload > QUEUED
        try:
            if not self.send(
                CallKind.REQUEST, number, outgoing.head, outgoing.buffers, outgoing.payload, lent=lent or is_long
            ):
                self._wait_for_room(pending)
                if is_long and not lent:
                    self.take_over(number)
        except BaseException:
            self._withdraw(number)
            raise

    def notify(self, name: str, deadline: Deadline, outgoing: Outgoing) -> None:
        """Sends a request without an answer. Its arrays are the caller's again when this returns."""
        number = next(self._numbers)
        if self.send(CallKind.NOTIFY, number, outgoing.head, outgoing.buffers, outgoing.payload, lent=True):
            return
        if not outgoing.buffers and self.queued <= QUEUED:
            self.needs_mover()
            return
        try:
            self._wait_for_room(Pending(name, deadline, None), 0 if outgoing.buffers else QUEUED)
        except BaseException:
            self.give_up(number)
            raise

    def finish(self, pending: Pending) -> Any:
        """Waits for the answer, and returns or raises what it says."""
        try:
            if not pending.done and not self.wait(pending, pending.deadline):
                self._abandon(pending, self.timed_out(pending))
        except BaseException:  # Ctrl-C: nobody will ever read the answer
            self._abandon(pending, None)
            raise
        return self.result(pending)

    def result(self, pending: Pending) -> Any:
        """What a finished call returns or raises."""
        if pending.error is not None:
            raise of_call(copy_for_raise(pending.error, pending.name, self.rank))
        frame = pending.frame
        assert frame is not None
        if frame.kind is CallKind.RESULT:
            value = self.value(frame)
            return value if pending.returns is None else convert_result(value, pending.returns, pending.name)
        if frame.kind is CallKind.STREAM:
            stream, pending.opened = pending.opened, None
            return stream
        raise self._error_of(frame, pending)

    def value(self, frame: Frame) -> Any:
        """The value in a result or an item.

        Raises:
            InvalidMessage: It is malformed.
        """
        if frame.error is not None:
            raise frame.error
        if frame.plan is not None:
            return frame.build()
        value = quick_value(frame.head)
        return value if value is not NOT_QUICK else plan_value(frame.head, 0, self._limits).build()

    def _error_of(self, frame: Frame, pending: Pending) -> RpcError:
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

    def timed_out(self, pending: Pending) -> RpcTimeout:
        """The error of a call whose deadline has come."""
        return RpcTimeout(
            f"{pending.name!r} on rank {self.world_rank}: no answer within {pending.deadline.seconds:g} s",
            missing=[self.world_rank],
            seconds=pending.deadline.seconds,
            rank=self.rank,
            peer=self.world_rank,
            operation=pending.name,
        )

    def _abandon(self, pending: Pending, error: BaseException | None) -> None:
        """Gives a call up, unless its answer has come: the other side is told, and its memory is the caller's again."""
        if self._withdraw(pending.number):
            pending.finish(error)
            self.wake_mover()  # it may be the very thread that waits for this call

    def _withdraw(self, number: int) -> bool:
        """Nobody waits for this call any more; False if nobody did."""
        if self.calls.pop(number, None) is None:
            return False
        self._freed()
        if self.ended is None and not self.give_up(number):
            self._tell(CallKind.CANCEL, number)
        return True

    def _tell(self, kind: CallKind, number: int, head: bytes = b"") -> None:
        try:
            sent = self.send(kind, number, head)
        except PhalanxError:
            return
        if not sent:
            self.needs_mover()

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _wait_for_place(self, pending: Pending) -> None:
        with self.service.waits(), self._places:
            self._wanting_places += 1
            try:
                while len(self.calls) >= self._max_in_flight and self.ended is None:
                    if not self._places.wait(min(pending.deadline.remaining(), 0.1)) and pending.deadline.expired:
                        raise self.timed_out(pending)
            finally:
                self._wanting_places -= 1

    def _freed(self) -> None:
        if self._wanting_places:
            with self._places:
                self._places.notify()

    def _wait_for_room(self, pending: Pending, allowed: int = QUEUED) -> None:
        """Waits until no more than so many bytes are queued."""
        goal = _Room(self, allowed)
        if goal.done and self.ended is None:
            return
        with self.service.waits():
            if not self.wait(goal, pending.deadline):
                raise self.timed_out(pending)
        if self.ended is not None:
            raise copy_for_raise(self.ended, pending.name, self.rank)

    @property
    def is_full(self) -> bool:
        """Whether another call has to wait before it is sent."""
        return len(self.calls) >= self._max_in_flight or self.queued > QUEUED

    # -- for calls that nobody waits for -------------------------------------------------------------------------------

    def start_unattended(self, pending: Pending, outgoing: Outgoing) -> None:
        """Sends a request whose answer comes to its future: the agent's thread sees to it, and to the deadline."""
        with self._places:
            self._unattended += 1
        try:
            self.start(pending, outgoing, lent=False)
        except BaseException:
            if not pending.done:
                self.attended()
            raise
        if not self.watched and not self._in_grace:
            self._in_grace = True
            self.service.call_at(time.monotonic() + GRACE, self._attend)
        if pending.deadline.at < self._sweep_at:
            self._sweep_at = pending.deadline.at
            self.service.call_at(self._sweep_at, self._sweep)

    def _attend(self) -> None:
        """Whoever made calls without waiting had a moment to do so: now the agent's thread reads the answers."""
        self._in_grace = False
        if not self._unattended or self.watched:
            return
        if self.moving.locked() or time.monotonic() - self.driven < GRACE:
            self._in_grace = True
            self.service.call_at(time.monotonic() + GRACE, self._attend)
        else:
            self.attend_now()

    def attend_now(self) -> None:
        """Somebody will not wait in a thread of its own."""
        if not self.watched:
            self.watched = True
            self.service.watch(self)

    def _sweep(self) -> None:
        """Ends the calls whose deadline has come, and looks again when the next one's has."""
        now = time.monotonic()
        self._sweep_at = float("inf")
        for pending in list(self.calls.values()):
            if pending.future is None:
                continue
            if pending.deadline.at <= now:
                self._abandon(pending, self.timed_out(pending))
            else:
                self._sweep_at = min(self._sweep_at, pending.deadline.at)
        if self._sweep_at < float("inf"):
            self.service.call_at(self._sweep_at, self._sweep)

    def unattended(self) -> None:
        """Something shall come for which no thread waits."""
        with self._places:
            self._unattended += 1
        self.attend_now()

    def attended(self) -> None:
        """A call that was left to the agent's thread is done."""
        with self._places:
            self._unattended -= 1
            self.watched = self._unattended > 0 or bool(self.queued)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def handle(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is CallKind.RESULT or kind is CallKind.ERROR:
            pending = self.calls.pop(frame.call, None)
            if pending is None:
                return  # it was given up
            self._freed()
            if pending.stream is None:
                pending.frame = frame
                pending.finish()
            elif (stream := pending.stream()) is not None:
                stream.end(frame)
        elif kind is CallKind.STREAM or kind is CallKind.ITEM:
            self._handle_stream(frame)
        elif kind is CallKind.GOODBYE:
            self.over(ChannelClosed(self.world_rank, "it has closed its agent"))
        else:
            self.over(ProtocolError(f"{kind.name} came to the calling side"))

    def _handle_stream(self, frame: Frame) -> None:
        pending = self.calls.get(frame.call)
        if pending is None:
            return
        if frame.kind is CallKind.STREAM and pending.stream is None:
            pending.opened = RemoteStream(self, pending)
            pending.stream = weakref.ref(pending.opened)
            pending.frame = frame
            pending.finish()
        elif frame.kind is CallKind.ITEM and pending.stream is not None:
            stream = pending.stream()
            if stream is not None and not stream.put(frame):
                self.over(ProtocolError("more items of a stream came than were asked for"))
        else:
            self.over(ProtocolError("an item came of what is no stream, or a stream began twice"))

    def explain(self, error: Exception) -> PhalanxError:
        known = isinstance(error, PhalanxError) and not isinstance(error, ProtocolError)
        return error if known else self._why(error)  # type: ignore[return-value]

    def on_end(self, why: PhalanxError) -> None:
        self._forget(self)
        while self.calls:
            try:
                _, pending = self.calls.popitem()
            except KeyError:
                break
            if pending.stream is None:
                pending.finish(why)
            elif (stream := pending.stream()) is not None:
                stream.fail(why)
        with self._places:
            self._places.notify_all()

    def free(self, number: int) -> None:
        """The handle of an object on the other side is gone."""
        if self.ended is None:
            self._tell(CallKind.FREE, 0, encode_value(number, self._limits).head)

    def grant(self, number: int, items: int) -> None:
        """The reader of a stream can take more."""
        self._tell(CallKind.CREDIT, number, encode_value(items, self._limits).head)

    def close_stream_of(self, number: int) -> None:
        """The reader of a stream wants no more."""
        self._withdraw(number)


class _Room(Goal):
    """Done once no more than so many bytes of a link are queued."""

    __slots__ = ("_allowed", "_link")

    def __init__(self, link: Link, allowed: int) -> None:
        self._link = link
        self._allowed = allowed
        self._sleep = None

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self._link.queued <= self._allowed or self._link.ended is not None


class RpcFuture(concurrent.futures.Future[Any]):
    """The answer of a call that was made by `call_async`. `cancel` tells the other side, too."""

    def __init__(self, link: CallerLink, pending: Pending) -> None:
        super().__init__()
        self._link = link
        self._call = pending

    def result(self, timeout: float | None = None) -> Any:
        """What the call returned; waits for it."""
        self._wait(timeout)
        return super().result(self._rest(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised; waits for it."""
        self._wait(timeout)
        return super().exception(self._rest(timeout))

    def _wait(self, timeout: float | None) -> None:
        """Reads the answer in this thread, unless another does."""
        link, call = self._link, self._call
        if call.done or self.done():
            return
        deadline = call.deadline if timeout is None else call.deadline.sooner(timeout)
        with link.service.waits():
            done = link.wait(call, deadline)
        if not done and call.deadline.expired:
            link._abandon(call, link.timed_out(call))

    def _rest(self, timeout: float | None) -> float | None:
        """How long to wait yet: if the answer has come, or its time is over, until the thread that saw it says so."""
        return None if timeout is None or self._call.done or self._call.deadline.expired else 0

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Runs `fn(self)` once it is done, in a thread of the agent's."""
        super().add_done_callback(fn)
        if not self.done():
            self._link.attend_now()

    def cancel(self) -> bool:
        """Gives the call up; False if it is done. Work that has not begun on the other side is not begun."""
        if not super().cancel():
            return False
        self._link._abandon(self._call, None)
        return True

    def complete(self) -> None:
        """The answer is there."""
        if self.cancelled():
            self._link.attended()
            return
        try:
            value = self._link.result(self._call)
        except BaseException as error:
            self._settle(None, error)
            if not isinstance(error, Exception):  # Ctrl-C, perhaps: this thread hears of it, too
                raise
        else:
            self._settle(value, None)
        finally:
            self._call.frame = None  # it may be long, and the future may be kept
            self._link.attended()

    def _settle(self, value: Any, error: BaseException | None) -> None:
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        except concurrent.futures.InvalidStateError:  # cancelled just now
            pass

    def _invoke_callbacks(self) -> None:
        # Callbacks may do anything, call this rank again for one: not in the middle of moving the link's bytes.
        if not self._done_callbacks:  # type: ignore[attr-defined]
            return
        if self._link.ended is None:
            self._link.service.later(super()._invoke_callbacks)  # type: ignore[misc]
        else:  # perhaps the agent is closed, and nobody would run them
            super()._invoke_callbacks()  # type: ignore[misc]


def _close_stream(link: weakref.ref[CallerLink], number: int) -> None:
    known = link()
    if known is not None:
        known.close_stream_of(number)


class RemoteStream:
    """The items that a generator on another rank yields, as they come.

    An iterator, also an asynchronous one. The other side runs ahead by a few items, never more. Each item has the
    call's timeout for itself. `close` (or leaving a `with` block, or dropping it) ends the generator there.
    """

    def __init__(self, link: CallerLink, pending: Pending) -> None:
        self._link = link
        self._number = pending.number
        self._name = pending.name
        self._seconds = pending.deadline.seconds
        self._items: deque[Frame] = deque()
        self._taken = 0
        self._last: Frame | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._goal: Goal | None = None
        self._future: concurrent.futures.Future[None] | None = None
        # Weakly: the link may hold this stream, as an answer that nobody took, and would keep itself alive.
        dropped = functools.partial(_close_stream, weakref.ref(link), pending.number)
        weakref.finalize(self, link.service.later, dropped).atexit = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        deadline = Deadline(self._seconds)
        while not self._ready():
            goal = self._goal = Pending(self._name, deadline, None)
            if self._ready():
                break
            with self._link.service.waits():
                if not self._link.wait(goal, deadline):
                    self.close()
                    raise self._link.timed_out(goal)
        return self._next(StopIteration)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        import asyncio

        while not self._ready():
            self._future = concurrent.futures.Future()
            self._link.unattended()
            if self._ready():
                break
            try:
                await asyncio.wait_for(asyncio.wrap_future(self._future), self._seconds)
            except asyncio.TimeoutError:
                self.close()
                raise self._link.timed_out(Pending(self._name, Deadline(self._seconds), None)) from None
        return self._next(StopAsyncIteration)

    def close(self) -> None:
        """Wants no more items. Another thread that waits for one is woken."""
        self._closed = True
        self._link.close_stream_of(self._number)
        self._tell()
        self._link.wake_mover()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ready(self) -> bool:
        return bool(self._items) or self._last is not None or self._error is not None or self._closed

    def _next(self, stop: type[Exception]) -> Any:
        if self._closed:
            raise stop
        if self._items:
            frame = self._items.popleft()
            self._taken += 1
            if self._taken >= WINDOW // 2 and self._last is None and self._error is None:
                self._link.grant(self._number, self._taken)
                self._taken = 0
            return self._link.value(frame)
        if self._error is not None:
            raise of_call(copy_for_raise(self._error, self._name, self._link.rank))
        last = self._last
        assert last is not None
        if last.kind is CallKind.ERROR:
            raise self._link._error_of(last, Pending(self._name, Deadline(self._seconds), None))
        raise stop

    # -- called by whoever moves the link ------------------------------------------------------------------------------

    def put(self, frame: Frame) -> bool:
        """An item has come; False if nobody asked for so many."""
        if len(self._items) >= 2 * WINDOW:  # what is taken is granted again before that is noted here
            return False
        self._items.append(frame)
        self._tell()
        return True

    def end(self, frame: Frame) -> None:
        """The last word."""
        self._last = frame
        self._tell()

    def fail(self, error: BaseException) -> None:
        """No more will come."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        goal, future = self._goal, self._future
        if goal is not None:
            goal.done = True
            goal.wake()
        if future is not None:
            self._future = None
            self._link.attended()
            if not future.done():
                future.set_result(None)
