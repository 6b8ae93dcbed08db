"""The background thread of a lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

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
        self._stopping = False
        self.waker = Waker()
        self._thread = BackgroundThread(self._run, "phalanx-lane", on_error=on_error).start()

    def add(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Moves bytes until the operation is done. Calls `expire` if the deadline passes first."""
        with self._lock:
            self._jobs.append((operation, deadline, expire))
        operation.add_waker(self.waker)  # another thread may complete it
        self.waker.set()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self.waker.set()
        self._thread.join(STOP_WAIT)

    def _run(self) -> None:
        while not self._stopping:
            self._turn()

    def _turn(self) -> None:
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        self.waker.clear()
        if self._stopping:  # set just before: `clear` has forgotten the wake-up
            return
        with self._lock:
            self._jobs = [job for job in self._jobs if not job[0].done]
            jobs = list(self._jobs)
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
