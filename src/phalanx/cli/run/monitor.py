"""Watches the job of this launcher from outside, and has the last word on who made whom wait."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from phalanx.background_thread import BackgroundThread

if TYPE_CHECKING:
    from phalanx.seeing.picture import Picture
    from phalanx.seeing.slates import SlateSource
    from phalanx.seeing.watch import JobWatch

__all__ = ["JobMonitor", "JobView"]

logger = logging.getLogger("phalanx.run")

PAUSE = 2.0
"""Seconds between two looks. Each takes a few milliseconds of a processor that the ranks may need."""
OFTEN = 0.25
"""The same where somebody looks on, or every operation is wanted."""


class JobView(Protocol):
    """A way of showing a job: a page, a trace, metrics."""

    def update(self, watch: JobWatch, picture: Picture) -> None:
        """Takes what the last look has found. Called in the monitor's thread."""

    def close(self, how: str) -> None:
        """The job is over.

        Args:
            how: What was wrong, in a few words; empty if nothing was.
        """


class JobMonitor:
    """Watches a job in a thread of its own.

    Args:
        job: The name of the job.
        views: What shows it.
        afar: Reads the slates of other hosts, if there are any.
    """

    def __init__(self, job: str, views: Sequence[JobView] = (), afar: Callable[[], SlateSource] | None = None) -> None:
        self._job = job
        self._views = list(views)
        self._afar = afar
        self._stop = threading.Event()
        self._watch: JobWatch | None = None
        self._picture: Picture | None = None
        self._thread = BackgroundThread(self._run, "phalanx-monitor").start()

    def _run(self) -> None:
        # A moment later: the ranks are being started, and they are what the user waits for.
        while not self._stop.wait(OFTEN if self._views else PAUSE):
            self._try_to_look()
        self._try_to_look()

    def _try_to_look(self) -> None:
        """Looks; if that fails, the next look may do better."""
        try:
            self._look()
        except Exception as error:
            logger.debug("a look at the job has failed", exc_info=error)

    def _look(self) -> None:
        if self._watch is None:
            from phalanx.seeing.slates import read_files
            from phalanx.seeing.watch import JobWatch

            source: SlateSource = lambda: read_files(self._job)  # noqa: E731
            if self._afar is not None:
                from phalanx.seeing.slates import combined

                source = combined(source, self._afar())
            self._watch = JobWatch(source)
        picture = self._watch.look()
        if picture is not None:
            self._picture = picture
            for view in self._views:
                try:
                    view.update(self._watch, picture)
                except Exception as error:
                    logger.debug("%s has failed", type(view).__name__, exc_info=error)

    def close(self, *, failed: bool, how: str = "") -> list[str]:
        """Looks a last time, once the ranks have ended; says what was found.

        Args:
            failed: The job has failed: what its ranks have noted is kept for `phalanx doctor --last`.
            how: What was wrong, in a few words.
        """
        self._stop.set()
        self._thread.join()
        for view in self._views:
            with contextlib.suppress(Exception):  # the job has ended as it has, whatever shows it
                view.close(how)
        from phalanx.slate.files import listed, remove, tidy

        for file in listed():
            if file.job == self._job:
                if failed:
                    file.note_failure(how)
                else:
                    remove(file.path)
        tidy()
        if self._picture is None:
            return []
        return [finding.text for finding in self._picture.findings if finding.kind in ("straggler", "link")]
