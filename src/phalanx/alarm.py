"""Wakes a background thread for work that no other thread has done within a moment."""

from __future__ import annotations

import contextlib
import math
import threading
import time

__all__ = ["PlainAlarm"]

GRACE = 0.0005
"""Seconds after which work is urgent."""
NAP = 0.001
AWAKE = 0.02
"""Seconds of naps, without work, before the thread falls asleep: to be woken for each work costs more."""


class PlainAlarm:
    """As the core's `Alarm`, where there is no core."""

    def __init__(self) -> None:
        self._armed_at = math.inf
        """When the work came that is the oldest; infinite if there is none."""
        self._asleep = False
        self._stopped = False
        self._bell = threading.Lock()
        """Taken until it is rung. Not an event, whose lock a signal handler that raises may leave taken."""
        self._bell.acquire()

    def arm(self) -> None:
        """There is work. Called with the lock held that guards it, as `disarm` is."""
        if self._armed_at == math.inf:
            self._armed_at = time.monotonic()
            if self._asleep:
                self._ring()

    def hurry(self) -> None:
        """The work is urgent now."""
        self._armed_at = 0.0
        self._ring()

    def disarm(self) -> None:
        """There is no more work."""
        self._armed_at = math.inf

    def stop(self) -> None:
        """Ends the waits of the thread."""
        self._stopped = True
        self._ring()

    def wait(self) -> bool:
        """For the background thread: returns when there is urgent work; False once it was stopped."""
        idle = 0.0
        while not self._stopped:
            armed_at = self._armed_at
            if armed_at != math.inf:
                idle = 0.0
                left = armed_at + GRACE - time.monotonic()
                if left <= 0.0:
                    return True
                self._sleep(left)
            elif idle < AWAKE:
                self._sleep(NAP)
                idle += NAP
            else:
                self._asleep = True
                if self._armed_at == math.inf:  # looked at after `_asleep` is set: `arm` looks the other way round
                    self._sleep(-1)
                self._asleep = False
                idle = 0.0
        return False

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was rung before
            self._bell.release()

    def _sleep(self, seconds: float) -> None:
        self._bell.acquire(timeout=seconds)
