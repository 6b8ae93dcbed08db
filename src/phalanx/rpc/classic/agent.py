"""Remote calls on the classic wire, which a rank written in Rust understands: bytes in, bytes out.

Requests and responses of both roles come on one ordered stream of messages per pair of ranks, the backend's own. One
thread per agent moves them, reads them and settles the calls; handlers run on a bounded pool. The receiving thread
never sends, because to send may mean to connect first, and meanwhile no answer could come.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from ...backends import Backend, SubBackend
from ...backends.base import LaneBackend
from ...backends.lane import Lane
from ...backends.plain import AdaptedBackend, as_lane_backend
from ...backends.polling import sleep
from ...backends.raw_messages import bytes_of
from ...deadline import Deadline
from ...errors import (
    Cancelled,
    Closed,
    FunctionNotFound,
    InvalidMessage,
    InvalidRank,
    NoConnection,
    PhalanxError,
    RemoteError,
    RpcTimeout,
    UnsupportedArray,
    UsageError,
    copy_for_raise,
    of_call,
)
from ...exception_text import message_of, type_name
from ...group import Group
from ...transports.channel import OutgoingFrame
from ...transports.mailbox import Envelope, PendingTransfer, Receive, Sink
from ...transports.waker import Waker
from ...wire.classic import calls as wire
from ...wire.classic.calls import CallRequest, CallResponse
from ...wire.frames import FrameKind

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ClassicAgent"]

logger = logging.getLogger("phalanx.rpc")


class FunctionNotRegistered(FunctionNotFound, RemoteError):
    """The other rank says that it has no function of that name.

    Also a `RemoteError`: this wire has one kind of error, a text, and programs written to it catch that type.
    """


Handler = Callable[[bytes], bytes]
Item = TypeVar("Item")

STOP_WAIT = 5.0
"""Seconds that closing waits for handlers that run, and for answers that are not sent yet."""


# -- threads for handlers ----------------------------------------------------------------------------------------------


class _Pool(Generic[Item]):
    """Threads that run handlers: at most `workers` at a time, not counting those that wait for a call of their own.

    If a handler that waits kept its place, calls that go back and forth between two ranks could take all places of
    both, and each would wait for the other for ever.

    Args:
        run: Is called with each item, and raises nothing.
        limit: Items taken and not yet done, which also bounds the threads; None for any number.
    """

    def __init__(self, run: Callable[[Item], None], workers: int, limit: int | None) -> None:
        self._run = run
        self._workers = workers
        self._limit = limit
        self._changed = threading.Condition(threading.RLock())
        self._items: deque[Item] = deque()
        self._unfinished = 0
        self._running = 0
        """Threads with a place: those that run a handler or are about to."""
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._mine = threading.local()

    def submit(self, item: Item) -> bool:
        """Has an item run soon; False if there are too many, or the pool is closed."""
        with self._changed:
            if self._closed or (self._limit is not None and self._unfinished >= self._limit):
                return False
            self._items.append(item)
            self._unfinished += 1
            self._give_place()
        return True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait: a thread of the pool gives its place away meanwhile. Afterwards there may be one too many."""
        if not getattr(self._mine, "running", False):
            yield
            return
        with self._changed:
            self._running -= 1
            self._give_place()
        try:
            yield
        finally:
            with self._changed:
                self._running += 1

    def close(self) -> list[Item]:
        """Takes nothing more and lets the threads end; returns what had not begun."""
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
        return left

    def join(self, deadline: Deadline) -> None:
        """Waits until the threads have ended."""
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(deadline.remaining())

    def _give_place(self) -> None:
        """Sees that somebody takes the next item, if a place is free. Called with the lock held."""
        if not self._items or self._running >= self._workers:
            return
        if self._idle:
            self._idle -= 1
            self._changed.notify()
        else:
            thread = threading.Thread(target=self._work, name="phalanx-calls", daemon=True)
            thread.start()
            # Those that had nothing to do are gone; none takes itself out, so that `join` sees it really end.
            self._threads = {thread, *(other for other in self._threads if other.is_alive())}
        self._running += 1

    def _work(self) -> None:
        """The life of a thread, which begins with a place."""
        self._mine.running = True
        while (item := self._next()) is not None:
            self._run(item[0])
            del item  # it must not be kept until the next one comes
            with self._changed:
                self._unfinished -= 1

    def _next(self) -> tuple[Item] | None:
        with self._changed:
            while not self._closed:
                if self._items and self._running <= self._workers:
                    return (self._items.popleft(),)
                self._running -= 1
                if self._idle >= self._workers:
                    break
                self._idle += 1
                self._changed.wait()  # whoever notifies has given it a place, or has closed
            return None


