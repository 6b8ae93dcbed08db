"""An event that comes once, for threads that an exception of a signal handler may interrupt at any moment."""

from __future__ import annotations

import contextlib
import threading
import time

__all__ = ["OneEvent"]

LOOK = 1.0
"""Seconds after which a thread looks again: another that was interrupted just after its wake-up wakes nobody else."""


class OneEvent:
    """As `threading.Event`, without `clear`, and made of one lock of C alone.

    The condition in a `threading.Event` is code in Python: Ctrl-C in the middle of it leaves its lock taken, and then
    neither `wait` nor `set` returns, whatever their timeouts.
    """

    __slots__ = ("_closed", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._closed = threading.Lock()
        """Taken until it is set."""
        self._closed.acquire()

    def set(self) -> None:
        """Wakes all threads, now and later. May be called again."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._closed.release()

    def wait(self, seconds: float | None) -> bool:
        """Sleeps until it is set; False if the time was over first."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._is_set:
            left = LOOK if end is None else min(LOOK, end - time.monotonic())
            if left <= 0:
                return False
            if self._closed.acquire(timeout=left):
                with contextlib.suppress(RuntimeError):  # set again meanwhile
                    self._closed.release()  # for the next thread
        return True
