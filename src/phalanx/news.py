"""A lock, and word of what has changed under it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

__all__ = ["News"]

_Lock: Any = type(threading.RLock())


class News(_Lock):  # type: ignore[misc]
    """As `threading.Condition`, with a lock of C that a thread may take again.

    The condition of `threading` is code in Python, also where it takes its lock: a signal handler that raises in there
    leaves the lock taken for ever, or released by two. Here `with` takes the lock in C, and no handler runs between
    that and the body.
    """

    def __init__(self) -> None:
        self._bells: deque[threading.Lock] = deque()
        """Of the threads that wait, each taken until it is to wake up."""

    def wait(self, timeout: float | None = None) -> bool:
        """Gives the lock up, sleeps until there is news, and takes the lock again; False if the time was over first."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        rung = False
        # By `map`, in one step: after a call of its own, a handler that raises would leave the lock to nobody.
        [held] = map(_Lock._release_save, (self,))
        try:
            rung = bell.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        finally:
            self._acquire_restore(held)
            try:
                self._bells.remove(bell)
            except ValueError:
                rung = True  # perhaps just now
        return rung

    def notify(self) -> None:
        """Wakes a thread that waits, if there is one. Called with the lock held."""
        with contextlib.suppress(IndexError):
            self._bells.popleft().release()

    def notify_all(self) -> None:
        """Wakes all threads that wait. Called with the lock held."""
        while self._bells:
            self.notify()
