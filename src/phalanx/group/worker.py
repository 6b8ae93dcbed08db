"""Asynchronous collectives of a group: which thread runs them, and in which order.

A thread that waits for a collective on the fast path runs it, and those issued before it, itself: handing it to another
thread would cost more than most collectives do. All others, those that no thread waits for, and those over TCP that
last, are run by the group's own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._native import core
from ..background_thread import BackgroundThread
from ..deadline import Deadline
from ..errors import Closed
from ..frames import hide_frames
from .core import GroupCore
from .fast_path import AnyFastPath
from .plain_queue import PlainQueue
from .work import Work

if TYPE_CHECKING:
    from .._core import IssuedCollective, WorkQueue

__all__ = ["CollectiveWorker", "IssuedWork", "QueuedWork"]

SHORT = 64 << 10
"""Bytes up to which a collective need not begin at once: most callers wait for it before the thread would be awake."""
STOP_PAUSE = 1e-3
"""Seconds between two looks whether another thread has left a collective to the group's."""


class QueuedWork(Work[Any]):
    """A collective that only the group's thread can run.

    Args:
        job: Runs it.
        on_told: Called when the program is given its error.
    """

    def __init__(
        self, operation: str, deadline: Deadline, job: Callable[[], Any], on_told: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(operation, deadline, on_told=on_told)
        self._job: Callable[[], Any] | None = job
        self.worker: CollectiveWorker | None = None
        """Whose queue it is in."""

    def _help(self, timeout: float | None) -> None:
        if timeout is None and self.worker is not None and self.worker.is_current:
            self.worker.run_until(self)

    def _run_to_end(self) -> bool:
        """Does it, in the group's thread; True once it has ended, False if another thread is at it."""
        if self._done:  # and a callback of it waits for one that was issued later
            return True
        job, self._job = self._job, None  # with all that it holds
        assert job is not None
        try:
            result = job()
        except BaseException as error:
            self._finish(None, error)
        else:
            self._finish(result)
        return True


class IssuedWork(Work[Any]):
    """A collective on the fast path, which any thread can run.

    Args:
        group: Lives on until the collective has ended.
    """

    def __init__(
        self, operation: str, issued: IssuedCollective, worker: CollectiveWorker, group: GroupCore | None
    ) -> None:
        # Without the base's, which takes as long as the collective.
        self._operation = operation
        self._issued = issued
        self._worker = worker
        self._group = group
        self._lock = worker.lock

    def wait(self, timeout: float | None = None) -> Any:
        # Mostly it is the only one, and done by the thread that waits: without the steps between, which take as long.
        group = self._group
        if timeout is None and group is not None and not group._backend.forked:
            worker, issued = self._worker, self._issued
            try:
                if worker.queue.first() is self and issued.run_well() and self._ended is None and not self._callbacks:
                    # Without its lock: a thread that waits for it since then, or a callback, looks again.
                    self._result = issued.result
                    self._done = True
                    if self._ended is not None or self._callbacks:
                        self._finish(self._result)
                    self._group = None
                    worker.queue.pop(self)
                    return self._result
            except BaseException as error:
                worker.hurry()
                hide_frames(error)
                raise
        return super().wait(timeout)

    def _run(self) -> bool:
        """Does it, in whichever thread; True once it has ended. May be called again.

        False if another thread is at it, or if only the group's can go on.

        Raises:
            BaseException: A signal handler raised before all ranks had met. The collective has not ended by that.
        """
        return self._note_end(self._issued.run())

    def _run_to_end(self) -> bool:
        """As of `QueuedWork`."""
        return self._note_end(self._issued.run_to_end())

    def _note_end(self, ended: bool) -> bool:
        if not ended:
            return False
        # Also if it has ended before: an interrupt may have come between that and the note of it.
        self._finish(self._issued.result, self._issued.error)
        self._group = None
        return True

    def _on_told(self) -> None:
        self._worker.on_told()

    def _remaining(self) -> float:
        return self._issued.remaining

    def _help(self, timeout: float | None) -> None:
        group = self._group
        if group is not None and group.backend.forked:
            group.backend.check_usable()  # raises: the collective is the parent's
        # A wait that may end before the collective does leaves it to the group's thread.
        if timeout is None:
            self._worker.run_until(self)
        if not self._done:
            self._worker.hurry()

    def _hurry(self) -> None:
        self._worker.hurry()


class CollectiveWorker:
    """Runs the asynchronous collectives of a group, in the order in which they were issued.

    Args:
        on_told: Called when the program is given the error of one of them.
    """

    def __init__(self, on_told: Callable[[], None] = lambda: None) -> None:
        self.on_told = on_told
        self.queue: WorkQueue | PlainQueue = PlainQueue() if core is None else core.WorkQueue()
        """The first is the one that runs. It is taken out when it has ended: an interrupt of a thread loses nothing."""
        self.lock = threading.Lock()
        """Of all collectives on the fast path."""
        self._alarm = self.queue.alarm
        self._thread = BackgroundThread(self._serve, "phalanx-collectives").start()

    @property
    def idle(self) -> bool:
        """True if everything that was issued has ended. Asked by the holder of the turn, so it stays true meanwhile."""
        return len(self.queue) == 0

    @property
    def is_current(self) -> bool:
        """True if the caller is the group's thread, in a callback: who waits there for a collective must run it."""
        return self._thread.is_current

    def hold_back(self, fast_path: AnyFastPath) -> None:
        """Keeps the fast path closed as long as something that was issued is under way."""
        assert not isinstance(self.queue, PlainQueue), "the fast path is the core's"
        self.queue.hold_back(fast_path)

    def add(self, work: QueuedWork | IssuedWork, *, at_once: bool) -> None:
        """Queues a collective. With `at_once` the group's thread begins now, else if no thread waits for it soon.

        Raises:
            Closed: Another thread has closed the group meanwhile.
        """
        if isinstance(work, QueuedWork):
            work.worker = self
        if not self.queue.push(work, at_once):
            raise Closed("this group was closed")

    def take(self, operation: str, issued: IssuedCollective, group: GroupCore) -> IssuedWork:
        """Queues a collective on the fast path, which has just been issued.

        Raises:
            Closed: As `add`.
        """
        work = IssuedWork(operation, issued, self, group)
        if not self.queue.push(work, issued.bytes > SHORT):
            raise Closed("this group was closed")
        return work

    def hurry(self) -> None:
        """Has the group's thread run what is queued now."""
        self._alarm.hurry()

    def run_until(self, work: QueuedWork | IssuedWork) -> None:
        """Runs what is queued in this thread, until `work` has ended or the group's thread has to go on."""
        if self.is_current:
            self._run_in_callback_until(work)
            return
        try:
            while not work._done:
                first = self.queue.first()
                if not isinstance(first, IssuedWork) or not first._run():
                    return
                self.queue.pop(first)
        except BaseException:
            self.hurry()
            raise

    def _run_in_callback_until(self, work: QueuedWork | IssuedWork) -> None:
        """The same in the group's thread, which is in a callback of the first in the queue, or of one before."""
        while not work._done and (first := self.queue.first()) is not None:
            if not self._run_first(first):
                first._sleep(STOP_PAUSE)

    def stop(self) -> None:
        """Ends the thread once everything that was issued has ended."""
        self._alarm.stop()
        self._thread.join()

    def _run_first(self, work: QueuedWork | IssuedWork) -> bool:
        """Runs the first in the queue, in the group's thread; False if another thread is at it."""
        if not work._run_to_end():
            return False
        self.queue.pop(work)
        return True

    def _serve(self) -> None:
        while self._alarm.wait():
            self._alarm.disarm()
            while (first := self.queue.first()) is not None and self._run_first(first):
                pass
            first = None  # an idle worker keeps nothing alive
        while not self.queue.end_if_empty():
            first = self.queue.first()
            if first is not None and not self._run_first(first):
                first._sleep(STOP_PAUSE)  # until the other thread has ended it, or left it
