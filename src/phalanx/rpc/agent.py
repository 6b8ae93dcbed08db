"""The agent: calls functions on other ranks, and serves theirs."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from ..arguments import in_units, shown
from ..deadline import Deadline
from ..errors import ConfigError, NoConnection, PhalanxError, Timeout, UsageError, of_call
from ..frames import hide_frames, hides_frames
from ..group import Group
from ..interrupts import insist
from ..system_limits import naming_limits, raise_limit
from ..untraced import leave_calls_alone
from ..wire.codec import Limits
from .caller import CallerLink
from .connect import Connections
from .context import current_call, running_call
from .future import RpcFuture
from .payload import FrameBody, encode_call
from .pending_call import PendingCall
from .registry import CREATE, Registry
from .remote_object import MethodCaller, RemoteObject
from .waiter import ConditionWaiter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Agent"]

F = TypeVar("F", bound=Callable[..., Any])

JOIN_TIMEOUT = 86400.0
LONGEST_PAUSE = 5e-3
"""Seconds between two looks of a thread that closes the agent whether calls have ended."""
_ENDLESS = float("inf")


class Agent:
    """Calls functions on any rank of a group by name, and serves those registered here. All ranks make one.

    ```python
    agent = px.rpc.Agent(world)

    @agent.register
    def add(a: float, b: float) -> float:
        return a + b

    agent.call(1, "add", 2, 3)
    ```

    A rank serves until it closes its agent. If other ranks may still call it, wait for them first: `agent.join()`.

    Args:
        group: The ranks that call each other. Several agents on one group do not see each other.
        workers: Handlers that run at the same time, not counting those that wait for a call of their own.
        max_message: The largest request, answer or item, in bytes.
        max_in_flight: Calls to one rank that may wait for their answers; further calls block.
        max_queue: Requests that may wait here; beyond that, this rank stops reading more.
        timeout: The default timeout of calls, in seconds. By default that of the group.

    Raises:
        UsageError: An argument is not valid.
        Closed: The group is closed.
        OutOfResources: This process has no more descriptors, threads or memory; names the limit.
    """

    @hides_frames
    def __init__(
        self,
        group: Group,
        *,
        workers: int = 8,
        max_message: int = 1 << 30,
        max_in_flight: int = 1024,
        max_queue: int = 1024,
        timeout: float | None = None,
    ) -> None:
        for name, value in (
            ("workers", workers),
            ("max_message", max_message),
            ("max_in_flight", max_in_flight),
            ("max_queue", max_queue),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r} is not valid (expected a whole number of at least 1)")
        if not isinstance(group, Group):
            raise UsageError(f"group={shown(group)} is not valid (expected a phalanx.Group)")
        backend = group._backend
        backend.check_usable()
        leave_calls_alone()
        self._group = group
        self._backend = backend
        self.rank = group.rank
        self.world_size = group.world_size
        world_rank = group.members[group.rank]
        self._timeout = _seconds(timeout, backend.timeout)
        self._max_message = max_message
        self._limits = Limits(
            max_head=min(max_message, 64 << 20), max_payload=max_message, raised_by="Agent(…, max_message=…)"
        )
        self._registry = Registry(world_rank)
        with naming_limits():
            self._connections = Connections(
                backend,
                self.rank,
                group.members,
                self._registry,
                f"phalanx-rpc-{world_rank}",
                self._limits,
                workers=workers,
                max_message=max_message,
                max_in_flight=max_in_flight,
                max_queue=max_queue,
            )
        self._poller = self._connections.poller
        self._dropped = weakref.finalize(self, _drop, os.getpid(), self._connections)
        self._dropped.atexit = False
        self._is_half_closed = False
        """Whether an exception came in `close`: the next call does what is left."""
        _open.add(self)
        with naming_limits():
            self._connections.start(functools.partial(_close, weakref.ref(self)))

    # -- what can be called here ---------------------------------------------------------------------------------------

    @overload
    def register(self, name_or_function: F, /) -> F: ...

    @overload
    def register(self, name_or_function: str, function: F, /) -> F: ...

    @overload
    def register(self, name_or_function: str, /) -> Callable[[F], F]: ...

    def register(self, name_or_function: Any, function: Any = None, /) -> Any:
        """Registers a function, coroutine function or generator function to be called, or a class for `create`.

        As a decorator (`@agent.register`, `@agent.register("name")`) or with both: `agent.register("name", function)`.

        Raises:
            UsageError: It is not callable, or the name is taken.
        """
        if isinstance(name_or_function, str):
            if function is None:
                return lambda target: self.register(name_or_function, target)
            self._registry.add(name_or_function, function)
            return function
        name = getattr(name_or_function, "__name__", None)
        if name is None or function is not None:
            raise UsageError(f"a name is needed to register {name_or_function!r} (use register('name', function))")
        self._registry.add(name, name_or_function)
        return name_or_function

    @hides_frames
    def unregister(self, name: str) -> None:
        """Undoes `register`; running calls go on.

        Raises:
            FunctionNotFound: The name is not registered.
        """
        self._registry.remove(name)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(
        self, dst: int, name: str, /, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> Any:
        """Calls a function on a rank and returns its result; for a generator, a `RemoteStream`.

        Args:
            dst: A rank of the group. May be this rank.
            timeout: Seconds for the whole call. Inside a handler, at most the time that its own caller has left.
            returns: The type of the result, if it is more than plain data: `returns=Point`. By default the annotation
                of the function that is registered here under this name, if there is one.

        Raises:
            FunctionNotFound, InvalidArgument: The rank has no such function, or it does not take these arguments.
            RemoteError: The function raised. Has the type name, the message and the traceback.
            RpcTimeout: No answer came in time. The call is cancelled on the other rank.
            RpcNoConnection: This backend has no way to that rank.
            PeerLost: The rank is gone.
            ChannelClosed: The rank has closed its agent.
            Cancelled: This agent was closed meanwhile, or the caller of the handler that called has given up.
            OutOfResources: This process has no descriptor left, to connect or to wait.
            UsageError: An argument cannot be sent.
        """
        try:
            return self._call(dst, name, 0, args, kwargs, timeout, returns)
        except BaseException as error:
            hide_frames(error)
            raise_limit(error)
            raise

    def call_async(
        self, dst: int, name: str, /, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """As `call`, but returns a future at once. The arguments may be changed as soon as this returns.

        Blocks only if `max_in_flight` calls to that rank have no answer yet, if more than 8 MiB wait here to be sent to
        it, or if this is the first call to it.

        Raises:
            UsageError, InvalidRank: An argument cannot be sent, or there is no such rank. The future raises the rest.
        """
        try:
            return self._call_async(dst, name, 0, args, kwargs, timeout, returns)
        except BaseException as error:
            hide_frames(error)
            raise_limit(error)
            raise

    async def acall(
        self, dst: int, name: str, /, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> Any:
        """As `call`, to be awaited in asyncio. Cancelling it cancels the call."""
        try:
            return await self._acall(dst, name, 0, args, kwargs, timeout, returns)
        except BaseException as error:
            hide_frames(error)
            raise_limit(error)
            raise

    @hides_frames
    def notify(self, dst: int, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Calls a function on a rank without an answer. Returns once the request is sent.

        Raises:
            RpcTimeout: It could not be sent in time, because the other rank is slow to read.
            PeerLost: The rank is gone.
            UsageError: An argument cannot be sent.
        """
        try:
            self._notify(dst, name, 0, args, kwargs, timeout)
        except OSError as error:
            raise_limit(error)
            raise

    @hides_frames
    def create(self, dst: int, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RemoteObject:
        """Creates an instance of a registered class on a rank. It lives there until the returned handle is gone.

        Raises:
            As `call`.
        """
        deadline = self._deadline(timeout)
        try:
            link = self._connections.link_to(dst, deadline)
        except (Timeout, NoConnection) as error:
            raise of_call(error) from None
        with naming_limits():
            number = self._call(link, name, CREATE, args, kwargs, timeout, None)
        caller = MethodCaller(self._call, self._call_async, self._acall, self._notify, self._registry)
        return RemoteObject(caller, link, name, number)

    @hides_frames
    def join(self, *, timeout: float | None = None) -> None:
        """Serves until all ranks of the group have called this, so that no more calls can come.

        Args:
            timeout: Seconds to wait at most; by default a day.

        Raises:
            Timeout: Not all ranks came in time.
            PeerLost: A rank is gone.
        """
        with self._poller.blocking():
            self._group.barrier(timeout=JOIN_TIMEOUT if timeout is None else timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    @hides_frames
    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Closes the agent. May be called twice: what an exception has left, as that of Ctrl-C, is done then.

        Args:
            drain: Wait for running calls, in both directions; otherwise they are cancelled.
            timeout: Seconds to wait at most; then the remaining calls are cancelled.
        """
        if self._backend.forked:  # all of it is the parent's, and locks may be held by threads that exist only there
            return
        deadline, wait = Deadline(_seconds(timeout, self._timeout)), 0.0
        try:
            first = self._connections.refuse_more()
            if not first and not self._is_half_closed:
                return
            try:
                if first and drain:
                    self._drain(deadline)
                wait = deadline.remaining()
            finally:  # also after Ctrl-C, but then without waiting
                insist(functools.partial(self._connections.shut_down, wait))
                self._dropped.detach()
        except BaseException:
            self._is_half_closed = True
            raise

    def _drain(self, deadline: Deadline) -> None:
        with self._poller.blocking():
            inside = current_call() is not None
            for link in list(self._connections.callers.values()):
                if inside and link.peer == self.rank:
                    continue  # this very handler may be what is called
                for pending in list(link.calls.values()):
                    if pending.stream is None:
                        self._await_end(link, pending, deadline)
                link.poll_now()  # or nobody reads the answers of calls that were given up, which this rank may send
            pause = 50e-6
            while self._busy() and not deadline.expired:
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    @staticmethod
    def _await_end(link: CallerLink, pending: PendingCall, deadline: Deadline) -> None:
        """Waits for a call that another thread may be making, and reads its link where that thread does not."""
        # A thread that takes a short answer itself takes the call off the list and tells nobody: that would cost every
        # call. By then it has handed the link to this thread, which looks at the list now and then.
        ended = ConditionWaiter(lambda: pending.done or pending.number not in link.calls)
        while not ended.done and not deadline.expired:
            link.wait(ended, Deadline(min(deadline.remaining(), LONGEST_PAUSE)))
            ended.spun = True

    def _busy(self) -> bool:
        inside = current_call() is not None  # a handler that closes its own agent does not wait for itself
        running = self._poller.running > inside or self._poller.waiting or self._connections.loop.under_way
        return bool(running or any(link.queued_bytes for link in list(self._connections.servers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.close(drain=kind is None)

    # -- how calls are made --------------------------------------------------------------------------------------------

    def _call(
        self,
        dst: int | CallerLink,
        name: str,
        target: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        returns: Any,
    ) -> Any:
        deadline = self._deadline(timeout)
        outgoing = encode_call(name, target, deadline.seconds, args, kwargs, self._limits)
        try:
            link = self._connections.link_to(dst, deadline)
            if outgoing.payload + len(outgoing.head) > self._max_message:
                self._refuse_size(outgoing)
            if returns is None and target == 0:
                returns = self._registry.result_type(name)
            return link.call(PendingCall(name, deadline, returns), outgoing)
        except (Timeout, NoConnection) as error:
            raise of_call(error) from None

    def _call_async(
        self,
        dst: int | CallerLink,
        name: str,
        target: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        returns: Any,
    ) -> concurrent.futures.Future[Any]:
        deadline = self._deadline(timeout)
        outgoing = encode_call(name, target, deadline.seconds, args, kwargs, self._limits)
        if outgoing.payload + len(outgoing.head) > self._max_message:
            self._refuse_size(outgoing)
        if returns is None and target == 0:
            returns = self._registry.result_type(name)
        pending = PendingCall(name, deadline, returns)
        try:
            link = self._connections.link_to(dst, deadline)
            future = RpcFuture(link, pending)
            link.start_unattended(pending, outgoing)
        except (UsageError, ConfigError):
            raise
        except PhalanxError as error:
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(of_call(error))
            return failed
        return future

    async def _acall(
        self,
        dst: int | CallerLink,
        name: str,
        target: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        returns: Any,
    ) -> Any:
        make = functools.partial(self._call_async, dst, name, target, args, kwargs, timeout, returns)
        link = dst if isinstance(dst, CallerLink) else self._connections.callers.get(dst)
        if link is None or link.is_full:  # it may take a while
            context = contextvars.copy_context()  # with the call that this one is made for, if it is in a handler
            future = await asyncio.get_running_loop().run_in_executor(None, context.run, make)
        else:
            future = make()
        return await asyncio.wrap_future(future)

    def _notify(
        self,
        dst: int | CallerLink,
        name: str,
        target: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> None:
        deadline = self._deadline(timeout)
        outgoing = encode_call(name, target, deadline.seconds, args, kwargs, self._limits)
        if outgoing.payload + len(outgoing.head) > self._max_message:
            self._refuse_size(outgoing)
        try:
            self._connections.link_to(dst, deadline).notify(name, deadline, outgoing)
        except (Timeout, NoConnection) as error:
            raise of_call(error) from None

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is None:
            seconds = self._timeout
        else:
            seconds = timeout if type(timeout) is float and 0 <= timeout < _ENDLESS else _seconds(timeout, 0.0)
        context = running_call.get()
        return Deadline(seconds if context is None else min(seconds, context.time_left))

    def _refuse_size(self, outgoing: FrameBody) -> NoReturn:
        size = len(outgoing.head) + outgoing.payload
        raise UsageError(f"a call of {in_units(size)} is too large (max_message here is {in_units(self._max_message)})")


def _seconds(value: float | None, default: float) -> float:
    seconds = default if value is None else value
    if type(seconds) is float and 0 <= seconds < _ENDLESS:
        return seconds
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < _ENDLESS:
        raise UsageError(f"timeout={value!r} is not valid (expected seconds, 0 or more)")
    return float(seconds)


def _close(agent: weakref.ref[Agent]) -> None:
    """Closes an agent whose world is closed."""
    found = agent()
    if found is not None:
        found.close(drain=False)


_open: weakref.WeakSet[Agent] = weakref.WeakSet()
"""Agents that exist. Those still open at the end of the program are closed, so that other ranks hear of it."""


@atexit.register
def _close_all() -> None:
    for agent in list(_open):
        with contextlib.suppress(Exception):
            agent.close(drain=False)


def _drop(pid: int, connections: Connections) -> None:
    """Shuts an agent down that was garbage collected without having been closed.

    Runs in any thread, which may hold a lock that shutting down needs. So the agent's own thread does it.
    """
    if os.getpid() == pid:  # in a forked child, all of it is the parent's
        connections.poller.run_soon(connections.shut_down)
