"""The progress of a run: a bar on a terminal, nothing in a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from .plan import Cell
from .sizes import show_size

__all__ = ["progress"]


@contextlib.contextmanager
def progress(out: TextIO, cells: int) -> Iterator[Callable[[Cell | str], None]]:
    """Yields a function to call before each step. Leaves the terminal as it was, also after an error."""
    if not out.isatty():
        yield lambda step: None
        return
    # Only now: importing them takes longer than a log is worth.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    # Twice a second is enough, and takes nothing from what is measured.
    with Progress(
        *columns, TextColumn("{task.description}"), console=Console(file=out), transient=True, refresh_per_second=2
    ) as bar:
        task = bar.add_task("starting", total=cells)
        begun = False

        def step(what: Cell | str) -> None:
            nonlocal begun
            if isinstance(what, str):
                bar.update(task, description=what)
                return
            size = f" {show_size(what.size)}" if what.size else ""
            bar.update(task, advance=1 if begun else 0, description=f"{what.operation}{size}, {what.ranks} ranks")
            begun = True

        yield step
