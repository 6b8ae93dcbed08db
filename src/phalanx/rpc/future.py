"""The future of a call that was made by `call_async`."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from ..frames import hide_frames
from .caller import CallerLink, PendingCall

__all__ = ["RpcFuture"]


_NOTHING: Any = object()
_PENDING, _FINISHED = "PENDING", "FINISHED"  # as concurrent.futures names them


class RpcFuture(concurrent.futures.Future[Any]):
    """The answer of a call that was made by `call_async`. `cancel` also tells the other rank."""

    def __init__(self, link: CallerLink, pending: PendingCall) -> None:
        # As the constructor of the base class, which is not called: it makes a condition, and few futures need one.
        self._state = _PENDING
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self._lock = threading.RLock()
        self._link = link
        self._call = pending
        pending.on_finish = self._complete

    _value: Any = _NOTHING
    """The result, once it is set: to return it takes no lock."""
    _made: threading.Condition | None = None

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """The guard of the state in the base class, by which it also wakes waiting threads. Made on first use."""
        made = self._made
        if made is None:
            with self._lock:
                made = self._made = self._made or threading.Condition(self._lock)
        return made

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the answer; returns or raises it."""
        if self._value is not _NOTHING:
            return self._value
        try:
            self._wait(timeout)
            if self._value is not _NOTHING:
                return self._value
            return super().result(self._rest(timeout))
        except BaseException as error:
            hide_frames(error)
            raise

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
        if not super().cancel():
            return False
        self._link.abandon(self._call, None)
        return True

    def _complete(self) -> None:
        """Sets the result or the exception of the finished call."""
        if self._call.frame is None and self._call.error is None:  # given up, by `cancel`
            self._link.end_unattended()
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
            self._call.frame = None  # it may be large, and the program may keep the future
            self._link.end_unattended()

    def _settle(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._made is None and error is None and self._state == _PENDING:  # nobody waits, nor has a callback
                self._value = self._result = value
                self._state = _FINISHED
                return
        try:
            if error is None:
                self.set_result(value)
                self._value = value
            else:
                self.set_exception(error)
        except concurrent.futures.InvalidStateError:  # cancelled just now
            pass

    def _invoke_callbacks(self) -> None:
        # Callbacks may do anything, call this rank again for one: not in the middle of moving the link's bytes.
        if not self._done_callbacks:
            return
        if self._link.ended is None:
            self._link.poller.run_soon(super()._invoke_callbacks)  # type: ignore[misc]
        else:  # perhaps the agent is closed, and its thread would never run them
            super()._invoke_callbacks()  # type: ignore[misc]
