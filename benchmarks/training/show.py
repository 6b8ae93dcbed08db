"""The result for a person at a terminal, and for a log: a table for each model and number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TextIO

from phalanx.cli.bench.results import BenchReport, CellResult, Column
from phalanx.cli.bench.show import all_errors, left_out, present, show_timing
from phalanx.cli.bench.sizes import show_ratio, show_seconds

from .plan import alone

__all__ = ["FOOTNOTES", "StepTable", "Steps", "all_errors", "show", "steps", "tables"]

FOOTNOTES = (
    "Time per step: median over rounds of the slowest rank's; ± is half the distance between the quartiles.",
    "Waiting: what a step takes longer than the same step in a group of one rank, in the same rounds.",
    "Ratio: Gloo's time in parts of this one's; above 1, this one is faster.",
)


class Steps(NamedTuple):
    """Seconds of one contender's step."""

    whole: float
    waiting: float


def steps(cell: CellResult, name: str) -> Steps | None:
    """The time of a contender's step, and the part of it that was waiting; None if it failed."""
    timing, by_itself = cell.of(name), cell.of(alone(name))
    if timing is None or by_itself is None or timing.seconds is None or by_itself.seconds is None:
        return None
    return Steps(timing.seconds, timing.seconds - by_itself.seconds)


def contenders(report: BenchReport) -> list[Column]:
    """The columns, each once."""
    return [column for column in report.columns if not column.name.endswith(alone(""))]


class StepTable:
    """One model on one number of ranks: a row for each contender."""

    def __init__(self, report: BenchReport, cell: CellResult) -> None:
        self.title = f"{cell.operation}, {cell.ranks} ranks"
        self.head = ["", "time per step", "without communication", "waiting", "Gloo / this", "its waiting / this"]
        self.rows: list[list[str]] = []
        self._values: list[list[float | None]] = []
        gloo = steps(cell, "gloo")
        for column in contenders(report):
            found = steps(cell, column.name)
            both = [show_timing(cell.of(column.name)), show_timing(cell.of(alone(column.name)))]
            whole = waiting = None
            wait = ""
            if found is not None:
                wait = f"{show_seconds(max(0.0, found.waiting))} ({max(0.0, found.waiting) / found.whole:.0%})"
                if gloo is not None and column.name != "gloo":
                    whole = gloo.whole / found.whole
                    waiting = gloo.waiting / found.waiting if min(gloo.waiting, found.waiting) > 0 else None
            ratios = ["" if value is None else show_ratio(value) for value in (whole, waiting)]
            self.rows.append([column.label, *both, wait, *ratios])
            self._values.append([None, None, None, None, whole, waiting])

    def value(self, row: int, column: int) -> float | None:
        """The ratio there, if it is one."""
        return self._values[row][column]


def tables(report: BenchReport) -> Iterator[StepTable]:
    """All of them, in the order in which they were measured."""
    return (StepTable(report, cell) for cell in report.cells)


def show(report: BenchReport, out: TextIO) -> None:
    """Writes it all; errors are the caller's business."""
    present(out, list(tables(report)), FOOTNOTES, list(left_out(report)))
