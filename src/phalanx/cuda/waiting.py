"""Marks on streams, and waits for them without blocking in the driver: every wait can be ended by a deadline."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

from ..deadline import Deadline
from ..errors import UsageError
from .driver import CudaDriver, driver

__all__ = ["Mark", "mark", "wait_for_stream"]

LOOKS = 400
"""Looks without a pause. One takes about a microsecond, and most of what is waited for is short."""
PAUSE, LONGEST_PAUSE = 20e-6, 500e-6
"""Seconds between two looks after that."""

_free: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
"""The driver's events that no mark uses, by driver and GPU. To make one takes longer than most uses of it."""


class Mark:
    """A place in a stream, behind all that was put on it before.

    If the stream is idle, there is nothing to wait for, and nothing is put on it: while other processes use the GPU,
    even a mark has to wait for this one's turn, which takes longer than most collectives.
    """

    __slots__ = ("_device", "_driver", "_event", "_pool")

    def __init__(self, known: CudaDriver, device: int, stream: int) -> None:
        self._driver = known
        self._device = device
        self._pool = _free[id(known), device]
        self._event = 0
        if not known.is_idle(stream):
            event = self._pool.pop() if self._pool else known.new_event()
            known.record(event, stream)
            self._event = event

    def __del__(self) -> None:
        if getattr(self, "_event", 0):
            self._pool.append(self._event)  # one that is still on a stream can be put on another

    def wait(self, deadline: Deadline) -> bool:
        """Waits until the stream has come to it; False if the deadline passed before.

        Raises:
            CudaError: Something before it has failed.
        """
        if not self._event:
            return True
        with self._driver.using(self._device):
            return _wait(self._driver.is_done, self._event, deadline)


def wait_for_stream(known: CudaDriver, stream: int, deadline: Deadline) -> bool:
    """Waits until a stream of Phalanx's own has done all that was put on it; False if the deadline passed before.

    Raises:
        CudaError: Something of it has failed.
    """
    return _wait(known.is_idle, stream, deadline)


def _wait(is_over: Callable[[int], bool], what: int, deadline: Deadline) -> bool:
    for _ in range(LOOKS):
        if is_over(what):
            return True
    pause = PAUSE
    while not is_over(what):
        if deadline.expired:
            return False
        time.sleep(min(pause, max(deadline.remaining(), 0.0)))
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


def mark(device: int, stream: int) -> Mark:
    """Puts a mark on a stream.

    Raises:
        UsageError: What is put on the stream is not done, but recorded for a CUDA graph.
    """
    known = driver()
    with known.using(device):
        if stream and known.is_capturing(stream):
            raise UsageError(
                "the current stream is being captured for a CUDA graph, which cannot hold a collective of Phalanx: "
                "other ranks take part in it when it runs (call it outside of the capture)"
            )
        return Mark(known, device, stream)
