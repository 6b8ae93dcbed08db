"""Wakes a background thread for work that no other thread has done within a moment."""

from __future__ import annotations

import threading

__all__ = ["PlainAlarm"]


class PlainAlarm:
    """As the core's `Alarm`, where there is no core. All work is urgent."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._stopped = False

    def arm(self) -> None:
        self._event.set()

    hurry = arm

    def disarm(self) -> None:
        self._event.clear()
        if self._stopped:  # perhaps just before
            self._event.set()

    def stop(self) -> None:
        self._stopped = True
        self._event.set()

    def wait(self) -> bool:
        self._event.wait()
        return not self._stopped