# -- what comes and goes -----------------------------------------------------------------------------------------------


class _Sink(Sink):
    """Memory for a message of any length that is allowed."""

    def __init__(self) -> None:
        self.data = memoryview(b"")
        self.refused: InvalidMessage | None = None

    def open(self, envelope: Envelope) -> memoryview:
        self._check(envelope.size)
        try:
            self.data = np.empty(envelope.size, np.uint8).data
        except MemoryError:
            self.refused = InvalidMessage(f"there is no memory for a message of {envelope.size} bytes")
            raise self.refused from None
        return self.data

    def take(self, envelope: Envelope, payload: memoryview) -> None:
        self._check(envelope.size)
        self.data = payload  # it has memory of its own that nobody else needs

    def _check(self, size: int) -> None:
        if size > wire.MAX_REMOTE_CALL:
            limit = wire.MAX_REMOTE_CALL
            self.refused = InvalidMessage(f"a message of {size} bytes is too large (at most {limit} are allowed)")
            raise self.refused


class _Link:
    """A peer. `rank` is its rank of the backend, `lane_rank` of the lane."""

    def __init__(self, rank: int, lane_rank: int) -> None:
        self.rank = rank
        self.lane_rank = lane_rank
        self.sending = threading.RLock()
        """Held while a message is queued: nothing may come between the two messages of a response."""
        self.posting = threading.RLock()
        """Held while a receive is posted."""
        self.receive: Receive | None = None
        self.announced: int | None = None
        """Bytes of the response that must come next. Only the agent's thread uses this and the next."""
        self.warned = False
        self.error: BaseException | None = None
        """Why nothing more can be sent to it or come from it."""


class _Call(concurrent.futures.Future[bytes]):
    """A call under way. Whoever takes it from the agent's table settles it, so that is done once."""

    def __init__(self, calls: _Calls, agent: ClassicAgent, dst: int, name: str, deadline: Deadline) -> None:
        super().__init__()
        self._calls = calls
        self._agent = agent  # whoever waits for an answer may hold nothing else of it
        self.dst = dst
        self.name = name
        self.deadline = deadline
        self.id = 0
        self.operation: PendingTransfer | None = None

    def result(self, timeout: float | None = None) -> bytes:
        with self._calls._waiting_for(self):
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._calls._waiting_for(self):
            return super().exception(timeout)

    def cancel(self) -> bool:
        """Gives the call up; its answer, if one comes, is dropped. False if it is done."""
        if self._calls._forget(self):
            super().cancel()
            self.set_running_or_notify_cancel()
        return self.cancelled()

    def __str__(self) -> str:
        return f"call of {self.name!r} on rank {self.dst}"


Came = memoryview | bytes | BaseException
"""A message, why it was refused, or why no more will come."""
Job = tuple[_Link, CallRequest, Handler]

_served: weakref.WeakSet[Lane] = weakref.WeakSet()
"""Lanes that belong to an agent: two would take each other's messages."""


def _stream_of(backend: LaneBackend) -> tuple[Lane, list[int], bool]:
    """The lane of a backend's own messages, the rank in it of each of the backend's ranks, and whether to close it."""
    ranks = list(range(backend.world_size))
    if isinstance(backend, AdaptedBackend):  # its threads live as long as it has lanes
        return backend.open_lane(backend.next_context("classic-calls"), 0, ranks), ranks, True
    while isinstance(backend, SubBackend) and backend._share_stream:
        ranks = [backend.to_global(rank) for rank in ranks]
        backend = backend._lanes_of
    return backend.raw_messages().lane, ranks, False


# -- what an agent runs on ---------------------------------------------------------------------------------------------


class _Functions(dict[str, Handler]):
    """What can be called here. Only the agent holds it: a handler mostly refers to its agent."""


