"""The calls that a rank makes on the classic wire, from when they are sent until they are answered."""

from __future__ import annotations

import concurrent.futures
import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from ...backends.base import LaneBackend
from ...backends.raw_messages import bytes_of
from ...deadline import Deadline
from ...errors import (
    Cancelled,
    Closed,
    FunctionNotFound,
    InvalidMessage,
    InvalidRank,
    PhalanxError,
    RemoteError,
    RpcTimeout,
    UsageError,
    copy_for_raise,
    of_call,
)
from ...transports.channel import OutgoingFrame
from ...transports.mailbox import PendingTransfer
from ...wire.classic import calls as wire
from ...wire.classic.calls import CallRequest, CallResponse
from .messages import ClassicMessages, ClassicPeer

__all__ = ["ClassicCall", "ClassicClient"]

_NEVER = Deadline(float("inf"))


class FunctionNotRegistered(FunctionNotFound, RemoteError):
    """The other rank says that it has no function of that name.

    Also a `RemoteError`: this wire has one kind of error, a text, and programs written to it catch that type.
    """


class ClassicCall(concurrent.futures.Future[bytes]):
    """A call under way. The thread that takes it from the client's table settles it, so that is done once.

    Args:
        agent: Kept alive until the call is: a caller that waits for an answer may hold nothing else of it.
    """

    def __init__(self, client: ClassicClient, agent: object, dst: int, name: str, deadline: Deadline) -> None:
        super().__init__()
        self._client = client
        self._agent = agent
        self.dst = dst
        self.name = name
        self.deadline = deadline
        self.id = 0
        self.operation: PendingTransfer | None = None

    def result(self, timeout: float | None = None) -> bytes:
        with self._client.waiting_for(self):
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._client.waiting_for(self):
            return super().exception(timeout)

    def cancel(self) -> bool:
        """Gives the call up; its answer, if one comes, is dropped. False if it is done."""
        if self._client.forget(self):
            super().cancel()
            self.set_running_or_notify_cancel()
        return self.cancelled()

    def __str__(self) -> str:
        return f"call of {self.name!r} on rank {self.dst}"


