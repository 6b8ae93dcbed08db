"""A bar on the terminal for what takes longer than two seconds. A log stays quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Progress"]

_QUIET = 2.0


class Progress:
    """Counts bytes, and shows them after two seconds if somebody can be watching.

    Args:
        what: The words beside the bar.
        total: Bytes to come.
        shows: False to only count, as on all ranks but the first.
    """

    def __init__(self, what: str, total: int, *, shows: bool = True) -> None:
        self.done = 0
        self._what = what
        self._total = total
        self._from = time.monotonic() + _QUIET if shows and sys.stderr is not None and sys.stderr.isatty() else None
        self._bar: Any = None
        self._task: Any = None

    def advance(self, count: int) -> None:
        """Some more bytes are done."""
        self.done += count
        if self._from is None or time.monotonic() < self._from:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=self.done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
