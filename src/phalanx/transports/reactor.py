"""One thread and one selector that serve sockets nobody waits for: listeners, handshakes, control connections."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from ..background_thread import BackgroundThread

__all__ = ["READ", "WRITE", "Reactor"]

logger = logging.getLogger("phalanx.reactor")

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Reactor:
    """Runs callbacks in its own thread when a descriptor is ready or a time has come.

    Everything but `call_soon`, `start` and `stop` is called from that thread alone, so callbacks need no locks among
    themselves.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stopping = False
        self._closed = False
        self._lock = threading.RLock()  # `call_soon` may be called by a signal handler in the middle of itself
        self._selector.register(self._wake_read, READ, self._drain_wake)
        self.thread = BackgroundThread(self._run, name)

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()

    def call_soon(self, callback: Callable[[], None]) -> bool:
        """Runs `callback` in the reactor's thread; from any thread. False if the reactor has ended."""
        with self._lock:
            if self._closed:
                return False
            try:
                self._soon.append(callback)
                self._wake()
            except BaseException:  # Ctrl-C: it will be run, so let it be soon
                self._wake()
                raise
        return True

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Runs `callback` after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), callback))

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Runs `callback(ready events)` whenever `fd` is ready for `events`; replaces what was watched on it before."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def forget(self, fd: int) -> None:
        """Stops watching `fd`; call it before the descriptor is closed."""
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread after what was asked for so far, and gives the descriptors back. May be called twice."""

        def end() -> None:
            self._stopping = True

        if self.call_soon(end):
            self.thread.join(timeout)

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: closes the descriptors only."""
        if self._closed:
            return  # they are given back, and their numbers may be another's by now
        self._closed = True
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"\0")

    def _drain_wake(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            with self._lock:
                self._closed = True
                self._selector.close()
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _turn(self) -> None:
        for key, events in self._selector.select(self._next_wait()):
            # An earlier callback of this turn may have closed this descriptor.
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.data is key.data:
                self._guard(functools.partial(key.data, events))
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._guard(heapq.heappop(self._timers)[2])
        for _ in range(len(self._soon)):
            self._guard(self._soon.popleft())

    def _next_wait(self) -> float | None:
        if self._soon:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    @staticmethod
    def _guard(callback: Callable[[], None]) -> None:
        # A bug in one connection's callback must not end the service of all others.
        try:
            callback()
        except Exception:
            logger.exception("a callback failed")