class ClassicClient:
    """Makes calls, and settles them with their answers.

    Args:
        timeout: Seconds that a call may take, if it does not say so itself.
        waiting: Makes the context in which a handler waits for a call of its own.
    """

    def __init__(
        self,
        backend: LaneBackend,
        messages: ClassicMessages,
        timeout: float,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._backend = backend
        self._messages = messages
        self._timeout = timeout
        self._waiting = waiting
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._last_id = 0
        self._pending: dict[tuple[int, int], ClassicCall] = {}
        """By rank and id."""
        self._timed: list[tuple[float, int, int]] = []
        """A heap of the asynchronous calls: deadline, id and rank. Perhaps no thread waits for them."""
        self._closed = False

    @property
    def _world_rank(self) -> int:
        return self._backend.world_ranks[self._backend.rank]

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, agent: object, dst: int, name: str, payload: Any, timeout: float | None) -> bytes:
        """See `ClassicAgent.call`."""
        if self._messages.in_own_thread:
            raise UsageError(
                "a callback of a call cannot make another and wait for it, because it holds up the answers"
            )
        call = self._start(agent, dst, name, payload, timeout)
        try:
            call.exception(call.deadline.remaining())
        except concurrent.futures.TimeoutError:
            self._expire(call)
        except BaseException:  # Ctrl-C: the answer will never be asked for
            self.forget(call)
            raise
        return call.result()

    def call_async(self, agent: object, dst: int, name: str, payload: Any, timeout: float | None) -> ClassicCall:
        """See `ClassicAgent.call_async`."""
        call = self._start(agent, dst, name, payload, timeout)
        with self._lock:
            if (dst, call.id) in self._pending:
                if len(self._timed) > 2 * len(self._pending) + 64:  # most are done and wait only for their time
                    self._timed = [entry for entry in self._timed if (entry[2], entry[1]) in self._pending]
                    heapq.heapify(self._timed)
                heapq.heappush(self._timed, (call.deadline.at, call.id, dst))
                if self._timed[0][1] == call.id:  # sooner than the thread would wake up
                    self._messages.waker.set()
        return call

    def _start(self, agent: object, dst: int, name: str, payload: Any, timeout: float | None) -> ClassicCall:
        self._check_open()
        if not isinstance(dst, int) or not 0 <= dst < self._backend.world_size:
            raise InvalidRank(dst, self._backend.world_size)
        data = bytes_of(payload, writable=False)
        peer = self._messages.peers[dst]
        call = ClassicCall(self, agent, dst, name, Deadline(self._timeout if timeout is None else timeout))
        if not peer.sending.acquire(timeout=call.deadline.remaining()):
            call.set_exception(self._too_late(call))
            return call
        try:
            with self._lock:
                call.id = self._last_id = next(self._ids)
            message = wire.pack_request(CallRequest(call.id, name, data))
            with self._lock:
                self._check_open()
                self._pending[dst, call.id] = call
                lost = peer.error
            if lost is not None:
                self._fail(call, lost)
            else:
                self._send(peer, message, call)
        except PhalanxError as error:
            if not self.forget(call):  # it was never there: the arguments are to blame
                raise
            call.set_exception(of_call(error))
        except BaseException:
            self.forget(call)
            raise
        finally:
            peer.sending.release()
        return call

    def _send(self, peer: ClassicPeer, message: bytes, call: ClassicCall) -> None:
        def fail(error: BaseException) -> None:
            self._fail(call, error)

        operation = call.operation = self._messages.send(peer, message, call.deadline, fail)
        if operation is not None and operation.error is not None:
            fail(operation.error)

    def _check_open(self) -> None:
        self._backend.check_usable()
        if self._closed:
            raise Closed("this ClassicAgent was closed", rank=self._world_rank)

    @contextlib.contextmanager
    def waiting_for(self, call: ClassicCall) -> Iterator[None]:
        """Around a wait for a call: a handler gives its place in the pool away meanwhile.

        Raises:
            UsageError: In the agent's own thread, which would have to receive the answer.
        """
        if call.done():
            yield
        elif self._messages.in_own_thread:
            raise UsageError(f"{call}: a callback of a call cannot wait for it, because it holds up the answers")
        else:
            with self._waiting():
                yield

    # -- answers -------------------------------------------------------------------------------------------------------

    def settle(self, peer: ClassicPeer, response: CallResponse) -> None:
        """Gives an answer to its call.

        Raises:
            InvalidMessage: No such call was ever made.
        """
        with self._lock:
            call = self._pending.get((peer.rank, response.id))
            known = 1 <= response.id <= self._last_id
        if call is None:
            if not known:
                raise InvalidMessage(f"a response to call {response.id}, which this rank never made")
            return  # too late
        if not self.forget(call):
            return
        if response.error:
            world_rank = self._backend.world_ranks[peer.rank]
            text = response.data.decode()
            kind = FunctionNotRegistered if wire.says_not_registered(text, call.name) else RemoteError
            call.set_exception(kind(text, peer=world_rank, operation=str(call)))
        else:
            call.set_result(response.data)

    def settle_unreadable(self, peer: ClassicPeer, message: memoryview | bytes, error: InvalidMessage) -> None:
        """Fails the call whose answer cannot be read, if it can be told which it is."""
        answered = wire.response_id(message)
        with self._lock:
            call = None if answered is None else self._pending.get((peer.rank, answered))
        if call is not None and self.forget(call):
            world_rank = self._backend.world_ranks[peer.rank]
            text = f"{call}: the answer cannot be read: {error}"
            call.set_exception(InvalidMessage(text, rank=self._world_rank, peer=world_rank, operation=str(call)))

    # -- ends without an answer ----------------------------------------------------------------------------------------

    def forget(self, call: ClassicCall) -> bool:
        """Takes a call from the table; False if another thread did, which settles it."""
        with self._lock:
            found = self._pending.pop((call.dst, call.id), None) is not None
        operation = call.operation
        if found and isinstance(operation, OutgoingFrame) and not operation.done:
            # What has begun must go on: a message that is cut short would end the connection.
            with operation.channel.lock:
                if not operation.begun and not operation.done:
                    self._messages.lane.withdraw(operation)
        return found

    def _fail(self, call: ClassicCall, error: BaseException) -> None:
        if self.forget(call):
            call.set_exception(of_call(copy_for_raise(error, str(call), self._world_rank)))

    def _expire(self, call: ClassicCall) -> None:
        if self.forget(call):
            call.set_exception(self._too_late(call))

    def _too_late(self, call: ClassicCall) -> RpcTimeout:
        peer = self._backend.world_ranks[call.dst]
        text = f"{call}: no answer within {call.deadline.seconds:g} s"
        seconds = call.deadline.seconds
        return RpcTimeout(text, missing=[peer], seconds=seconds, rank=self._world_rank, peer=peer, operation=str(call))

    def expire_calls(self) -> Deadline:
        """Fails the calls whose time is over; returns when to look again."""
        with self._lock:
            now = time.monotonic()
            expired: list[ClassicCall | None] = []
            while self._timed and self._timed[0][0] <= now:
                _, number, dst = heapq.heappop(self._timed)
                expired.append(self._pending.get((dst, number)))
            until = Deadline(self._timed[0][0] - now) if self._timed else _NEVER
        for call in filter(None, expired):
            self._expire(call)
        return until

    def fail_calls_to(self, peer: ClassicPeer, error: BaseException) -> None:
        """Fails the calls to a rank from which no more will come, now and later."""
        with self._lock:
            peer.error = error
            calls = [call for call in self._pending.values() if call.dst == peer.rank]
        for call in calls:
            self._fail(call, error)

    def fail_everything(self, error: BaseException) -> None:
        """Fails all calls, now and later: there are no more messages."""
        with self._lock:
            for peer in self._messages.peers:
                peer.error = peer.error or error
        self._fail_all(lambda _call: error)

    def close(self) -> bool:
        """Makes no more calls; False if that was said before. `cancel_all` ends those under way."""
        with self._lock:
            first, self._closed = not self._closed, True
        return first

    def cancel_all(self) -> None:
        """Fails the calls under way: the agent was closed."""
        self._fail_all(self._cancelled)

    def _fail_all(self, error: Callable[[ClassicCall], BaseException]) -> None:
        with self._lock:
            calls = list(self._pending.values())
            self._timed.clear()
        for call in calls:
            self._fail(call, error(call))

    def _cancelled(self, call: ClassicCall) -> Cancelled:
        peer = self._backend.world_ranks[call.dst]
        return Cancelled(f"{call}: this agent was closed", rank=self._world_rank, peer=peer, operation=str(call))
