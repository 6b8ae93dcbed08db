"""The parts of a line of operations where there is no core. As the core's `OperationQueue` and `LineTurn`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

__all__ = ["PlainLine", "PlainTurn"]


class PlainLine:
    """The operations, in the order in which they run."""

    def __init__(self) -> None:
        self.is_away = False
        """Whether the line's thread runs callbacks, and so cannot serve it."""
        self._alarm: Any = None
        self._operations: deque[Any] = deque()
        self._lock = threading.Lock()

    @property
    def alarm(self) -> Any:
        """Of the line's thread; None while there is none."""
        return self._alarm

    @alarm.setter
    def alarm(self, alarm: Any) -> None:
        with self._lock:
            self._alarm = alarm
            self._tell()

    def __len__(self) -> int:
        return len(self._operations)

    def first(self) -> Any:
        """None if there is none."""
        try:
            return self._operations[0]
        except IndexError:
            return None

    def append(self, operation: Any) -> None:
        with self._lock:
            self._operations.append(operation)
            self._tell()

    def remove(self, operation: Any) -> bool:
        """False if it is not there."""
        with self._lock:
            try:
                self._operations.remove(operation)
            except ValueError:
                return False
            self._tell()
        return True

    def _tell(self) -> None:
        if self._alarm is not None:
            self._alarm.disarm()
            if self._operations:
                self._alarm.arm()


class PlainTurn:
    """Whose turn it is to run an operation: a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release, self.locked = self._lock.release, self._lock.locked

    def try_acquire(self) -> bool:
        """False if another operation runs."""
        return self._lock.acquire(blocking=False)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()
