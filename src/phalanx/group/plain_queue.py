"""The asynchronous collectives of a group that have not ended, where there is no core."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ..alarm import PlainAlarm

__all__ = ["PlainQueue"]


class PlainQueue:
    """As the core's `WorkQueue`. There is no fast path that it could hold back."""

    def __init__(self) -> None:
        self.alarm = PlainAlarm()
        self._works: deque[Any] = deque()
        self._lock = threading.Lock()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._works)

    def push(self, work: Any, urgent: bool) -> bool:
        """False if the thread has ended: it would not run what came now."""
        with self._lock:
            if self._is_over:
                return False
            self._works.append(work)
            self.alarm.arm()
        return True

    def first(self) -> Any:
        """None if it is empty."""
        try:
            return self._works[0]
        except IndexError:
            return None

    def pop(self, work: Any) -> bool:
        """Takes the first out, which has ended; false if another thread was quicker."""
        with self._lock:
            if self.first() is not work:
                return False
            self._works.popleft()
            self.alarm.disarm()
            if self._works:
                self.alarm.arm()
        return True

    def end_if_empty(self) -> bool:
        """True if it is empty, and stays so."""
        with self._lock:
            self._is_over = not self._works
            return self._is_over
