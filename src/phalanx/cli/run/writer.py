"""One thread that writes to the launcher's outputs, so that the launcher itself never waits for a slow reader.

What waits to be written is bounded by the caller: it stops reading from the ranks while `full`, their pipes fill up,
and the ranks wait in their own writes, as they would without a launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from phalanx.background_thread import BackgroundThread

__all__ = ["OutputWriter"]

HIGH = 1 << 20
"""Bytes waiting above which the writer is full."""
LOW = 256 << 10
"""Bytes waiting below which it says that it can take more."""
PIECE = 256 << 10
"""Bytes that are joined into one write."""


class OutputWriter:
    """Writes bytes to descriptors in the order in which they were put.

    Args:
        wake: Called from the thread when a full writer can take more, and when a descriptor failed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: deque[tuple[int, bytes]] = deque()
        self._waiting = 0
        self._full = False
        self._changed = threading.Condition()
        self._closing = False
        self._errors: dict[int, OSError] = {}
        self._news: deque[tuple[int, OSError]] = deque()
        self._thread = BackgroundThread(self._run, "phalanx-writer").start()

    @property
    def full(self) -> bool:
        """True from the moment when too many bytes wait until few do."""
        return self._full

    def put(self, descriptor: int, data: bytes) -> None:
        """Takes bytes for a descriptor. Nothing happens if it failed before."""
        if not data:
            return
        with self._changed:
            if descriptor in self._errors:
                return
            self._queue.append((descriptor, data))
            self._waiting += len(data)
            self._full = self._full or self._waiting > HIGH
            self._changed.notify_all()

    def failures(self) -> list[tuple[int, OSError]]:
        """The descriptors that failed since the last call."""
        with self._changed:
            found = list(self._news)
            self._news.clear()
        return found

    def drained(self, timeout: float) -> bool:
        """Waits until all is written; False if the time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """Ends the thread once all is written. A reader that never reads cannot hold it: the thread is a daemon."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self._waiting:
            self._thread.join(1.0)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                descriptor, pieces, size = self._take()
            try:
                if descriptor not in self._errors:  # what was queued before it failed is lost, too: told once
                    _write(descriptor, b"".join(pieces))
            except OSError as error:
                with self._changed:
                    self._errors[descriptor] = error
                    self._news.append((descriptor, error))
                self._wake()
            with self._changed:
                self._waiting -= size
                eased = self._full and self._waiting < LOW
                self._full = self._full and not eased
                self._changed.notify_all()
            if eased:
                self._wake()

    def _take(self) -> tuple[int, list[bytes], int]:
        descriptor, data = self._queue.popleft()
        pieces, size = [data], len(data)
        while self._queue and self._queue[0][0] == descriptor and size < PIECE:
            data = self._queue.popleft()[1]
            pieces.append(data)
            size += len(data)
        return descriptor, pieces, size


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(descriptor, view) :]
            continue
        # Another process that shares this descriptor made it non-blocking.
        poller = select.poll()
        poller.register(descriptor, select.POLLOUT)
        poller.poll()
