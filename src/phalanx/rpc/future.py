"""The future of a call that was made by `call_async`."""

from __future__ import annotations

import concurrent.futures
import logging
import weakref
from collections.abc import Callable
from typing import Any

from ..frames import hide_frames
from ..news import News
from ..system_limits import raise_limit
from .caller import CallerLink
from .pending_call import PendingCall

__all__ = ["RpcFuture"]

logger = logging.getLogger("concurrent.futures")
"""As the base class does, for what a callback raises."""

_NOTHING: Any = object()
_PENDING, _CANCELLED = "PENDING", "CANCELLED"  # as concurrent.futures names them


class RpcFuture(concurrent.futures.Future[Any]):
    """The answer of a call that was made by `call_async`. `cancel` also tells the other rank.

    Most programs only ask for the result. Then the base class is not needed at all: it is used from the first time on
    that anybody takes its condition, which everything else does.
    """

    # As the constructor of the base class sets them, which is not called.
    _state = _PENDING
    _result = None
    _exception = None

    _value: Any = _NOTHING
    """The result, once somebody has read it."""
    _made: News | None = None
    _done_callbacks: list[Any]

    def __init__(self, link: CallerLink, pending: PendingCall) -> None:
        self._link = link
        self._call = pending
        pending.future = weakref.ref(self)

    @property
    def _condition(self) -> News:  # type: ignore[override]
        """The guard of the state in the base class, by which it also wakes waiting threads. Made on first use."""
        made = self._made
        if made is None:
            own = self.__dict__  # of two threads, one makes each of these
            own.setdefault("_waiters", [])
            own.setdefault("_done_callbacks", [])
            made = own.setdefault("_made", News())
            self._call.on_finish = self._complete
            if self._call.done:  # perhaps before it could tell
                self._complete()
        return made

    def done(self) -> bool:
        """True if the call has ended, by its answer or otherwise."""
        return self._call.done or (self._made is not None and super().done())

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the answer; returns or raises it."""
        if self._value is not _NOTHING:
            return self._value
        try:
            if not self._call.done:
                self._wait(timeout)
            if self._made is None and (head := self._call.head) is not None:
                return self._read(head)
            return super().result(self._rest(timeout))
        except BaseException as error:
            hide_frames(error)
            raise_limit(error)
            raise

    def _read(self, head: bytes) -> Any:
        """The value of a plain answer: the same one for all threads that ask."""
        value = self.__dict__.setdefault("_value", self._link.plain_result(self._call, head))
        self._call.head = None  # it may be large, and the program may keep the future
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the answer; returns what the call raised, or None."""
        self._wait(timeout)
        return super().exception(self._rest(timeout))

    def _wait(self, timeout: float | None) -> None:
        """Reads the answer in this thread, unless another thread reads the link."""
        link, call = self._link, self._call
        if call.done or self._state != _PENDING:
            return
        deadline = call.deadline if timeout is None else call.deadline.sooner(timeout)
        with link.poller.blocking():
            done = link.wait(call, deadline)
        if not done and call.deadline.expired:
            link.abandon(call, link.timed_out(call))

    def _rest(self, timeout: float | None) -> float | None:
        """Seconds to wait for the thread that has seen the answer, or the end of the call's time, to set it here."""
        return None if timeout is None or self._call.done or self._call.deadline.expired else 0

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Runs `fn(self)` once it is done, in a thread of the agent's."""
        super().add_done_callback(fn)
        if not self.done():
            self._link.poll_now()

    def cancel(self) -> bool:
        """Gives the call up; False if it is done. If the other rank has not begun it, it never will."""
        with (news := self._condition):
            # Of a call that is done, another thread may be about to set the answer, or have returned it.
            if self._state == _PENDING and not self._call.done:
                self._state = _CANCELLED
            if self._state == _CANCELLED:  # `wait` and `as_completed` count it from the next state on
                news.notify_all()
                self.set_running_or_notify_cancel()
        if not self.cancelled():
            return False
        self._invoke_callbacks()  # also those that a call before has left, which a signal handler has cut short
        self._link.abandon(self._call, None)
        return True

    def _complete(self) -> None:
        """Sets the result or the exception of the finished call, once."""
        mine = object()
        if self.__dict__.setdefault("_completer", mine) is not mine:
            return
        call = self._call
        call.on_finish = None  # or the link would keep this alive, if the call is a stream
        head = call.head  # before looking at `_value`: another thread may set that, and then take this away
        if head is None and call.frame is None and call.error is None and self._value is _NOTHING:
            return  # given up, by `cancel`
        try:
            if self._value is not _NOTHING:
                value = self._value
            else:
                value = self._link.result(call) if head is None else self._link.plain_result(call, head)
        except BaseException as error:
            self._settle(None, error)
            if not isinstance(error, Exception):  # Ctrl-C, perhaps: this thread hears of it, too
                raise
        else:
            self._settle(value, None)
        finally:
            call.head = call.frame = None  # it may be large, and the program may keep the future

    def take_stream(self) -> None:
        """Takes the reader of a stream that has begun, so that it lives as long as this future."""
        with self._condition:
            pass

    def _settle(self, value: Any, error: BaseException | None) -> None:
        with self._condition:
            if self._state != _PENDING:
                return  # cancelled before the answer came; from now on it cannot be
            if error is None:
                value = self.__dict__.setdefault("_value", value)
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def _invoke_callbacks(self) -> None:
        # Callbacks may do anything, call this rank again for one: not in the middle of moving the link's bytes.
        if not self._done_callbacks:
            return
        if self._link.ended is None:
            self._link.poller.run_soon(self._run_callbacks)
        else:  # perhaps the agent is closed, and its thread would never run them
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Runs each callback, once whoever else does so."""
        while self._done_callbacks:
            try:
                callback = self._done_callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            try:
                callback(self)
            except Exception:
                logger.exception("a callback of %r failed", self)
