"""A thread that Phalanx runs beside the user's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from .one_event import OneEvent

__all__ = ["BackgroundThread", "uninterrupted"]

Result = TypeVar("Result")


class BackgroundThread:
    """A daemon thread with a name, that runs one function. It never keeps the process from ending.

    To stop it, its owner makes the function return and then calls `join`. A forked child has a copy of this object but
    no thread: there `is_alive` is false and `join` returns at once.

    Args:
        run: The function. When it has returned, the thread holds no reference to it any more.
        name: The thread's name, as `threading.enumerate` shows it.
        on_error: Called in the thread with the exception that ended `run`. By default `threading.excepthook` prints it.
    """

    def __init__(
        self, run: Callable[[], None], name: str, *, on_error: Callable[[Exception], None] | None = None
    ) -> None:
        self._thread = threading.Thread(target=_run, args=(run, on_error), name=name, daemon=True)

    def start(self) -> BackgroundThread:
        """Starts the thread, once; returns this object.

        Raises:
            RuntimeError: The thread was started before, or the system has no thread left.
        """
        self._thread.start()
        return self

    @property
    def is_started(self) -> bool:
        """True once the thread has been started, also when it has ended."""
        return self._thread.ident is not None

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True if the caller is this thread."""
        return threading.current_thread() is self._thread

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, for `timeout` seconds at most. The thread itself does not wait."""
        if not self.is_current:
            self._thread.join(timeout)


def _run(run: Callable[[], None], on_error: Callable[[Exception], None] | None) -> None:
    try:
        run()
    except Exception as error:
        if on_error is None:
            raise
        on_error(error)


def uninterrupted(job: Callable[[], Result], name: str) -> Result:
    """Calls `job` outside the main thread, where no signal handler raises in the middle of it. Returns its result.

    If a handler raises meanwhile, the caller waits no longer, but the job goes on to its end.

    Args:
        name: Of the thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return job()
    done, results, errors = OneEvent(), list[Result](), list[BaseException]()

    def run() -> None:
        try:
            results.append(job())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    try:
        BackgroundThread(run, name).start()
    except RuntimeError:  # no thread is left
        return job()
    done.wait(None)
    if errors:
        raise errors.pop()
    return results.pop()
