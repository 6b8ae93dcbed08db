"""Whose turn it is to run a collective of a group, where there is no core."""

from __future__ import annotations

import threading

__all__ = ["PlainTurnLock"]


class PlainTurnLock:
    """As the core's `TurnLock`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def acquire(self, timeout: float) -> bool:
        """False if the time was over first, or this thread has it already."""
        if self.is_mine() or not self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            return False
        self._holder = threading.get_ident()
        return True

    def release(self) -> None:
        self._holder = None
        self._lock.release()

    def is_mine(self) -> bool:
        """Whether this very thread has it: then a signal's handler asks, in the middle of a collective."""
        return self._holder == threading.get_ident()
