"""Threads that run the handlers of remote calls on the classic wire."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ...deadline import Deadline

__all__ = ["HandlerPool"]

Item = TypeVar("Item")


class HandlerPool(Generic[Item]):
    """Threads that run handlers: at most `workers` at a time, not counting those that wait for a call of their own.

    If a handler that waits kept its place, calls that go back and forth between two ranks could take all places of
    both, and each would wait for the other for ever.

    Args:
        run: Is called with each item, and raises nothing.
        limit: Items taken and not yet done, which also bounds the threads; None for any number.
    """

    def __init__(self, run: Callable[[Item], None], workers: int, limit: int | None) -> None:
        self._run = run
        self._workers = workers
        self._limit = limit
        self._changed = threading.Condition(threading.RLock())
        self._items: deque[Item] = deque()
        self._unfinished = 0
        self._running = 0
        """Threads with a place: those that run a handler or are about to."""
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._mine = threading.local()

    def submit(self, item: Item) -> bool:
        """Has an item run soon; False if there are too many, or the pool is closed."""
        with self._changed:
            if self._closed or (self._limit is not None and self._unfinished >= self._limit):
                return False
            self._items.append(item)
            self._unfinished += 1
            self._give_place()
        return True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait: a thread of the pool gives its place away meanwhile. Afterwards there may be one too many."""
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
        """Takes nothing more and lets the threads end; returns what had not begun."""
        with self._changed:
            self._closed = True
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
        return left

    def join(self, deadline: Deadline) -> None:
        """Waits until the threads have ended."""
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(deadline.remaining())

    def _give_place(self) -> None:
        """Sees that somebody takes the next item, if a place is free. Called with the lock held."""
        if not self._items or self._running >= self._workers:
            return
        if self._idle:
            self._idle -= 1
            self._changed.notify()
        else:
            thread = threading.Thread(target=self._work, name="phalanx-calls", daemon=True)
            thread.start()
            # Those that had nothing to do are gone; none takes itself out, so that `join` sees it really end.
            self._threads = {thread, *(other for other in self._threads if other.is_alive())}
        self._running += 1

    def _work(self) -> None:
        """The life of a thread, which begins with a place."""
        self._mine.running = True
        while (item := self._next()) is not None:
            self._run(item[0])
            del item  # it must not be kept until the next one comes
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
                self._changed.wait()  # whoever notifies has given it a place, or has closed
            return None
