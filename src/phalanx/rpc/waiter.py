"""A thread that waits for something on a link: what says that it has happened, and how the thread sleeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["ConditionWaiter", "SlotWaiter", "Waiter"]


class Waiter:
    """Something on a link that a thread waits for, or several. `done` says that it has happened."""

    done = False
    spun = False
    """Whether it has looked for bytes again and again already, and is to sleep at once."""
    _sleep: list[Any] | None = None
    """The locks of the threads that sleep."""

    def prepare_to_sleep(self) -> Any:
        """Returns a lock to sleep on, which is the calling thread's alone; `wake` releases it."""
        lock = threading.Lock()
        lock.acquire()
        self.__dict__.setdefault("_sleep", []).append(lock)  # of two threads, one makes the list
        return lock

    def wake(self) -> None:
        """Wakes the threads: it is done, or one of them has to become the mover."""
        sleep = self._sleep
        while sleep:
            try:
                lock = sleep.pop()
            except IndexError:  # another thread took it
                return
            lock.release()


class ConditionWaiter(Waiter):
    """Waits until something holds which the mover brings about, such as room in the link's queue."""

    __slots__ = ("_holds",)

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    @property
    def done(self) -> bool:  # type: ignore[override]
        return self._holds()


class SlotWaiter:
    """A thread that waits until its call may be in flight."""

    __slots__ = ("bell", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.bell = threading.Lock()
        self.bell.acquire()

    def wake(self) -> None:
        """Has it look whether it may go."""
        with contextlib.suppress(RuntimeError):  # it is awake
            self.bell.release()
