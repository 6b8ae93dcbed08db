"""Marks on streams, and waits for them without blocking in the driver: every wait can be ended by a deadline."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque

from ..deadline import Deadline
from ..errors import UsageError
from .driver import CudaDriver, driver

__all__ = ["Mark", "mark"]

LOOKS = 400
"""Looks without a pause. One takes about a microsecond, and most of what is waited for is short."""
PAUSE, LONGEST_PAUSE = 20e-6, 500e-6
"""Seconds between two looks after that."""

_free: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
"""The driver's events that no mark uses, by driver and GPU. To make one takes longer than most uses of it."""


class Mark:
    """A place in a stream, behind all that was put on it before."""

    __slots__ = ("_driver", "_event", "_pool")

    def __init__(self, known: CudaDriver, device: int, stream: int) -> None:
        self._driver = known
        self._pool = _free[id(known), device]
        try:
            self._event = self._pool.pop()
        except IndexError:
            self._event = known.new_event()
        known.record(self._event, stream)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be made
            self._pool.append(self._event)  # one that is still on a stream can be put on another

    def wait(self, deadline: Deadline) -> bool:
        """Waits until the stream has come to it; False if the deadline passed before.

        Raises:
            CudaError: Something before it has failed.
        """
        is_done, event = self._driver.is_done, self._event
        for _ in range(LOOKS):
            if is_done(event):
                return True
        pause = PAUSE
        while not is_done(event):
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
