"""The handle of an operation under way."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ..arguments import as_seconds, shown
from ..deadline import Deadline
from ..errors import Timeout, UsageError
from ..frames import hide_frames
from ..one_event import OneEvent

__all__ = ["NEVER_HELD_LONG", "Work"]

T_co = TypeVar("T_co", covariant=True)

logger = logging.getLogger("phalanx.group")

ENDING = 4.0
"""Seconds after its deadline in which an operation ends itself: it may have to wait for a kernel that another rank has
launched, 0.8 s at most, and it asks the others what they are doing."""
NEVER_HELD_LONG = threading.Lock()
"""The lock of all work that had ended when it was made: nothing of it changes any more."""


class Work(Generic[T_co]):
    """An operation under way. It has its own deadline, so it ends by itself, with a result or with an error.

    Work can be awaited in asyncio. `Work[T]` has a result of type T.
    """

    # Here and not in `__init__`, which short operations would feel.
    _deadline: Deadline | None = None
    _drive: Callable[[Deadline], object] | None = None
    """Moves this operation's bytes in the waiting thread, if that is of use."""
    _urge: Callable[[], object] | None = None
    """Has another thread begin with it at once."""
    _withdraw: Callable[[BaseException], object] | None = None
    """Ends it with this error, and takes back what is not done of it, if that can be taken back."""
    _done = False
    _ended: OneEvent | None = None
    """Made for the first thread that sleeps until the end."""
    _result: Any = None
    _error: BaseException | None = None
    _callbacks: tuple[Callable[[Work[Any]], object], ...] = ()

    if not TYPE_CHECKING:  # type checkers would take every name for one that exists

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else " (it is an operation under way: its wait() gives the result)"
            try:
                raise AttributeError(f"'Work' object has no attribute {name!r}{hint}", name=name)
            except AttributeError as error:
                error.__traceback__ = None  # the line that asked for it says it all
                raise

    def __init__(
        self,
        operation: str,
        deadline: Deadline,
        *,
        drive: Callable[[Deadline], object] | None = None,
        on_told: Callable[[], None] = lambda: None,
    ) -> None:
        self._operation = operation
        self._deadline = deadline
        self._drive = drive
        self._on_told = on_told
        """Called when the program is given the error that the operation ended with."""
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> T_co:
        """Waits for the result. The operation goes on if this wait ends before it.

        Args:
            timeout: Seconds; without it, as long as the operation itself may take.

        Raises:
            Timeout: It is not done yet.
            PhalanxError: Whatever the operation raised.
        """
        if self._done and timeout is None and self._error is None:  # as of most short messages
            result: T_co = self._result
            return result
        try:
            if timeout is not None:
                as_seconds(timeout)
            if not self._done:
                self._help(timeout)
            if not self._done:
                deadline = Deadline.of(timeout, self._remaining() + ENDING)
                drive = self._drive
                if drive is not None:
                    drive(deadline)
                if not self._sleep(deadline.remaining()):
                    raise Timeout(
                        f"{self._operation} is not done after {deadline.seconds:g} s",
                        seconds=deadline.seconds,
                        operation=self._operation,
                    )
            return self.result()
        except BaseException as error:
            hide_frames(error)
            raise

    def done(self) -> bool:
        """True once it has ended, with a result or an error."""
        return self._done

    def result(self) -> T_co:
        """The result of work that is done.

        Raises:
            UsageError: It is not done: call `wait`.
            PhalanxError: Whatever the operation raised.
        """
        try:
            if not self._done:
                raise UsageError(f"{self._operation} is still under way (call wait() first)")
            if self._error is not None:
                self._on_told()
                raise self._error
            ended: T_co = self._result
            return ended
        except BaseException as error:
            hide_frames(error)
            raise

    def exception(self) -> BaseException | None:
        """The error it ended with; None if it went well or is still under way."""
        if self._error is not None:
            self._on_told()
        return self._error

    def add_done_callback(self, callback: Callable[[Work[T_co]], object]) -> None:
        """Calls `callback(work)` once it is done, from the thread that ends it; at once if it is done already.

        That thread has other work to do, perhaps for the whole process, so a callback should be short and not wait. An
        exception of the callback is logged.

        Raises:
            UsageError: It cannot be called.
        """
        if not callable(callback):
            raise UsageError(f"callback={shown(callback)} is not valid (expected a function of the work)")
        with self._lock:
            waits = not self._done
            if waits:
                self._callbacks += (callback,)
                self._hurry()
        if not waits:
            self._call(callback)
        elif self._done:  # since then, perhaps by a thread that saw no callback
            self._finish(self._result)

    def __await__(self) -> Generator[Any, None, T_co]:
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_loop(_work: Work[T_co]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(wake_loop)
        try:
            yield from future.__await__()
            return self.result()
        except BaseException as error:
            hide_frames(error)
            raise

    def __repr__(self) -> str:
        state = "under way" if not self._done else "failed" if self._error is not None else "done"
        return f"<Work {self._operation}: {state}>"

    def _go_on(self, operation: str, deadline: Deadline, drive: Callable[[Deadline], object]) -> None:
        """Takes what `__init__` takes, of work that was made before these were known."""
        self._operation = operation
        self._deadline = deadline
        self._drive = drive

    def _help(self, timeout: float | None) -> None:
        """Does what a thread that waits so long can do for the operation."""

    def _hurry(self) -> None:
        """Has another thread do the operation: the caller looks for its end without waiting."""
        urge = self._urge
        if urge is not None:
            urge()

    def _remaining(self) -> float:
        """Seconds until the operation ends by itself at the latest."""
        return 0.0 if self._deadline is None else self._deadline.remaining()

    def _sleep(self, seconds: float) -> bool:
        """Sleeps until the end; False if the time was over first."""
        with self._lock:
            if self._done:
                return True
            if self._ended is None:
                self._ended = OneEvent()
        return self._done or self._ended.wait(seconds)  # it may have ended since then, without the lock

    def _finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Notes the end. May be called again: what an interrupt has kept a thread from telling is told then."""
        with self._lock:
            if not self._done:
                self._result = result
                if error is not None:
                    self._error = error
                self._done = True
            if self._ended is not None:
                self._ended.set()
        # They know this work, too: only the collector would find the memory of its message.
        self._drive = self._urge = self._withdraw = None
        while self._callbacks:
            with self._lock:
                callback, *rest = self._callbacks or (None,)
                self._callbacks = tuple(rest)
            if callback is not None:
                self._call(callback)

    def _call(self, callback: Callable[[Work[T_co]], object]) -> None:
        # It runs in a thread that has other work to do: its error is the caller's to read, not that thread's to die of.
        # Only the main thread is interrupted, and asked to end the program.
        try:
            callback(self)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            logger.exception("a callback of %r failed", self)
