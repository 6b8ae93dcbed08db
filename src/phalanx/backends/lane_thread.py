"""The background thread of a lane."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
GRACE = 0.0005
"""Seconds in which the caller of an operation mostly waits for it, and then moves it itself."""

Drive = Callable[[Sequence[PendingTransfer]], "list[tuple[int, int]] | None"]


@dataclass(slots=True)
class _Job:
    operation: PendingTransfer
    deadline: Deadline
    expire: Callable[[], None]
    due: float
    """When the thread begins with it."""
    attended: bool = False
    """True once the thread hears of its end."""


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
        self._jobs: list[_Job] = []
        self._lock = threading.RLock()
        self._alarm = PlainAlarm() if core is None else core.Alarm()
        """Goes off if there are operations, and nobody has moved them for a moment."""
        self._attends = False
        """True while it looks after the operations that are due."""
        self._looks_at = math.inf
        """When it looks for more of them. Until then no operation need wake it."""
        self._stopping = False
        self.waker = Waker()
        self._thread = BackgroundThread(self._run, "phalanx-lane", on_error=on_error).start()

    def add(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Moves bytes until the operation is done. Calls `expire` if the deadline passes first."""
        with self._lock:
            if not self._attends and all(job.operation.done for job in self._jobs):  # other threads have done them
                self._jobs.clear()
                self._alarm.disarm()
            due = time.monotonic() + GRACE
            self._jobs.append(_Job(operation, deadline, expire, due))
            if not self._attends:
                self._alarm.arm()
            elif due < self._looks_at:
                self._looks_at = due
                self.waker.set()

    def hurry(self) -> None:
        """Has it begin at once: nobody waits for these operations."""
        with self._lock:
            for job in self._jobs:
                job.due = 0.0
            if self._attends:
                self.waker.set()
            elif self._jobs:
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
        """Moves what can be moved now, and sleeps until there is more. False if nothing is due."""
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        self.waker.clear()
        if self._stopping:  # set just before: `clear` has forgotten the wake-up
            return False
        jobs = self._due()
        if not jobs:
            return False
        now = time.monotonic()
        for job in jobs:
            if not job.attended:
                job.attended = True
                job.operation.add_waker(self.waker)  # another thread may complete it
            if job.deadline.at <= now and not job.operation.done:
                try:
                    job.expire()
                except Exception as error:  # it must not end the service of the other operations
                    job.operation.complete(error)
        polled = self._drive([job.operation for job in jobs if not job.operation.done])
        if polled is not None:
            at = min(self._looks_at, *(job.deadline.at for job in jobs))
            sleep(self.waker, polled, Deadline(max(at - time.monotonic(), 0.0)))
        return True

    def _due(self) -> list[_Job]:
        """The operations that it moves now."""
        with self._lock:
            self._alarm.disarm()
            self._jobs = [job for job in self._jobs if not job.operation.done]
            now = time.monotonic()
            jobs = [job for job in self._jobs if job.due <= now]
            self._looks_at = min((job.due for job in self._jobs if job.due > now), default=math.inf)
            self._attends = bool(jobs)
            if self._jobs and not jobs:
                self._alarm.arm()
            return jobs
