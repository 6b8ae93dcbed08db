"""The background thread of messages through MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..._native import core
from ...alarm import PlainAlarm
from ...background_thread import BackgroundThread
from ...deadline import Deadline
from ...transports.mailbox import PendingTransfer
from ..lane_thread import STOP_WAIT
from .library import Backoff

if TYPE_CHECKING:
    from ..._core import Alarm, UnattendedMessages

__all__ = ["ProgressThread"]


class ProgressThread:
    """Moves messages while there are operations whose caller is not waiting. Else it sleeps.

    Most operations are waited for at once, and then done by the thread that waits: this one begins a moment later.

    Args:
        progress: Moves what can be moved now; true if anything was.
        post_prepared: Goes on with the messages that the fast path has prepared.
    """

    def __init__(self, progress: Callable[[], bool | None], post_prepared: Callable[[], None]) -> None:
        self._progress = progress
        self._post_prepared = post_prepared
        self._jobs: list[tuple[PendingTransfer, Deadline, Callable[[], None]]] = []
        """Never replaced, because the fast path holds it, too."""
        self._lock = threading.Lock()
        self._alarm: Alarm | PlainAlarm = PlainAlarm() if core is None else core.Alarm()
        self._stopping = False
        self._thread = BackgroundThread(self._run, "phalanx-mpi")
        self.unattended: UnattendedMessages | None = None
        """Counts the prepared messages that no thread waits for, where there is a core."""
        if core is not None:
            self.unattended = core.UnattendedMessages(self._alarm, self._jobs, self.start)

    def start(self) -> None:
        """Starts the thread, unless it was started before."""
        with self._lock:
            if not self._thread.is_started:
                self._thread.start()

    def hurry(self) -> None:
        """Has it go on with what is prepared now."""
        self._alarm.hurry()

    def add(self, operation: PendingTransfer, deadline: Deadline, expire: Callable[[], None]) -> None:
        """Moves messages until the operation is done. Calls `expire` if the deadline passes first."""
        self.start()
        with self._lock:
            if self._jobs and all(job[0].done for job in self._jobs):  # other threads have done them
                self._jobs.clear()
                if self.unattended is None or self.unattended.count == 0:
                    self._alarm.disarm()
            self._jobs.append((operation, deadline, expire))
            self._alarm.arm()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        self._alarm.stop()
        if self._thread.is_started:
            self._thread.join(STOP_WAIT)

    def _run(self) -> None:
        while self._alarm.wait():
            self._alarm.disarm()  # before it looks: what is added from now on is armed again
            self._post_prepared()
            self._move()
        self._post_prepared()  # they end with the world

    def _move(self) -> None:
        # A function of its own: what is done must not stay in its variables, which would keep the group alive.
        backoff = Backoff(oversubscribed=True)
        while not self._stopping:
            try:
                moved = bool(self._progress())
            except Exception as error:  # of MPI, or a callback's: nobody would move the messages any more
                moved = True
                for operation, _, _ in self._jobs:
                    if not operation.done:
                        operation.complete(error)
            now = time.monotonic()
            for operation, deadline, expire in self._jobs[:]:
                if deadline.at <= now and not operation.done:
                    try:
                        expire()
                    except Exception as error:  # it must not end the service of the other operations
                        operation.complete(error)
            with self._lock:
                self._jobs[:] = [job for job in self._jobs if not job[0].done]
                if not self._jobs:
                    return
            if moved:
                backoff.reset()
            else:
                backoff.pause()
