"""The handle of a collective that stands in line."""

from __future__ import annotations

import time
from typing import Any

from ..group.tracking import call_site
from .errors import translated
from .line import Line
from .opened_late import OpenedLate
from .visible import unwatched
from .work import Job, UnfinishedWork

__all__ = ["CollectiveWork", "PreparedWork"]

_LONG_IN_LINE = 1.0
"""Seconds that an operation waits for its turn before that counts as a part of the time that it may take."""


class CollectiveWork(UnfinishedWork):
    """A collective that waits for its turn, in a line of its group. A thread that waits for it may run it."""

    __slots__ = ("_default", "_issued", "_job", "_line", "_seconds", "_site")

    def __init__(self, line: Line, job: Job, seconds: float | None, default: float, tensors: Any) -> None:
        super().__init__(tensors)
        self._line = line
        self._job: Job | None = job
        self._seconds = seconds
        self._default = default
        self._issued = time.monotonic()
        self._site = call_site.find()
        """The user's line, whichever thread will run it."""

    @property
    def begun(self) -> bool:
        """True once the operation has started; a collective has then ended, too."""
        return self._ended

    def get_future(self) -> Any:
        if not self._ended:
            self._line.hurry()
        return super().get_future()

    def run(self) -> None:
        """Does the operation and keeps its error. The line calls this once, in the operation's turn."""
        job, self._job = self._job, None
        assert job is not None
        seconds = self._seconds
        waited = time.monotonic() - self._issued
        if waited > _LONG_IN_LINE:
            seconds = max((self._default if seconds is None else seconds) - waited, 0.0)
        error: BaseException | None = None
        call_site.lend(self._site)
        try:
            unwatched(job, seconds)
        except BaseException as failure:
            error = translated(failure)
        finally:
            call_site.lend(None)
        self._end(error)

    def _await(self, seconds: float | None) -> None:
        if seconds is None:
            self._line.drive(self)
        elif not self._wait_for_end(seconds):
            raise self._too_long(seconds)


class PreparedWork(OpenedLate, UnfinishedWork):
    """A collective that the core has prepared. As `CollectiveWork`, with the group's own timeout, and quicker: most are
    short.
    """

    __slots__ = ("_call",)

    @property
    def begun(self) -> bool:
        """True once the operation has started; a collective has then ended, too."""
        ended: bool = self._call.ended
        return ended

    def is_completed(self) -> bool:
        return self.begun

    def get_future(self) -> Any:
        if not self._call.ended:
            self._call.runner.hurry()
        return super().get_future()

    def _await(self, seconds: float | None) -> None:
        if seconds is None:
            self._call.runner.drive(self)
        elif not self._wait_for_end(seconds):
            raise self._too_long(seconds)
