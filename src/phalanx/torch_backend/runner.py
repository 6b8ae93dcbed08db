"""Runs operations of one kind of one process group, in the order in which they were issued.

A synchronous call runs at once, in the caller's thread, if nothing else is under way. An asynchronous one must not
block: the same program may be about to do what another rank waits for. It stands in line for a thread of its own. A
thread that waits for it runs it in that thread's stead, if it has not begun: handing it over takes longer than most do.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from .._native import core
from ..alarm import PlainAlarm
from ..background_thread import BackgroundThread
from .collective_work import CollectiveWork
from .errors import translated
from .line import InLine
from .plain_line import PlainLine, PlainTurn
from .work import FinishedWork, Job

__all__ = ["SHORT", "Runner"]

SHORT = 64 << 10
"""Bytes up to which an operation need not begin at once: most callers wait for it before the thread would be awake."""
LONGEST_NAP = 0.004
"""Seconds. The thread looks at the line by itself for a while after it had work, so that no caller has to wake it."""


class Runner:
    """The line of operations.

    Args:
        default: Seconds that an operation may take if it is not told otherwise.
    """

    def __init__(self, default: float) -> None:
        self.default = default
        self._turn: Any = PlainTurn() if core is None else core.LineTurn()
        """Held while an operation runs."""
        self._line: Any = PlainLine() if core is None else core.OperationQueue()
        self._thread: BackgroundThread | None = None
        self._newest: BackgroundThread | None = None
        """The last thread that was started: those before it have no part in the line any more."""
        self._starting = threading.Lock()

    def issue(self, job: Job, seconds: float | None, tensors: Any, *, later: bool, size: int) -> Any:
        """Runs an operation, now or in its turn, and returns its handle.

        Args:
            later: Whether the call must return before the operation is done.
            size: In bytes: only a long operation is worth waking a thread for.

        Raises:
            DistBackendError, DistNetworkError, UsageError: It failed, and was not asynchronous.
        """
        if not later and not self._line and self._turn.try_acquire():
            try:
                job(seconds)
            except Exception as error:
                shown = translated(error)
                if shown is error:
                    raise
                raise shown from None
            finally:
                self._turn.release()
            return FinishedWork.of(tensors)
        operation = CollectiveWork(self, job, seconds, self.default, tensors)
        self.join(operation, at_once=size > SHORT)
        return operation

    @property
    def state(self) -> tuple[Any, Any]:
        """The operations in the line and whose turn it is, for the core."""
        return self._line, self._turn

    def join(self, operation: InLine, *, at_once: bool = False) -> None:
        """Puts an operation at the end of the line.

        Args:
            at_once: Whether it is worth waking the thread for, before anybody waits for it.
        """
        self._line.append(operation)
        self.attend(at_once)

    def attend(self, at_once: bool = False) -> None:
        """Has the thread look at an operation that has joined the line. The core calls this, unless it is not needed.

        Args:
            at_once: As for `join`.
        """
        if self._thread is None:
            self._start()
        if at_once or self._line.is_away:
            self.hurry()

    def hurry(self) -> None:
        """Wakes the thread if there is work for it. For callers that cannot run operations themselves."""
        if self._line:
            alarm = self._line.alarm
            if alarm is not None:
                alarm.hurry()
            if self._line.is_away:
                self._replace()

    def drive(self, operation: InLine) -> None:
        """Runs what is in line up to this operation."""
        while not operation.begun:
            with self._turn:
                if operation.begun:
                    return
                ran = self._run_next()
            if ran is not None and ran.has_callbacks:
                ran.call_back()
            if ran is operation:
                return

    def leave(self, operation: InLine) -> bool:
        """Takes an operation out of the line; False if it has begun."""
        removed: bool = self._line.remove(operation)
        return removed

    @property
    def idle(self) -> bool:
        """Whether nothing is in line, or has just been taken from it."""
        return not self._line and not self._turn.locked()

    def drain(self) -> None:
        """Runs everything that is in line."""
        while self._line:
            with self._turn:
                ran = self._run_next()
            if ran is not None and ran.has_callbacks:
                ran.call_back()
        with self._turn:  # what has begun in another thread
            pass

    def stop(self) -> None:
        """Ends the thread once everything that was issued has ended."""
        with self._starting:
            thread, self._thread = self._thread, None
            alarm, self._line.alarm = self._line.alarm, None
        if thread is not None:
            alarm.stop()
            thread.join()

    def _run_next(self) -> InLine | None:
        """Runs the next operation, in its turn. One that is interrupted before it has begun is still the next one."""
        operation: InLine | None = self._line.first()
        if operation is None:
            return None
        if not operation.begun:  # else an interrupt has come just before it would have left
            operation.run()
        self._line.remove(operation)  # unless whoever waited for it has taken it out
        return operation

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                alarm = PlainAlarm() if core is None else core.Alarm(LONGEST_NAP)
                self._start_another(alarm)
                self._line.alarm = alarm  # from now on it is taken for served

    def _replace(self) -> None:
        """The thread may wait, in a callback, for what is in line now: another one takes its place."""
        with self._starting:
            if self._line.is_away and self._thread is not None:
                self._line.is_away = False
                self._start_another(self._line.alarm)

    def _start_another(self, alarm: Any) -> None:
        self._thread = self._newest = BackgroundThread(partial(self._serve, alarm), "phalanx-torch")
        self._thread.start()

    def _call_back(self, operation: InLine) -> bool:
        """Runs callbacks in the thread that serves the line; False if another one has taken its place meanwhile."""
        self._line.is_away = True
        operation.call_back()
        with self._starting:
            if self._newest is None or not self._newest.is_current:  # also while `stop` waits for the other one
                return False
            self._line.is_away = False
        return True

    def _serve(self, alarm: Any) -> None:
        while alarm.wait():
            alarm.disarm()
            while self._line:
                with self._turn:
                    ran = self._run_next()
                if ran is not None and ran.has_callbacks and not self._call_back(ran):
                    return
                ran = None  # an idle thread keeps nothing alive
        self.drain()
