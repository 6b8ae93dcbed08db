"""The background thread of a lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from .._native import core
from ..alarm import PlainAlarm
from ..background_thread import BackgroundThread
from ..deadline import Deadline
from ..transports.mailbox import PendingTransfer
from ..transports.waker import Waker
from .polling import sleep

__all__ = ["STOP_WAIT", "LaneThread"]

STOP_WAIT = 5.0
"""Seconds that closing waits for a thread that moves messages, which may be in a callback of the user's."""
_NEVER = Deadline(float("inf"))

Drive = Callable[[Sequence[PendingTransfer]], "list[tuple[int, int]] | None"]


class LaneThread:
    """Completes operations whose caller is not waiting.

    Most are waited for at once, and then moved by the thread that waits: this one begins a moment later.

    Args:
        drive: The lane's `drive`.
        on_error: Called with an exception that nobody expected, which has ended the thread.

    Attributes:
        waker: Makes the thread look again.
    """

    def __init__(self, drive: Drive, on_error: Callable[[Exception], None]) -> None:
        self._drive = drive
        self._jobs: list[tuple[PendingTransfer, Deadline, Callable[[], None]]] = []
        self._lock = threading.RLock()
        self._alarm = PlainAlarm() if core is None else core.Alarm()
        """Goes off if there are operations, and nobody has moved them for a moment."""
        self._attends = False
        """True while it looks after the operations."""
        self._stopping = False
        self.waker = Waker()
        self._thread = BackgroundThread(self._run, "phalanx-lane", on_error=on_error).start()

    def add(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Moves bytes until the operation is done. Calls `expire` if the deadline passes first."""
        with self._lock:
            if not self._attends and all(job[0].done for job in self._jobs):  # other threads have done them
                self._jobs.clear()
                self._alarm.disarm()
            self._jobs.append((operation, deadline, expire))
            operation.add_waker(self.waker)  # another thread may complete it
            if not self._attends:
                self._alarm.arm()
                return
        self.waker.set()

    def hurry(self) -> None:
        """Has it begin at once: nobody waits for these operations."""
        with self._lock:
            if self._jobs and not self._attends:
                self._alarm.hurry()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self._alarm.stop()
        self.waker.set()
        self._thread.join(STOP_WAIT)

    def _run(self) -> None:
        while self._alarm.wait():
            while self._turn():
                pass

    def _turn(self) -> bool:
        """Moves what can be moved now, and sleeps until there is more. False if there is nothing left to move."""
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        self.waker.clear()
        if self._stopping:  # set just before: `clear` has forgotten the wake-up
            return False
        with self._lock:
            self._jobs = [job for job in self._jobs if not job[0].done]
            jobs = list(self._jobs)
            self._attends = bool(jobs)
            self._alarm.disarm()
        if not jobs:
            return False
        now = time.monotonic()
        for operation, deadline, expire in jobs:
            if deadline.at <= now and not operation.done:
                try:
                    expire()
                except Exception as error:  # it must not end the service of the other operations
                    operation.complete(error)
        polled = self._drive([operation for operation, _, _ in jobs if not operation.done])
        if polled is not None:
            sleep(self.waker, polled, min((job[1] for job in jobs), key=lambda d: d.at, default=_NEVER))
        return True
