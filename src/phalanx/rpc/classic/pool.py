"""Threads that run the handlers of remote calls on the classic wire."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ...background_thread import BackgroundThread
from ...deadline import Deadline
from ...news import News

__all__ = ["HandlerPool"]

Item = TypeVar("Item")


class HandlerPool(Generic[Item]):
    """Threads that run handlers: at most `workers` at a time, not counting those that wait for a call of their own.

    If waiting handlers counted, calls that go back and forth between two ranks could use up the workers of both, and
    each rank would wait for the other for ever.

    Args:
        run: Called with each item; raises nothing.
        limit: Items that were submitted and are not done, which also bounds the threads; None for no limit.
    """

    def __init__(self, run: Callable[[Item], None], workers: int, limit: int | None) -> None:
        self._run = run
        self._workers = workers
        self._limit = limit
        self._changed = News()
        self._items: deque[Item] = deque()
        self._unfinished = 0
        self._running = 0
        """Threads that run a handler, or are about to."""
        self._idle = 0
        self._threads: set[BackgroundThread] = set()
        self._closed = False
        self._mine = threading.local()

    def submit(self, item: Item) -> bool:
        """Queues an item; False if there are too many, or the pool is closed."""
        with self._changed:
            if self._closed or (self._limit is not None and self._unfinished >= self._limit):
                return False
            self._items.append(item)
            self._unfinished += 1
            self._give_place()
        return True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds code that may block: meanwhile another thread may run. Afterwards there may be one too many."""
        if not getattr(self._mine, "running", False):
            yield
            return
        with self._changed:
            self._running -= 1
            self._give_place()
        try:
            yield
        finally:
            with self._changed:
                self._running += 1

    def close(self) -> list[Item]:
        """Accepts no more items and lets the threads end; returns the items that had not begun."""
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
        return left

    def join(self, deadline: Deadline) -> None:
        """Waits until the threads have ended."""
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(deadline.remaining())

    def _give_place(self) -> None:
        """Wakes or starts a thread for the next item, if one more may run. Called with the lock held."""
        if not self._items or self._running >= self._workers:
            return
        if self._idle:
            self._idle -= 1
            self._changed.notify()
        else:
            thread = BackgroundThread(self._work, "phalanx-calls").start()
            # Threads without work have ended. None removes itself, so that `join` sees its real end.
            self._threads = {thread, *(other for other in self._threads if other.is_alive)}
        self._running += 1

    def _work(self) -> None:
        """Runs items until the pool closes or there are enough idle threads. Counts as running from the start."""
        self._mine.running = True
        while (item := self._next()) is not None:
            self._run(item[0])
            del item  # do not keep it alive until the next one comes
            with self._changed:
                self._unfinished -= 1

    def _next(self) -> tuple[Item] | None:
        with self._changed:
            while not self._closed:
                if self._items and self._running <= self._workers:
                    return (self._items.popleft(),)
                self._running -= 1
                if self._idle >= self._workers:
                    break
                self._idle += 1
                self._changed.wait()  # the notifying thread has counted this one as running, or closed the pool
            return None
