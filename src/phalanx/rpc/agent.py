"""The agent: calls functions on other ranks, and serves theirs."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .._native import core
from ..backends.ports import LinkPort
from ..deadline import Deadline
from ..errors import (
    Cancelled,
    ChannelClosed,
    Closed,
    ConfigError,
    NoConnection,
    PeerLost,
    PhalanxError,
    ProtocolError,
    RpcTimeout,
    Timeout,
    UsageError,
    copy_for_raise,
    of_call,
)
from ..group import Group
from ..transports.duplex_ring import RingAgreement
from ..transports.stream import Stream, StreamEnded, read_exactly, write_all
from ..wire.calls import HEADER_SIZE, CallKind, pack_header, parse_header
from ..wire.codec import Limits
from ..wire.control import OperationStatus
from .caller import CallerLink, Pending, RpcFuture
from .context import current_call
from .event_loop import EventLoop
from .link import LOOK, Link
from .payload import Outgoing, encode_call
from .poller import Service
from .registry import Function, Registry
from .remote_object import RemoteObject
from .server import CREATE, ServerLink

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Agent"]

F = TypeVar("F", bound=Callable[..., Any])

LANE = 3
"""The number of the agent's connections in a group; 1 and 2 are the group's own lanes."""
LONGEST_OFFER = 4096
VERDICT_WAIT = 0.25
"""Seconds a broken connection waits for the directory's word on why."""
JOIN_TIMEOUT = 86400.0
LONGEST_TURN = 0.1
"""Seconds after which a thread looks again whether it may connect: whoever had to wake it may have been interrupted."""
STOP_WAIT = 5.0
"""Seconds that closing waits for threads, which may be inside a handler."""
_IDLE = OperationStatus("", 0, 0, "", False, float("inf"))