class _Calls:
    """The calls of an agent in both directions. Its threads hold this, and not the agent, which may be dropped."""

    def __init__(
        self, backend: LaneBackend, functions: _Functions, workers: int, max_queue: int, timeout: float
    ) -> None:
        self._backend = backend
        self._timeout = timeout
        self._max_queue = max_queue
        self._functions = weakref.ref(functions)

        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._last_id = 0
        self._pending: dict[tuple[int, int], _Call] = {}
        """By rank and id."""
        self._timed: list[tuple[float, int, int]] = []
        """A heap of the calls that nobody may be waiting for: the end of their time, id and rank."""
        self._unsent: list[tuple[PendingTransfer, _Call | None]] = []
        self._inbox: deque[tuple[_Link, Came]] = deque()
        self._closed = False
        self._stopping = False
        self._dropped = False

        self._lane, lane_ranks, self._owns_lane = _stream_of(self._backend)
        if self._lane in _served:
            raise UsageError(f"rank {self.rank} has an agent on this backend already (close it first)")
        _served.add(self._lane)
        self._links = [_Link(rank, lane_rank) for rank, lane_rank in enumerate(lane_ranks)]
        self._handlers: _Pool[Job] = _Pool(self._serve, workers, workers + max_queue)
        self._short_answers: _Pool[tuple[_Link, CallResponse]] = _Pool(lambda item: self._answer(*item), 1, None)
        self._waker = Waker()
        self._lane.add_sleeper(self._waker)
        self._thread = threading.Thread(target=self._run, name="phalanx-agent", daemon=True)
        for link in self._links:
            if link.rank != self.rank:
                try:
                    self._listen(link)
                except NoConnection as error:  # between two workers of the star
                    link.error = error
        self._thread.start()

    def drop(self) -> None:
        """The agent was collected without having been closed: has the own thread close this.

        That comes in any thread, also in the middle of a lock that `close` needs: so it takes none.
        """
        self._dropped = True
        self._waker.set()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._backend.world_size

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, agent: ClassicAgent, dst: int, name: str, payload: Any, timeout: float | None) -> bytes:
        """See `ClassicAgent.call`."""
        if threading.current_thread() is self._thread:
            raise UsageError(
                "a callback of a call cannot make another and wait for it, because it holds up the answers"
            )
        call = self._start(agent, dst, name, payload, timeout)
        try:
            call.exception(call.deadline.remaining())
        except concurrent.futures.TimeoutError:
            self._expire(call)
        except BaseException:  # Ctrl-C: nobody will ask for the answer
            self._forget(call)
            raise
        return call.result()

    def call_async(self, agent: ClassicAgent, dst: int, name: str, payload: Any, timeout: float | None) -> _Call:
        """See `ClassicAgent.call_async`."""
        call = self._start(agent, dst, name, payload, timeout)
        with self._lock:
            if (dst, call.id) in self._pending:
                if len(self._timed) > 2 * len(self._pending) + 64:  # most are done and wait only for their time
                    self._timed = [entry for entry in self._timed if (entry[2], entry[1]) in self._pending]
                    heapq.heapify(self._timed)
                heapq.heappush(self._timed, (call.deadline.at, call.id, dst))
                if self._timed[0][1] == call.id:  # sooner than what the thread sleeps for
                    self._waker.set()
        return call

    def _start(self, agent: ClassicAgent, dst: int, name: str, payload: Any, timeout: float | None) -> _Call:
        self._check_open()
        if not isinstance(dst, int) or not 0 <= dst < self.world_size:
            raise InvalidRank(dst, self.world_size)
        data = bytes_of(payload, writable=False)
        link = self._links[dst]
        call = _Call(self, agent, dst, name, Deadline(self._timeout if timeout is None else timeout))
        if not link.sending.acquire(timeout=call.deadline.remaining()):
            call.set_exception(self._too_late(call))
            return call
        try:
            with self._lock:
                call.id = self._last_id = next(self._ids)
            message = wire.pack_request(CallRequest(call.id, name, data))
            with self._lock:
                self._check_open()
                self._pending[dst, call.id] = call
                lost = link.error
            if lost is not None:
                self._fail(call, lost)
            else:
                self._send(link, [message], call.deadline, call)
        except PhalanxError as error:
            if not self._forget(call):  # it was never there: the arguments are to blame
                raise
            call.set_exception(of_call(error))
        except BaseException:
            self._forget(call)
            raise
        finally:
            link.sending.release()
        return call

    def _check_open(self) -> None:
        self._backend.check_usable()
        if self._closed:
            raise Closed("this ClassicAgent was closed", rank=self._world_rank)

    @contextlib.contextmanager
    def _waiting_for(self, call: _Call) -> Iterator[None]:
        if call.done():
            yield
        elif threading.current_thread() is self._thread:
            raise UsageError(f"{call}: a callback of a call cannot wait for it, because it holds up the answers")
        else:
            with self._handlers.waiting():
                yield

    # -- ends of calls -------------------------------------------------------------------------------------------------

    def _forget(self, call: _Call) -> bool:
        """Takes a call from the table; False if another did, who settles it."""
        with self._lock:
            found = self._pending.pop((call.dst, call.id), None) is not None
        operation = call.operation
        if found and isinstance(operation, OutgoingFrame) and not operation.done:
            # What has begun must go on: a message that is cut short would end the connection.
            with operation.channel.lock:
                if not operation.begun and not operation.done:
                    self._lane.withdraw(operation)
        return found

    def _fail(self, call: _Call, error: BaseException) -> None:
        if self._forget(call):
            call.set_exception(of_call(copy_for_raise(error, str(call), self._world_rank)))

    def _expire(self, call: _Call) -> None:
        if self._forget(call):
            call.set_exception(self._too_late(call))

    def _too_late(self, call: _Call) -> RpcTimeout:
        peer = self._backend.world_ranks[call.dst]
        text = f"{call}: no answer within {call.deadline.seconds:g} s"
        seconds = call.deadline.seconds
        return RpcTimeout(text, missing=[peer], seconds=seconds, rank=self._world_rank, peer=peer, operation=str(call))

    def _fail_all(self, error: Callable[[_Call], BaseException]) -> None:
        with self._lock:
            calls = list(self._pending.values())
            self._timed.clear()
        for call in calls:
            self._fail(call, error(call))

    def _lost(self, link: _Link, error: BaseException) -> None:
        with self._lock:
            link.error = error
            calls = [call for call in self._pending.values() if call.dst == link.rank]
        for call in calls:
            self._fail(call, error)

    @property
    def _world_rank(self) -> int:
        return self._backend.world_ranks[self.rank]

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, link: _Link, messages: Sequence[bytes], deadline: Deadline, call: _Call | None = None) -> None:
        """Queues messages, one right after the other. Called with `link.sending` held, and never by the own thread."""
        for message in messages:
            if link.rank == self.rank:
                self._inbox.append((link, message))
                self._waker.set()
                continue
            operation = self._lane.start_send(link.lane_rank, FrameKind.RAW, 0, b"", [message], deadline)
            if call is not None:
                call.operation = operation
            if operation.error is not None:
                if call is not None:
                    self._fail(call, operation.error)
                return
            if not operation.done:
                with self._lock:
                    self._unsent.append((operation, call))
                operation.add_waker(self._waker)
                self._waker.set()

    def _answer(self, link: _Link, response: CallResponse) -> None:
        try:
            try:
                message = wire.pack_response(response)
            except InvalidMessage as error:  # the result is too large
                message = wire.pack_response(CallResponse(response.id, True, str(error).encode()))
            deadline = Deadline(self._backend.timeout)
            if link.error is None and link.sending.acquire(timeout=deadline.remaining()):
                try:
                    self._send(link, [wire.pack_response_length(len(message)), message], deadline)
                finally:
                    link.sending.release()
        except Exception as error:  # whoever asked is gone; others may ask
            logger.debug("rank %d: no answer to rank %d: %s", self.rank, link.rank, error)

    # -- serving -------------------------------------------------------------------------------------------------------

    def _accept(self, link: _Link, request: CallRequest) -> None:
        """A request has come."""
        functions = self._functions()
        function = None if functions is None else functions.get(request.name)
        if functions is None:
            self._refuse(link, request, self._busy())
        elif function is None:
            self._refuse(link, request, wire.not_registered(request.name, self.rank))
        elif not self._handlers.submit((link, request, function)):
            self._refuse(link, request, self._busy())

    def _busy(self) -> str:
        if self._closed or self._dropped:
            return f"rank {self.rank} serves no more calls"
        return f"rank {self.rank} has too many calls waiting (max_queue is {self._max_queue})"

    def _refuse(self, link: _Link, request: CallRequest, text: str) -> None:
        self._short_answers.submit((link, CallResponse(request.id, True, text.encode())))

    def _serve(self, job: Job) -> None:
        """Runs a handler and sends its answer; in a thread of the pool."""
        link, request, function = job
        try:
            result = function(bytes(request.payload))
            try:
                response = CallResponse(request.id, False, bytes(bytes_of(result, writable=False)))
            except UnsupportedArray:
                raise TypeError(
                    f"function '{request.name}' returned {type(result).__name__} (expected bytes)"
                ) from None
        except BaseException as error:  # also SystemExit: a call must not end the thread
            logger.debug("rank %d: function %r failed", self.rank, request.name, exc_info=True)
            text = message_of(error) or type_name(error)
            response = CallResponse(request.id, True, text.encode())
        self._answer(link, response)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _listen(self, link: _Link) -> None:
        """Has a receive posted at all times: a message that finds none would be stored unchecked."""
        while True:
            sink = _Sink()
            with link.posting:
                if self._stopping:
                    return
                receive = link.receive = self._lane.post(link.lane_rank, 0, sink)
            if not receive.done:
                receive.on_done(functools.partial(self._came, link, receive, sink))
                return
            if not self._keep(link, receive, sink):
                return

    def _came(self, link: _Link, receive: Receive, sink: _Sink) -> None:
        """A receive is done; in whichever thread moved the bytes."""
        if self._keep(link, receive, sink):
            self._listen(link)

    def _keep(self, link: _Link, receive: Receive, sink: _Sink) -> bool:
        """Hands what came to the own thread; False if no more will come."""
        refused = receive.error is not None and receive.error is sink.refused
        self._inbox.append((link, sink.data if receive.error is None else receive.error))
        if threading.current_thread() is not self._thread:
            self._waker.set()
        return receive.error is None or refused

    def _run(self) -> None:
        """The life of the own thread: until the agent or its lane ends."""
        error: BaseException | None = None
        try:
            while not self._stopping and self._lane.error is None:
                self._turn()
            error = self._lane.error
        except BaseException as failure:
            logger.exception("rank %d: the agent has failed", self.rank)
            error = failure
        if not self._stopping:  # the backend was closed, or the world is broken
            cause = error or Closed("this agent has ended")
            with self._lock:
                for link in self._links:
                    link.error = link.error or cause
            self._fail_all(lambda call: cause)
            self._release()

    def _turn(self) -> None:
        self._waker.clear()
        if self._dropped:
            self.close()
        if self._stopping:  # said just before: `clear` has forgotten the word
            return
        for _ in range(len(self._inbox)):
            self._handle(*self._inbox.popleft())
        until = self._look_at_calls()
        with self._lock:
            sends = [operation for operation, _ in self._unsent]
        receives = [link.receive for link in self._links if link.receive is not None and link.error is None]
        polled = self._lane.drive([*receives, *sends])
        if polled is not None and not self._inbox:
            sleep(self._waker, polled, until)

    def _look_at_calls(self) -> Deadline:
        """Fails the calls whose request cannot be sent or whose time is over; returns when to look again."""
        with self._lock:
            done = [(operation, call) for operation, call in self._unsent if operation.done]
            self._unsent = [pair for pair in self._unsent if not pair[0].done and not pair[0].withdrawn]
            now = time.monotonic()
            expired: list[_Call | None] = []
            while self._timed and self._timed[0][0] <= now:
                _, number, dst = heapq.heappop(self._timed)
                expired.append(self._pending.get((dst, number)))
            until = Deadline(self._timed[0][0] - now) if self._timed else _NEVER
        for operation, call in done:
            if operation.error is not None and call is not None:
                self._fail(call, operation.error)
        for call in filter(None, expired):
            self._expire(call)
        return until

    def _handle(self, link: _Link, came: Came) -> None:
        if isinstance(came, InvalidMessage):
            self._complain(link, came)
        elif isinstance(came, BaseException):
            self._lost(link, came)
        else:
            try:
                self._read(link, came)
            except InvalidMessage as error:
                self._complain(link, error)
                self._blame(link, came, error)
            except Exception:  # such as no more threads: the next message may fare better
                logger.exception("rank %d: a message of rank %d is lost", self.rank, link.rank)

    def _read(self, link: _Link, message: memoryview | bytes) -> None:
        """Does what a message says.

        Raises:
            InvalidMessage: It cannot be read, or does not belong here.
        """
        announced, link.announced = link.announced, None
        kind = wire.kind_of(message)
        if kind is wire.MessageKind.RESPONSE:
            if announced is None:
                raise InvalidMessage("a response came without a message with its length before it")
            if announced != len(message):
                raise InvalidMessage(f"a response has {len(message)} bytes ({announced} were announced)")
            self._settle(link, wire.parse_response(message))
            return
        if announced is not None:  # what came instead may be all right
            self._complain(link, InvalidMessage(f"a response of {announced} bytes was announced and did not come"))
        if kind is wire.MessageKind.LENGTH:
            length = wire.parse_response_length(message)
            if length < wire.MIN_RESPONSE:
                raise InvalidMessage(f"the length of a response is {length} (expected at least {wire.MIN_RESPONSE})")
            link.announced = length
        else:
            self._accept(link, wire.parse_request(message))

    def _settle(self, link: _Link, response: CallResponse) -> None:
        with self._lock:
            call = self._pending.get((link.rank, response.id))
            known = 1 <= response.id <= self._last_id
        if call is None:
            if not known:
                raise InvalidMessage(f"a response answers call {response.id}, which was never made")
            return  # too late
        if not self._forget(call):
            return
        if response.error:
            peer = self._backend.world_ranks[link.rank]
            text = response.data.decode()
            kind = FunctionNotRegistered if wire.says_not_registered(text, call.name) else RemoteError
            call.set_exception(kind(text, peer=peer, operation=str(call)))
        else:
            call.set_result(response.data)

    def _blame(self, link: _Link, message: memoryview | bytes, error: InvalidMessage) -> None:
        """Fails the call whose answer cannot be read, if it can be told which it is."""
        answered = wire.response_id(message)
        with self._lock:
            call = None if answered is None else self._pending.get((link.rank, answered))
        if call is not None and self._forget(call):
            peer = self._backend.world_ranks[link.rank]
            text = f"{call}: the answer cannot be read: {error}"
            call.set_exception(InvalidMessage(text, rank=self._world_rank, peer=peer, operation=str(call)))

    def _complain(self, link: _Link, error: InvalidMessage) -> None:
        level = logging.DEBUG if link.warned else logging.WARNING
        link.warned = True
        text = "rank %d: dropped a message of rank %d that is no remote call (more of them are logged as debug): %s"
        logger.log(level, text, self.rank, link.rank, error)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends what the agent does. May be called twice."""
        if self._backend.forked:
            return  # the locks may be held by threads that exist only in the parent
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        deadline = Deadline(STOP_WAIT)
        try:
            self._fail_all(self._cancelled)
            for link, request, _ in self._handlers.close():
                self._refuse(link, request, self._busy())
            self._handlers.join(deadline)
            self._flush(deadline)
        finally:  # also after Ctrl-C: there will be no second try
            self._stop()

    def _cancelled(self, call: _Call) -> Cancelled:
        peer = self._backend.world_ranks[call.dst]
        return Cancelled(f"{call}: this agent was closed", rank=self._world_rank, peer=peer, operation=str(call))

    def _flush(self, deadline: Deadline) -> None:
        """Sends the answers that are ready."""
        for item in self._short_answers.close():
            self._answer(*item)
        self._short_answers.join(deadline)
        while not deadline.expired:
            with self._lock:
                unsent = [op for op, _ in self._unsent if not op.done and not op.withdrawn]
            if not unsent:
                return
            self._lane.wait(unsent, deadline)

    def _stop(self) -> None:
        self._stopping = True
        self._waker.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_WAIT)
        for link in self._links:
            with link.posting:
                receive = link.receive
            if receive is not None:
                self._lane.withdraw(receive)  # its message, if one is on its way, is for the next receive
        self._release()

    def _release(self) -> None:
        """Gives the lane back and lets the threads of the pools end."""
        self._handlers.close()
        self._short_answers.close()
        self._lane.remove_sleeper(self._waker)
        _served.discard(self._lane)
        if self._owns_lane:
            self._lane.close()


# -- the agent ---------------------------------------------------------------------------------------------------------


class ClassicAgent:
    """Calls functions of other ranks and serves their calls, on the classic wire. It serves as soon as it is made.

    Until it is closed the backend's own messages belong to it: `send`, `recv` and `barrier` of the backend must rest,
    while groups and sub-groups on it have streams of their own. On a backend that you wrote, the other ranks must run
    Phalanx, too: a message there cannot be received without being told its length first.

    Ranks are those of the backend; errors carry ranks of the world, as everywhere.

    Args:
        backend: A backend, or a group, whose backend is used.
        workers: Handlers that run at the same time. One that waits for a call of its own does not count.
        max_queue: Requests that may wait for a worker or for calls of their own; more are answered with an error.
        timeout: The default of every call, in seconds; unset means the backend's.
        functions: Registered before the first request is read.

    Raises:
        UsageError: A number is too small, or the backend has an agent already.
        Closed: The backend is closed.
    """

    def __init__(
        self,
        backend: Backend | Group,
        *,
        workers: int = 4,
        max_queue: int = 256,
        timeout: float | None = None,
        functions: Mapping[str, Handler] | None = None,
    ) -> None:
        if workers < 1:
            raise UsageError(f"workers={workers} is not valid (expected at least 1)")
        if max_queue < 0:
            raise UsageError(f"max_queue={max_queue} is not valid (expected at least 0)")
        used = as_lane_backend(backend._backend if isinstance(backend, Group) else backend)
        used.check_usable()
        seconds = Deadline(used.timeout if timeout is None else timeout).seconds
        self._functions = _Functions()
        for name, function in (functions or {}).items():
            self.register(name, function)
        self._calls = _Calls(used, self._functions, workers, max_queue, seconds)
        self._drop = weakref.finalize(self, self._calls.drop)
        self._drop.atexit = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._calls.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._calls.world_size

    # -- functions -----------------------------------------------------------------------------------------------------

    @overload
    def register(self, name: str, fn: Handler) -> Handler: ...

    @overload
    def register(self, name: str) -> Callable[[Handler], Handler]: ...

    @overload
    def register(self, name: Handler) -> Handler: ...

    def register(self, name: str | Handler, fn: Handler | None = None) -> Any:
        """Makes a function callable: `register("add", fn)`, `@register("add")`, or `@register` for its own name.

        It gets the payload and returns the result, both as bytes. A name that is registered again gets the new one.

        Raises:
            UsageError: It is no function, or the name is no text.
        """
        if not isinstance(name, str):
            return self.register(getattr(name, "__name__", ""), name)
        if fn is None:
            return functools.partial(self.register, name)
        if not name or not callable(fn):
            raise UsageError(f"{fn!r} cannot be registered as {name!r} (expected a name and a function)")
        self._functions[name] = fn
        return fn

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, dst: int, name: str, payload: Any = b"", *, timeout: float | None = None) -> bytes:
        """Calls a function of another rank, or of this one, and returns its result.

        Raises:
            RemoteError: The function raised; the text is the other rank's.
            FunctionNotFound: There is none of that name; also a `RemoteError`.
            RpcTimeout: No answer came in time. One that comes later is dropped.
            PeerLost: The other rank is gone.
            InvalidMessage: The request is too large, or the answer cannot be read.
            Cancelled: The agent was closed meanwhile.
            InvalidRank, RpcNoConnection, UnsupportedArray: Before anything is sent.
            Closed: The agent or its backend was closed before.
            UsageError: In a callback of a call, which runs in the thread that would receive the answer.
        """
        return self._calls.call(self, dst, name, payload, timeout)

    def call_async(
        self, dst: int, name: str, payload: Any = b"", *, timeout: float | None = None
    ) -> concurrent.futures.Future[bytes]:
        """Starts a call. Its future raises what `call` does; its callbacks must not wait for other calls.

        Raises:
            InvalidRank, UnsupportedArray, InvalidMessage: The arguments are not valid.
            Closed: The agent or its backend is closed.
        """
        return self._calls.call_async(self, dst, name, payload, timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the agent; the backend stays, and its messages are its own again. May be called twice.

        Calls under way raise `Cancelled`. Requests that wait are answered with an error; handlers that run may finish
        and answer, for a few seconds.
        """
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_NEVER = Deadline(float("inf"))
