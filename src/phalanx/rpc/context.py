"""The call that a handler serves: who made it, how much time is left, and whether it was given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["CallContext", "current_call", "running_call", "time_left"]

logger = logging.getLogger("phalanx.rpc")

running_call: ContextVar[CallContext | None] = ContextVar("phalanx_rpc_call", default=None)


class CallContext:
    """A call that is being served.

    Attributes:
        caller: The rank that called.
        name: The name that was called.
    """

    # Defaults of the class: few calls change them.
    _cancelled = False
    _callbacks: list[Callable[[], None]] | None = None

    def __init__(self, caller: int, name: str, ends: float, seconds: float) -> None:
        self.caller = caller
        self.name = name
        self._ends = ends
        self._seconds = seconds

    @property
    def time_left(self) -> float:
        """Seconds until the caller's deadline; 0 once it has passed."""
        return max(0.0, self._ends - time.monotonic())

    def _renew(self) -> None:
        """Gives the next item of a stream the whole time of the call."""
        self._ends = time.monotonic() + self._seconds

    @property
    def cancelled(self) -> bool:
        """True once the caller has given up, is gone, or its time is over: then the result is dropped."""
        return self._cancelled or time.monotonic() >= self._ends

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Runs `callback` when the caller gives up, or now if it has. It must be short."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self._cancelled:
            self._cancel()

    def forget(self, callback: Callable[[], None]) -> None:
        """Undoes `on_cancel`."""
        if self._callbacks is not None and callback in self._callbacks:
            self._callbacks.remove(callback)

    def _cancel(self) -> None:
        """Notes that the caller has given up, and runs the callbacks."""
        self._cancelled = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            try:
                callback()
            except Exception:  # the handler's own mistake: other calls go on
                logger.exception("a callback of a cancelled call of %r failed", self.name)


def current_call() -> CallContext | None:
    """The call that the running handler serves; None outside of handlers."""
    return running_call.get()


def time_left() -> float | None:
    """Seconds until the deadline of the call that the running handler serves; None outside of handlers."""
    context = running_call.get()
    return None if context is None else context.time_left
