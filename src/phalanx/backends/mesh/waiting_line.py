"""Messages through rings that no thread waits for yet. After a moment, a thread of the line's own posts them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

from ..._native import core
from ...background_thread import BackgroundThread
from ..lane import Unposted
from ..lane_thread import STOP_WAIT

__all__ = ["WaitingLine"]


class WaitingLine:
    """The messages of a lane that its fast path has prepared, in the order of their calls.

    Attributes:
        prepared: The Work of each message, which can post it.
        alarm: Goes off if the oldest of them is not waited for soon.
    """

    def __init__(self) -> None:
        self.prepared: deque[Unposted] = deque()
        assert core is not None  # there are no rings without it
        self.alarm = core.Alarm()
        self._guard = threading.RLock()
        self._pid = os.getpid()
        self._posting = False
        itself = weakref.ref(self)  # a thread must not keep the group alive
        alarm = self.alarm

        def attend() -> None:
            while alarm.wait():
                alarm.disarm()
                _post(itself)
            _post(itself)  # the lane has ended, and so do they

        self._thread = BackgroundThread(attend, "phalanx-messages")

    def start(self) -> None:
        """Starts the thread, unless it was started before."""
        with self._guard:
            if not self._thread.is_started:
                self._thread.start()

    def post(self) -> None:
        """Has the lane go on with all of them. A thread that waits for one gives way."""
        if os.getpid() != self._pid:
            return  # a forked child: they are the parent's, and so are the threads that hold the locks
        with self._guard:
            if self._posting:  # by this thread: it posts one of them
                return
            self._posting = True
            try:
                while self.prepared:
                    first = self.prepared[0]
                    first.post()
                    if self.prepared and self.prepared[0] is first:
                        self.prepared.popleft()
            except BaseException:  # an interrupt: the thread of the line goes on with it
                self.alarm.hurry()
                raise
            finally:
                self._posting = False

    def end(self) -> None:
        """Ends them with the lane. Never waits."""
        self.alarm.stop()

    def join(self) -> None:
        """Waits for the thread to end."""
        if self._thread.is_started:
            self._thread.join(STOP_WAIT)


def _post(itself: weakref.ref[WaitingLine]) -> None:
    line = itself()
    if line is not None:
        line.post()