class Agent:
    """Calls functions on any rank of a group by name, and serves those registered here. Made by all ranks.

    ```python
    agent = px.rpc.Agent(world)

    @agent.register
    def add(a: float, b: float) -> float:
        return a + b

    agent.call(1, "add", 2, 3)
    ```

    A rank serves until it closes its agent. If others may still call it, wait for them first: `agent.join()`.

    Args:
        group: Whose ranks talk; several agents on one group are apart from each other.
        workers: Handlers that run at the same time. One that waits for a call of its own does not count.
        max_message: Bytes of one request, answer or item.
        max_in_flight: Calls to one rank that may wait for their answers; further ones wait for a place.
        max_queue: Requests that may wait here; if there are more, their senders are held back.
        timeout: The default of every call, in seconds; the group's, if it is not given.

    Raises:
        UsageError: An argument is not valid.
        Closed: The group is closed.
    """

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
        backend = group._backend
        backend.check_usable()
        self._group = group
        self._backend = backend
        self.rank = group.rank
        self.world_size = group.world_size
        self.world_ranks = group.members
        self._timeout = _seconds(timeout, backend.timeout)
        self._max_message = max_message
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._limits = Limits(max_head=min(max_message, 64 << 20), max_payload=max_message)
        self._registry = Registry(self.world_ranks[self.rank])
        self._callers: dict[int, CallerLink] = {}
        self._servers: set[ServerLink] = set()
        self._dialling: dict[int, _Turn] = {}
        """For each rank, who connects to it, or did so last."""
        self._found_lost: dict[int, tuple[float, PeerLost]] = {}
        """Ranks that a connection could not be made to, because they are gone, and when that was found out."""
        self._closed = False
        self._lock = threading.RLock()
        name = f"phalanx-rpc-{self.world_ranks[self.rank]}"
        self._loop = EventLoop(f"{name}-async")
        this = weakref.ref(self)
        context = backend.next_context("rpc")
        self._context = context
        self._control = backend.control
        everyone = range(backend.world_size)
        self._port = port = backend.open_port(context, LANE, everyone, functools.partial(_accept, this))
        self._look = 0.0 if port.oversubscribed else LOOK
        self._service = Service(name, workers, self._look, functools.partial(_held_back, self._loop, max_queue))
        links = (self._callers, self._servers)
        unwatch = functools.partial(self._control.unwatch, context)
        self._shut_down = functools.partial(_shut_down, self._service, self._loop, port, *links, unwatch)
        self._dropped = weakref.finalize(self, _drop, os.getpid(), self._service, self._shut_down)
        self._dropped.atexit = False
        _open.add(self)
        port.on_close = functools.partial(_close, this)
        port.on_abandon = functools.partial(_abandon, *links)
        self._control.watch(context, self)
        port.start()

    # -- what can be called here ---------------------------------------------------------------------------------------

    @overload
    def register(self, name_or_function: F, /) -> F: ...

    @overload
    def register(self, name_or_function: str, function: F, /) -> F: ...

    @overload
    def register(self, name_or_function: str, /) -> Callable[[F], F]: ...

    def register(self, name_or_function: Any, function: Any = None, /) -> Any:
        """Lets others call a function, coroutine function or generator function, or make instances of a class.

        As a decorator (`@agent.register`, `@agent.register("name")`) or with both: `agent.register("name", function)`.

        Raises:
            UsageError: It cannot be called, or the name is taken.
        """
        if isinstance(name_or_function, str):
            if function is None:
                return lambda target: self.register(name_or_function, target)
            self._registry.add(name_or_function, function)
            return function
        name = getattr(name_or_function, "__name__", None)
        if name is None or function is not None:
            raise UsageError(f"a name is needed to register {name_or_function!r}: register('name', function)")
        self._registry.add(name, name_or_function)
        return name_or_function

    def unregister(self, name: str) -> None:
        """Undoes `register`; calls under way go on.

        Raises:
            FunctionNotFound: There is nothing of that name.
        """
        self._registry.remove(name)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(
        self, dst: int, name: str, /, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> Any:
        """Calls a function on a rank and waits for what it returns; of a generator, a `RemoteStream`.

        Args:
            dst: The rank, of the group; this one, too.
            timeout: Seconds for all of it. Inside a handler, never more than its own caller left it.
            returns: The type of the result, if it is to be more than plain data: `returns=Point`. If a function of this
                name is registered here with an annotation, that type is taken.

        Raises:
            FunctionNotFound, InvalidArgument: The other side has no such function, or it does not take these arguments.
            RemoteError: The function raised; type name, message and traceback are inside.
            RpcTimeout: No answer came in time. The other side is told that nobody waits.
            RpcNoConnection: This backend has no way to that rank.
            PeerLost: The rank is gone.
            Cancelled: The other side closed its agent first.
            UsageError: An argument cannot be sent.
        """
        return self._call(dst, name, 0, args, kwargs, timeout, returns)

    def call_async(
        self, dst: int, name: str, /, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """As `call`, but returns a future at once. The arguments travel as they were when this returned.

        Waits only if `max_in_flight` calls to that rank are under way, if it does not take what it was sent (beyond
        8 MiB that wait here), or if this is the first call to it.

        Raises:
            UsageError, InvalidRank: An argument cannot be sent, or there is no such rank. All else is the future's.
        """
        return self._call_async(dst, name, 0, args, kwargs, timeout, returns)

    async def acall(
        self, dst: int, name: str, /, *args: Any, timeout: float | None = None, returns: Any = None, **kwargs: Any
    ) -> Any:
        """As `call`, to be awaited in asyncio. Cancelling it cancels the call."""
        return await self._acall(dst, name, 0, args, kwargs, timeout, returns)

    def notify(self, dst: int, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Calls a function on a rank without waiting for an answer. Returns once it is sent.

        Raises:
            RpcTimeout: It could not be sent in time: the other side does not take what it was sent before.
            PeerLost: The rank is gone.
            UsageError: An argument cannot be sent.
        """
        self._notify(dst, name, 0, args, kwargs, timeout)

    def create(self, dst: int, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RemoteObject:
        """Makes an instance of a registered class on a rank, which lives there until its handle is gone.

        Raises:
            As `call`.
        """
        deadline = self._deadline(timeout)
        try:
            link = self._link(dst, deadline)
        except (Timeout, NoConnection) as error:
            raise of_call(error) from None
        return RemoteObject(self, link, name, self._call(link, name, CREATE, args, kwargs, timeout, None))

    def join(self, *, timeout: float | None = None) -> None:
        """Serves until all ranks of the group have called this: then nobody will call any more.

        Args:
            timeout: Seconds to wait at most; a day, if not given.

        Raises:
            Timeout: Not all ranks came in time.
            PeerLost: A rank is gone.
        """
        with self._service.waits():
            self._group.barrier(timeout=JOIN_TIMEOUT if timeout is None else timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Ends the agent. May be called twice.

        Args:
            drain: Wait for the calls under way, in both directions; else they are cancelled.
            timeout: Seconds to wait at most; then the rest is cancelled.
        """
        if self._backend.forked:  # all of it is the parent's, and locks may be held by threads that exist only there
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = Deadline(_seconds(timeout, self._timeout))
        if drain:
            self._drain(deadline)
        self._dropped.detach()
        self._shut_down()

    def _drain(self, deadline: Deadline) -> None:
        with self._service.waits():
            inside = current_call() is not None
            for link in list(self._callers.values()):
                if inside and link.peer == self.rank:
                    continue  # this very handler may be what is called
                for pending in list(link.calls.values()):
                    if pending.stream is None:
                        link.wait(pending, deadline)
            pause = 50e-6
            while self._busy() and not deadline.expired:
                time.sleep(pause)
                pause = min(pause * 2, 5e-3)

    def _busy(self) -> bool:
        inside = current_call() is not None  # a handler that closes its own agent does not wait for itself
        running = self._service.running > inside or self._service.waiting or self._loop.under_way
        return bool(running or any(link.queued for link in self._servers))

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
            link = self._link(dst, deadline)
            self._check_size(outgoing)
            return link.call(Pending(name, deadline, self._type_of(name, target, returns)), outgoing)
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
        self._check_size(outgoing)
        pending = Pending(name, deadline, self._type_of(name, target, returns))
        try:
            link = self._link(dst, deadline)
            future = pending.future = RpcFuture(link, pending)
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
        link = dst if isinstance(dst, CallerLink) else self._callers.get(dst)
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
        self._check_size(outgoing)
        try:
            self._link(dst, deadline).notify(name, deadline, outgoing)
        except (Timeout, NoConnection) as error:
            raise of_call(error) from None

    def _deadline(self, timeout: float | None) -> Deadline:
        seconds = self._timeout if timeout is None else _seconds(timeout, 0.0)
        context = current_call()
        return Deadline(seconds if context is None else min(seconds, context.time_left))

    def _type_of(self, name: str, target: int, returns: Any) -> Any:
        if returns is None and target == 0:
            return _returns(self._registry.find_function(name))
        return returns

    def _method_returns(self, class_name: str, method: str) -> Any:
        return _returns(self._registry.find_method(class_name, method))

    def _check_size(self, outgoing: Outgoing) -> None:
        size = len(outgoing.head) + outgoing.payload
        if size > self._max_message:
            raise UsageError(f"a call of {size} bytes is too long (max_message is {self._max_message})")

    # -- links ---------------------------------------------------------------------------------------------------------

    def _link(self, dst: int | CallerLink, deadline: Deadline) -> CallerLink:
        if isinstance(dst, CallerLink):
            if self._backend.forked:
                self._backend.check_usable()
            if dst.ended is not None:
                raise dst.ended
            return dst
        link = self._callers.get(dst)
        if link is not None and not self._closed and not self._backend.forked:
            return link
        self._backend.check_usable()
        if self._closed:
            raise Closed("this agent was closed", rank=self.world_ranks[self.rank])
        if dst != self.rank:
            self._backend.check_peer(dst)
        turn = _Turn()
        came = time.monotonic()
        with self._service.waits():
            try:
                while not self._is_next(dst, turn):
                    if deadline.expired:
                        raise self._no_answer(dst, deadline)
                    self._dialling[dst].wait(deadline)
                link = self._callers.get(dst)
                if link is not None:
                    return link
                # If another thread found out while this one waited that the rank is gone, it need not find out again:
                # several threads, each waiting for the one before it, would hear of a loss one after another.
                found, lost = self._found_lost.get(dst, (0.0, None))
                if lost is not None and found >= came:
                    raise copy_for_raise(lost, "", self.world_ranks[self.rank])
                return self._connect(dst, deadline)
            except PeerLost as lost:
                self._found_lost[dst] = (time.monotonic(), lost.during(lost.operation or "", lost.rank))
                raise
            finally:
                turn.over = True
                turn.bell.release()

    def _is_next(self, dst: int, turn: _Turn) -> bool:
        """Gives the right to connect to a rank to this turn, unless another has it."""
        with self._lock:
            first = self._dialling.get(dst)
            if first is None or first.over:
                first = self._dialling[dst] = turn
            return first is turn

    def _connect(self, dst: int, deadline: Deadline) -> CallerLink:
        if dst == self.rank:
            mine, other = socket.socketpair()
            self._accept(dst, Stream(other))
            stream = Stream(mine)
        else:
            stream = self._port.dial(dst, deadline)
            try:
                stream = self._agree(dst, stream, deadline)
            except BaseException:
                stream.close()
                raise
        link = CallerLink(
            stream,
            dst,
            self._service,
            self._max_message,
            self._limits,
            look=self._look,
            rank=self.world_ranks[self.rank],
            world_rank=self.world_ranks[dst],
            max_in_flight=self._max_in_flight,
            why=functools.partial(self._port.why_ended, dst, wait=VERDICT_WAIT),
            forget=functools.partial(_forget_caller, self._callers),
        )
        self._callers[dst] = link
        known = self._control.verdict(self.world_ranks[dst], (), 0.0) if dst != self.rank else None
        if known is not None:  # it was lost just now, before the link could be told
            link.over(known)
            raise known
        if self._closed:
            link.over(Closed("this agent was closed", rank=self.world_ranks[self.rank]))
        return link

    def _agree(self, dst: int, stream: Stream, deadline: Deadline) -> Stream:
        """Goes over to rings in shared memory, where that is possible."""
        pid = self._port.memory_of(dst) if core is not None else None
        if pid is None:
            return stream
        agreement = RingAgreement(stream, pid)
        try:
            offer = agreement.offer()
            if not offer:
                return stream
            what = f"the agent of rank {self.world_ranks[dst]}"
            check = functools.partial(self._check_alive, dst)
            write_all(stream, pack_header(CallKind.RING, len(offer), 0, 0) + offer, deadline, what, check)
            header = parse_header(read_exactly(stream, HEADER_SIZE, deadline, what, check), 0, LONGEST_OFFER)
            if header.kind is not CallKind.RING:
                raise ProtocolError(f"{header.kind.name} came before the agreement on shared memory")
            accepted = agreement.accept(read_exactly(stream, header.head, deadline, what, check))
            answer = b"\x01" if accepted else b""
            write_all(stream, pack_header(CallKind.RING, len(answer), 0, 0) + answer, deadline, what, check)
            return agreement.stream() if accepted else stream
        except Timeout:
            raise self._no_answer(dst, deadline) from None
        except (StreamEnded, ProtocolError) as ended:
            raise self._port.why_ended(dst, ended, VERDICT_WAIT) from None
        finally:
            agreement.close()

    def _check_alive(self, dst: int) -> None:
        known = self._control.verdict(self.world_ranks[dst], (), 0.0)
        if known is not None:
            raise known
        if self._closed:
            raise Closed("this agent was closed", rank=self.world_ranks[self.rank])

    def _no_answer(self, dst: int, deadline: Deadline) -> RpcTimeout:
        rank = self.world_ranks[dst]
        return RpcTimeout(
            f"the agent of rank {rank} did not answer within {deadline.seconds:g} s (has it made one?)",
            missing=[rank],
            seconds=deadline.seconds,
            rank=self.world_ranks[self.rank],
            peer=rank,
        )

    def _accept(self, src: int, stream: Stream) -> None:
        if src != self.rank and not self._port.oversubscribed:
            stream.keep_in_cache()
        link = ServerLink(
            stream,
            src,
            self._service,
            self._registry,
            self._loop,
            self._max_message,
            self._limits,
            look=self._look,
            pid=None if src == self.rank else self._port.memory_of(src),
            forget=self._servers.discard,
        )
        with self._lock:
            if not self._closed:
                self._servers.add(link)
        if self._closed:
            link.over(Closed("this agent was closed"))
        else:
            self._service.watch(link)

    # -- losses (see backends.control_plane.Watcher) -------------------------------------------------------------------

    def fail(self, error: PhalanxError) -> None:
        """A rank is lost, or the world has ended. From any thread; never waits."""
        everyone = self._control.ended is not None
        links: list[Link] = [*self._callers.values(), *self._servers]
        for link in links:
            if everyone or self.world_ranks[link.peer] == error.peer:
                link.over(error)

    def left(self, rank: int) -> None:
        """A rank closed its world: its connections end by themselves."""

    def status(self, sequence: int = 0) -> OperationStatus:
        """Remote calls are not in lockstep."""
        return _IDLE


class _Turn:
    """One thread's right to connect to a rank, from when it is given until `over` is set.

    Not a lock: Ctrl-C may come between taking one and noting that, and then nobody would ever release it. Here the
    thread enters the block that ends the turn before it has it.
    """

    __slots__ = ("bell", "over")

    def __init__(self) -> None:
        self.over = False
        self.bell = threading.Lock()
        """Held until the turn is over."""
        self.bell.acquire()

    def wait(self, deadline: Deadline) -> None:
        """Waits for the end of this turn, or a moment."""
        if self.bell.acquire(timeout=min(deadline.remaining(), LONGEST_TURN)):
            self.bell.release()  # the next one that waits


def _seconds(value: float | None, default: float) -> float:
    seconds = default if value is None else value
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < float("inf"):
        raise UsageError(f"timeout={value!r} is not valid (expected seconds, 0 or more)")
    return float(seconds)


def _returns(function: Function | None) -> Any:
    """The annotated type of what a function returns; None if it says nothing."""
    return None if function is None or function.signature.returns is Any else function.signature.returns


def _accept(agent: weakref.ref[Agent], src: int, stream: Stream) -> None:
    found = agent()
    if found is None:
        stream.close()
    else:
        found._accept(src, stream)


def _forget_caller(callers: dict[int, CallerLink], link: CallerLink) -> None:
    if callers.get(link.peer) is link:
        del callers[link.peer]


def _held_back(loop: EventLoop, max_queue: int, link: Link) -> bool:
    """Whether a link's requests have to wait."""
    if not isinstance(link, ServerLink):
        return False
    return link.held_back or link.service.waiting + loop.under_way >= max_queue


def _close(agent: weakref.ref[Agent]) -> None:
    """The world is closed."""
    found = agent()
    if found is not None:
        found.close(drain=False)


def _abandon(callers: dict[int, CallerLink], servers: set[ServerLink]) -> None:
    """In a forked child: the links are the parent's."""
    for link in [*callers.values(), *servers]:
        link.stream.abandon()


_open: weakref.WeakSet[Agent] = weakref.WeakSet()
"""Agents that exist: one that is still open at the end of the program says goodbye."""


@atexit.register
def _close_all() -> None:
    for agent in list(_open):
        with contextlib.suppress(Exception):
            agent.close(drain=False)


def _drop(pid: int, service: Service, shut_down: Callable[[], None]) -> None:
    """An agent was collected without having been closed.

    That comes in any thread, also in the middle of a lock that `shut_down` needs. So the agent's own thread does it.
    """
    if os.getpid() == pid:  # in a forked child, all of it is the parent's
        service.later(shut_down)


def _shut_down(
    service: Service,
    loop: EventLoop,
    port: LinkPort,
    callers: dict[int, CallerLink],
    servers: set[ServerLink],
    unwatch: Callable[[], None],
) -> None:
    """Ends what an agent holds."""
    port.on_close = None
    port.close()
    for server in list(servers):
        server.closing = True
    for link in [*callers.values(), *servers]:
        link.say_goodbye()
        if isinstance(link, CallerLink):
            link.over(Cancelled("this agent was closed"))
        else:
            link.over(ChannelClosed(link.peer, "this agent was closed"))
    unwatch()
    service.stop(STOP_WAIT)
    loop.stop(STOP_WAIT)
