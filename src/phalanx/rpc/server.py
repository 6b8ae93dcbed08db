"""The server's end of a link: requests that are run, and their answers."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any

from ..errors import (
    Cancelled,
    ChannelClosed,
    FunctionNotFound,
    InvalidArgument,
    InvalidMessage,
    PhalanxError,
    ProtocolError,
    UsageError,
)
from ..exception_text import describe, message_of, render_traceback, type_name
from ..transports.duplex_ring import RingAgreement
from ..transports.stream import Stream
from ..wire.calls import CallKind
from ..wire.codec import Limits
from .caller import WINDOW
from .context import CallContext, _current
from .event_loop import EventLoop, soon
from .link import QUEUED, Frame, Link
from .payload import NOT_QUICK, encode_error, encode_value, plan_call, quick_call, quick_value
from .registry import Function, Registry

if TYPE_CHECKING:
    from .poller import Service

__all__ = ["CREATE", "ServerLink"]

logger = logging.getLogger("phalanx.rpc")

LONG = 64 << 10
"""Bytes from which a request counts for what may wait; shorter ones are bounded by their number."""
CREATE = (1 << 63) - 1
"""As the target of a call: make an instance of the class that is named."""


class ServerLink(Link):
    """Runs what one rank calls.

    Args:
        pid: The process of the caller, if memory can be shared with it.
        max_waiting: Requests of all links that may wait before no more are read.
    """

    exclusive = True

    def __init__(
        self,
        stream: Stream,
        peer: int,
        service: Service,
        registry: Registry,
        loop: EventLoop,
        max_message: int,
        limits: Limits,
        *,
        look: float,
        pid: int | None,
        forget: Callable[[ServerLink], None],
    ) -> None:
        super().__init__(stream, peer, max_message, limits, look=look)
        self.service = service
        self._registry = weakref.ref(registry)
        self.loop = loop
        self._forget = forget
        self._agreement = None if pid is None else RingAgreement(stream, pid)
        self._agreed = False
        self.requests: dict[int, Request] = {}
        self.waiting_bytes = 0
        """Of long requests that have not begun."""
        self._counting = threading.Lock()
        self._put_off: deque[Request] = deque()
        self.closing = False

    @property
    def held_back(self) -> bool:
        """Whether the caller does not take its answers, or has sent more than may wait: then no more is read."""
        return self.queued > QUEUED or self.waiting_bytes > self._max_message

    def needs_mover(self) -> None:
        self.service.watch(self)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def handle(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is CallKind.REQUEST or kind is CallKind.NOTIFY:
            request = Request(self, frame, frame.call if kind is CallKind.REQUEST else 0)
            if kind is CallKind.REQUEST:
                if frame.call in self.requests or not frame.call:
                    self.over(
                        ProtocolError(f"call {frame.call} was made twice" if frame.call else "a call has no number")
                    )
                    return
                self.requests[frame.call] = request
            if frame.size > LONG:
                with self._counting:
                    self.waiting_bytes += frame.size
            self.service.add_by_mover(request)
        elif kind is CallKind.CANCEL:
            given_up = self.requests.get(frame.call)
            if given_up is not None:
                given_up.cancel()
            self._free(frame.call)  # an object whose number the caller has not waited for
        elif kind is CallKind.CREDIT:
            reader = self.requests.get(frame.call)
            if reader is not None:
                reader.grant(self._number_in(frame))
        elif kind is CallKind.FREE:
            # In its turn: calls through the handle that were made before have to find the object.
            self.service.add_by_mover(functools.partial(self._free, self._number_in(frame)))
        elif kind is CallKind.RING and not self._agreed:
            self._agree(frame.head)
        elif kind is CallKind.GOODBYE:
            self.over(ChannelClosed(self.peer, "it has closed its agent"))
        else:
            self.over(ProtocolError(f"{kind.name} came to the serving side"))

    @staticmethod
    def _number_in(frame: Frame) -> int:
        value = quick_value(frame.head)
        if type(value) is not int or value < 0:
            raise ProtocolError(f"{frame.kind.name} without a number")
        return value

    def _agree(self, words: bytes) -> None:
        """The caller offers a ring, or says whether it could open ours."""
        agreement = self._agreement
        if agreement is None:
            raise ProtocolError("it offers shared memory, but shares none with this rank")
        if words == b"\x01":
            if not agreement.complete:
                raise ProtocolError("it goes over to a ring that was not agreed on")
            self.use(agreement.stream(self.pipe.ahead))
            self._agreed = True
            self.service.watch_anew()
        elif words:
            if agreement.complete:
                raise ProtocolError("it offers a second ring")
            offer = agreement.offer() if agreement.accept(words) else b""
            self.send(CallKind.RING, 0, offer)
        else:
            agreement.close()
            self._agreed = True

    def on_end(self, why: PhalanxError) -> None:
        if isinstance(why, ProtocolError):
            logger.warning("closed the calls of rank %d: %s", self.peer, why)
        self._forget(self)
        for request in list(self.requests.values()):
            request.cancel()
        registry = self._registry()
        if registry is not None:
            registry.free_all(self)
        self.on_room()
        if self._agreement is not None:
            self._agreement.close()

    def read(self, frame: Frame) -> tuple[str, int, float, list[Any], dict[str, Any]]:
        """Name, target, seconds and arguments of a call.

        Raises:
            InvalidMessage: It is malformed.
        """
        if frame.error is not None:
            raise frame.error
        if frame.plan is not None:
            call = frame.build()
        else:
            call = quick_call(frame.head)
            if call is NOT_QUICK:
                call = plan_call(frame.head, 0, self._limits).build()
        return call  # type: ignore[no-any-return]

    def put_off(self, request: Request) -> bool:
        """Whether a request has to wait because the caller does not take the answers of others."""
        if self.queued <= QUEUED or self.ended is not None:
            return False
        with self._counting:
            self._put_off.append(request)
        if self.queued <= QUEUED or self.ended is not None:  # just now
            self.on_room()
        return True

    def on_room(self) -> None:
        while self._put_off:
            with self._counting:
                if not self._put_off:
                    return
                request = self._put_off.popleft()
            self.service.add(request)

    # -- what goes -----------------------------------------------------------------------------------------------------

    def answer(self, kind: CallKind, call: int, value: Any = None) -> None:
        """Sends a result or an item.

        Raises:
            UsageError: It is nothing that can be sent.
        """
        outgoing = encode_value(value, self._limits)
        if outgoing.payload + len(outgoing.head) > self._max_message:
            size = outgoing.payload + len(outgoing.head)
            raise UsageError(f"a result of {size} bytes is too long (max_message is {self._max_message})")
        try:
            sent = self.send(kind, call, outgoing.head, outgoing.buffers, outgoing.payload)
        except PhalanxError:
            return  # nobody is there to hear it
        if not sent:
            self.needs_mover()

    def answer_error(self, call: int, kind: str, type_name: str, message: str, trace: str = "") -> None:
        """Sends what went wrong."""
        try:
            sent = self.send(CallKind.ERROR, call, encode_error(kind, type_name, message, trace))
        except PhalanxError:
            return
        if not sent:
            self.needs_mover()

    # -- objects -------------------------------------------------------------------------------------------------------

    def find(self, name: str, target: int, args: list[Any]) -> tuple[Function, list[Any]]:
        """What a call means: a function, a class to make an instance of, or a method of an instance.

        Raises:
            FunctionNotFound: There is none.
        """
        registry = self._registry()
        if registry is None:
            raise Cancelled("the agent there is being closed")
        if target == 0:
            return registry.function(name), args
        if target == CREATE:
            return registry.class_of(name), args
        found = registry.objects.get((self, target))
        if found is None:
            raise FunctionNotFound(f"the object whose method {name!r} is called is no longer there")
        class_name, instance = found
        method = registry.method(class_name, name)
        return method, [instance, *args] if method.takes_instance else args

    def keep(self, call: int, class_name: str, instance: Any) -> int:
        """Keeps an object for the caller, under the number of the call that made it; returns that number."""
        registry = self._registry()
        if registry is not None:
            registry.objects[self, call] = (class_name, instance)
            if self.ended is not None:  # just now: nobody would free it
                registry.free_all(self)
        return call

    def _free(self, number: int) -> None:
        registry = self._registry()
        if registry is not None:
            registry.objects.pop((self, number), None)


class Request:
    """A call from when it came until it is answered. Calling it runs it."""

    __slots__ = (
        "_came",
        "_credit",
        "_flow",
        "_frames",
        "_generator",
        "_more",
        "_ran",
        "_rests",
        "context",
        "link",
        "number",
    )

    def __init__(self, link: ServerLink, frame: Frame, number: int) -> None:
        self.link = link
        self.number = number
        """Of the call; 0 if it is not answered."""
        self._frames = [frame]
        """Whoever takes it out decides what becomes of the call: it is run, or it was cancelled before."""
        self._came = time.monotonic()
        self.context: CallContext | None = None
        self._ran = False
        """Whether the handler was entered: what is raised then is its own."""
        self._generator: Generator[Any, None, Any] | None = None
        self._flow: threading.Lock | None = None
        """Of a stream: guards the credit, and whether it rests."""
        self._credit = 0
        self._rests = False
        """Whether the generator waits for its reader."""
        self._more: Callable[[], None] | None = None
        """Wakes an asynchronous generator that waits for its reader."""

    def _take(self) -> Frame | None:
        try:
            frame = self._frames.pop()
        except IndexError:
            return None
        if frame.size > LONG:
            with self.link._counting:
                self.link.waiting_bytes -= frame.size
        return frame

    def __call__(self) -> None:
        link = self.link
        if link.put_off(self):
            return
        frame = self._take()
        if frame is None or (link.ended is not None and self.number):
            return  # nobody waits for it; a notification is still meant after its sender has gone
        try:
            if link.closing:
                raise Cancelled("the agent there is being closed")
            name, target, seconds, args, kwargs = link.read(frame)
            self.context = context = CallContext(link.peer, name, self._came + seconds, seconds)
            if context.cancelled:
                self._done()
                return
            function, args = link.find(name, target, args)
            args, kwargs = function.signature.bind(function.name, args, kwargs)
            self._ran = True
            if function.is_coroutine:
                link.loop.run(self._await(context, function, args, kwargs), context)
                return
            token = _current.set(context)
            try:
                result = function.call(*args, **kwargs)
            finally:
                _current.reset(token)
            if target == CREATE:
                self._keep(name, result, context)
            elif isinstance(result, Generator):
                self._stream(result)
            else:
                self._answer(result)
        except BaseException as error:
            self._fail(error)

    def _keep(self, class_name: str, instance: Any, context: CallContext) -> None:
        if not self.number:
            return  # nobody would ever name it
        number = self.link.keep(self.number, class_name, instance)
        if context._cancelled:  # perhaps before it was kept
            self.link._free(number)
        self._answer(number)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _done(self) -> None:
        if self.number:
            self.link.requests.pop(self.number, None)

    def _answer(self, result: Any) -> None:
        if not self.number:
            return
        if self.context is None or not self.context.cancelled:  # also if it is too late
            self.link.answer(CallKind.RESULT, self.number, result)
        self._done()

    def _fail(self, error: BaseException) -> None:
        link, context = self.link, self.context
        self._done()
        if not self.number:
            if not isinstance(error, Cancelled):
                logger.warning("rank %d notified this rank, and that failed: %s", link.peer, describe(error))
            return
        if context is not None and context._cancelled:
            return  # nobody waits for it
        kind, trace = "raised", ""
        if self._ran:
            trace = render_traceback(error)
        else:
            kind = next((kind for kind, error_type in _KINDS if isinstance(error, error_type)), kind)
        link.answer_error(self.number, kind, type_name(error), message_of(error), trace)

    def cancel(self) -> None:
        """The caller has given up, or is gone."""
        self._done()
        if self._take() is not None:
            return
        if self.context is not None:
            self.context.cancel()
        if self._flow is None:
            return
        with self._flow:
            rested, self._rests = self._rests, False
        if rested:
            self.link.service.add(self._close_generator)

    # -- streams -------------------------------------------------------------------------------------------------------

    def _stream(self, generator: Generator[Any, None, Any]) -> None:
        if not self.number:
            for _ in generator:  # nobody listens, but it may do something
                pass
            return
        self._generator = generator
        self._flow = threading.Lock()
        self._credit = WINDOW
        self.link.answer(CallKind.STREAM, self.number)
        self._go_on()

    def _go_on(self) -> None:
        """Sends items as long as the reader can take them; the thread is free while it cannot."""
        generator, context, flow = self._generator, self.context, self._flow
        assert generator is not None
        assert context is not None
        assert flow is not None
        token = _current.set(context)
        try:
            while not context._cancelled:
                with flow:
                    if self._credit <= 0:
                        self._rests = True
                        return
                    self._credit -= 1
                context.renew()
                try:
                    item = next(generator)
                except StopIteration:
                    self._answer(None)
                    return
                self.link.answer(CallKind.ITEM, self.number, item)
        except BaseException as error:
            self._fail(error)
        finally:
            _current.reset(token)
        if context._cancelled:
            self._close_generator()

    def _close_generator(self) -> None:
        try:
            if self._generator is not None:
                self._generator.close()
        except Exception:
            logger.exception("a generator failed while it was closed")

    def grant(self, items: int) -> None:
        """The reader can take more items. Called by the mover."""
        if self._flow is None:  # it is no stream
            return
        with self._flow:
            self._credit = min(self._credit + items, WINDOW)
            rested, self._rests = self._rests, False
        if self._more is not None:
            self._more()
        elif rested:
            self.link.service.add_by_mover(self._go_on)

    # -- coroutines ----------------------------------------------------------------------------------------------------

    async def _await(self, context: CallContext, function: Function, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Runs in the event loop."""
        import asyncio

        _current.set(context)
        try:
            made = function.call(*args, **kwargs)
            if inspect.isasyncgen(made):
                await self._stream_async(made, context)
            else:
                self._answer(await made)
        except asyncio.CancelledError:
            self._fail(Cancelled(f"{function.name!r} was cancelled"))
        except BaseException as error:
            self._fail(error)

    async def _stream_async(self, items: AsyncIterator[Any], context: CallContext) -> None:
        import asyncio

        if not self.number:
            async for _ in items:  # nobody listens, but it may do something
                pass
            return
        granted = asyncio.Event()
        self._more = functools.partial(soon, asyncio.get_running_loop(), granted.set)
        self._flow = threading.Lock()
        self._credit = WINDOW
        self.link.answer(CallKind.STREAM, self.number)
        async for item in items:
            context.renew()
            while self._credit <= 0:
                granted.clear()
                if self._credit <= 0:
                    await granted.wait()
            with self._flow:
                self._credit -= 1
            self.link.answer(CallKind.ITEM, self.number, item)
        self._answer(None)


_KINDS: tuple[tuple[str, type[Exception]], ...] = (
    ("not found", FunctionNotFound),
    ("argument", InvalidArgument),
    ("message", InvalidMessage),
    ("cancelled", Cancelled),
)
"""What may go wrong before the handler is entered."""
