"""A call that is served: from its arrival until its answer is sent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import numpy as np

from ..arguments import in_units
from ..errors import Cancelled, FunctionNotFound, InvalidArgument, InvalidMessage, PhalanxError, UsageError
from ..exception_text import describe, message_of, type_name
from ..frames import user_traceback
from ..slate.calls import CALLS
from ..wire.calls import CallKind
from ..wire.near_arrays import pack_value
from ..wire.packing import SIMPLE
from .backpressure import LONG, ThrottledLink
from .context import CallContext, running_call
from .event_loop import soon
from .frame_reader import Frame, read_request
from .link import MAX_QUEUED, WINDOW
from .payload import NOT_FAST, encode_error, encode_value, fast_call
from .pipe import NOT_POSTED, POSTED
from .registry import CREATE, Function, Registry

__all__ = ["ServedCall"]

logger = logging.getLogger("phalanx.rpc")

_KINDS: tuple[tuple[str, type[Exception]], ...] = (
    ("not found", FunctionNotFound),
    ("argument", InvalidArgument),
    ("message", InvalidMessage),
)
"""The errors that can happen before the handler is entered, and how the answer names them."""

_RESULT = int(CallKind.RESULT)  # the core takes a plain int sooner
QUICK = 50e-6
"""Seconds of a handler for which earlier answers may wait, to be sent together with its own."""
_NO_STREAMS = SIMPLE | {bytes, list, dict, tuple, np.ndarray}
"""Types of results that are quickly known to be no generators; to ask an abstract class takes longer."""


class ServedCall:
    """A call that is served, from its arrival until its answer is sent. Calling this object runs the handler."""

    # Defaults of the class, not set for each call: only a few kinds of calls change them.
    context: CallContext | None = None
    _given_up = False
    """Whether `cancel` was called. Set before it looks for the context, and read once there is one: the call may be
    cancelled just after a thread has taken its request."""
    _entered_at = 0.0
    """When the handler was entered: then an exception is its own."""
    _counted = False
    _is_quick = False
    """Whether the handler has just ended after a short time, so that its answer may wait for those after it."""
    _generator: Generator[Any, None, Any] | None = None
    _flow: threading.Lock | None = None
    """Guards the credit and the pause of a stream; None if this is not a stream."""
    _credit = 0
    _paused = False
    """Whether the generator waits for its reader to grant more credit."""
    _on_credit: Callable[[], None] | None = None
    """Wakes an asynchronous generator that waits for credit."""

    def __init__(self, link: ThrottledLink[ServedCall], request: Frame | bytes, number: int, arrived_at: float) -> None:
        self.link = link
        self.number = number
        """The number of the call; 0 for a notification, which has no answer."""
        self._requests = [request]
        """The request, as a frame or as the head of a plain one. The thread that takes it out decides what happens: the
        call is run, or cancelled."""
        self.arrived_at = arrived_at

    def _take(self) -> Frame | bytes | None:
        try:
            request = self._requests.pop()
        except IndexError:
            return None
        if not isinstance(request, bytes) and request.size > LONG:
            self.link.count_waiting(-request.size)
        return request

    def __call__(self) -> None:
        link = self.link
        if link.queued_bytes > MAX_QUEUED and link.postpone(self):
            return
        request = self._take()
        if request is None or (link.ended is not None and self.number):
            return  # given up, or the caller is gone; a notification is still run after its sender has gone
        ended = 0.0
        try:
            if link.closing:  # the end of the link, which is near, tells the caller
                self._done()
                return
            fields = fast_call(request) if type(request) is bytes else NOT_FAST
            if fields is NOT_FAST:
                fields = read_request(request, link.limits)
            name, target, seconds, args, kwargs = fields
            ends = self.arrived_at + seconds
            self.context = context = CallContext(link.peer, name, ends, seconds)
            if self._given_up:
                return
            now = time.monotonic()
            if now >= ends:
                self._done()
                return
            registry = link.registry()
            if registry is None:  # the agent was dropped, and is about to close
                self._done()
                return
            function, args = registry.find(link, name, target, args)
            args, kwargs = function.signature.bind(function.name, args, kwargs)
            self._entered_at = now
            if function.is_coroutine:
                link.loop.run(self._await(context, function, args, kwargs), context)
                return
            if link.poller.holding and not function.is_quick:
                link.poller.send_held()
            token = running_call.set(context)
            try:
                result = function.call(*args, **kwargs)
            finally:
                running_call.reset(token)
            ended = time.monotonic()
            self._is_quick = function.is_quick = ended - now < QUICK
            is_stream = type(result) not in _NO_STREAMS and isinstance(result, Generator)
            if not is_stream and target != CREATE:
                self._answer(result, ended)  # before it is counted: the caller waits
            self._counted = True
            CALLS.add(name, -1, True, ended - self.arrived_at, now - self.arrived_at, ended - now)
            if target == CREATE:
                self._keep(registry, name, result, context)
            elif is_stream:
                self._stream(result)
        except BaseException as error:
            if self._entered_at and not self._counted and self.context is not None:
                self._count(self.context.name, ended > 0)
            self._fail(error)

    def _count(self, name: str, ok: bool) -> None:
        """Counts the call, once its handler has ended. `ok`: it has returned."""
        self._counted = True
        arrived, entered, now = self.arrived_at, self._entered_at, time.monotonic()
        CALLS.add(name, -1, ok, now - arrived, entered - arrived, now - entered)

    def _keep(self, registry: Registry, class_name: str, instance: Any, context: CallContext) -> None:
        """Keeps an object for the caller, under the number of the call that made it, and answers with that."""
        if not self.number:
            return  # the caller will never know its number
        link, number = self.link, self.number
        registry.objects[link, number] = (class_name, instance)
        if link.ended is not None:  # just now: it would never be freed
            registry.free_all(link)
        if context._cancelled:  # perhaps before it was kept
            registry.free(link, number)
        self._answer(number)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _done(self) -> None:
        if self.number:
            self.link.served.pop(self.number, None)

    def _answer(self, result: Any, now: float | None = None) -> None:
        number = self.number
        if not number:
            return
        context, link = self.context, self.link
        if context is None or not (context._cancelled or (time.monotonic() if now is None else now) >= context._ends):
            head = pack_value(result, link.limits.max_depth)
            if head is None or len(head) > link.longest_held:
                self._send(_RESULT, result)
            # The answer of a quick call may wait for those of the calls after it.
            elif not self._is_quick or not link.poller.hold(link, _RESULT, number, head):
                posted = link.pipe.post(_RESULT, number, head)
                if posted == NOT_POSTED:
                    self._send_frame(_RESULT, head)
                elif posted != POSTED:
                    link.send_held()
        link.served.pop(number, None)

    def _fail(self, error: BaseException) -> None:
        link, context = self.link, self.context
        self._done()
        if not self.number:
            if not isinstance(error, Cancelled):
                logger.warning("a notification from rank %d failed: %s", link.peer, describe(error))
            return
        if link.closing or (context is not None and context._cancelled):
            return  # the end of the link tells the caller, or the caller has given up
        kind, trace = "raised", ""
        if self._entered_at:
            trace = user_traceback(error)
        else:
            kind = next((kind for kind, error_type in _KINDS if isinstance(error, error_type)), kind)
        head = encode_error(kind, type_name(error), message_of(error), trace)
        with contextlib.suppress(PhalanxError):  # the caller is gone
            if not link.send(CallKind.ERROR, self.number, head):
                link.ask_poller()

    def _send(self, kind: int, value: Any = None) -> None:
        """Sends a result or an item.

        Raises:
            UsageError: The value cannot be sent.
        """
        link = self.link
        head, buffers, payload = encode_value(value, link.limits)
        if payload + len(head) > link.max_message:
            size = payload + len(head)
            raise UsageError(
                f"a result of {in_units(size)} is too large (max_message here is {in_units(link.max_message)})"
            )
        self._send_frame(kind, head, buffers, payload)

    def _send_frame(self, kind: int, head: bytes, buffers: Sequence[memoryview] = (), payload: int = 0) -> None:
        try:
            sent = self.link.send(kind, self.number, head, buffers, payload)
        except PhalanxError:
            return  # the caller is gone
        if not sent:
            self.link.ask_poller()

    def cancel(self) -> None:
        """Cancels the call: its caller has given up, or is gone."""
        self._done()
        if self._take() is not None:
            return
        self._given_up = True
        if self.context is not None:
            self.context._cancel()
        if self._flow is None:
            return
        with self._flow:
            rested, self._paused = self._paused, False
        if rested:
            self.link.poller.add(self._close_generator)

    # -- streams -------------------------------------------------------------------------------------------------------

    def _stream(self, generator: Generator[Any, None, Any]) -> None:
        if not self.number:
            for _ in generator:  # there is no reader, but it may do something
                pass
            return
        self._generator = generator
        self._flow = threading.Lock()
        self._credit = WINDOW
        self._send(CallKind.STREAM)
        self._send_items()

    def _send_items(self) -> None:
        """Sends items while there is credit. Without credit it returns, so that the thread is free."""
        generator, context, flow = self._generator, self.context, self._flow
        assert generator is not None
        assert context is not None
        assert flow is not None
        token = running_call.set(context)
        try:
            while not context._cancelled:
                with flow:
                    if self._credit <= 0:
                        self._paused = True
                        return
                    self._credit -= 1
                context._renew()
                try:
                    item = next(generator)
                except StopIteration:
                    self._answer(None)
                    return
                self._send(CallKind.ITEM, item)
        except BaseException as error:
            self._fail(error)
        finally:
            running_call.reset(token)
        if context._cancelled:
            self._close_generator()

    def _close_generator(self) -> None:
        try:
            if self._generator is not None:
                self._generator.close()
        except Exception:
            logger.exception("a generator raised while it was being closed")

    def add_credit(self, items: int) -> None:
        """Lets the stream send more items. Called by the mover."""
        if self._flow is None:  # not a stream
            return
        with self._flow:
            self._credit = min(self._credit + items, WINDOW)
            rested, self._paused = self._paused, False
        if self._on_credit is not None:
            self._on_credit()
        elif rested:
            self.link.poller.add_as_mover(self._send_items)

    # -- coroutines ----------------------------------------------------------------------------------------------------

    async def _await(self, context: CallContext, function: Function, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Runs in the event loop."""
        running_call.set(context)
        try:
            made = function.call(*args, **kwargs)
            if inspect.isasyncgen(made):
                await self._stream_async(made, context)
            else:
                result = await made
                self._count(context.name, True)
                self._answer(result)
        except asyncio.CancelledError:
            self._fail(Cancelled(f"{function.name!r} was cancelled"))
        except BaseException as error:
            self._fail(error)

    async def _stream_async(self, items: AsyncIterator[Any], context: CallContext) -> None:
        if not self.number:
            async for _ in items:  # there is no reader, but it may do something
                pass
            return
        granted = asyncio.Event()
        self._on_credit = functools.partial(soon, asyncio.get_running_loop(), granted.set)
        self._flow = threading.Lock()
        self._credit = WINDOW
        self._send(CallKind.STREAM)
        async for item in items:
            context._renew()
            while self._credit <= 0:
                granted.clear()
                if self._credit <= 0:
                    await granted.wait()
            with self._flow:
                self._credit -= 1
            self._send(CallKind.ITEM, item)
        self._answer(None)
