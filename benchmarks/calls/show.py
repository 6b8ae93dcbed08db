"""The result of remote calls for a person at a terminal, and for a log: a table for each cell, and the goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from phalanx.cli.bench.results import BenchReport, CellResult
from phalanx.cli.bench.show import left_out, present, show_timing
from phalanx.cli.bench.sizes import show_ratio
from phalanx.cli.bench.summary import ratio

from .goals import best_peer, standings
from .plan import title

__all__ = ["FOOTNOTES", "CallTable", "all_errors", "show", "tables"]

FOOTNOTES = (
    "Time per call, there and back: median of the rounds' medians; ± is half the distance between the quartiles.",
    "Ratio: its time in parts of Phalanx's; above 1, Phalanx is faster.",
    "The pipe is a yardstick and no peer: it calls nothing.",
)


class CallTable:
    """One cell: a row for each contender, and a ratio for each transport of Phalanx."""

    def __init__(self, report: BenchReport, cell: CellResult) -> None:
        self.title = title(cell.operation, cell.size)
        ours = [column for column in report.columns if column.ours]
        self.head = ["", "time per call", *(f"/ {column.label}" for column in ours)]
        self.rows: list[list[str]] = []
        self._values: list[list[float | None]] = []
        for column in report.columns:
            values = [None if column.ours else ratio(report, cell, against=column.name, of=own.name) for own in ours]
            self._add(column.label, show_timing(cell.of(column.name)), values)
        best = best_peer(report, cell)
        if best is not None:
            name = best[0].name
            values = [ratio(report, cell, against=name, of=own.name) for own in ours]
            self._add("best peer / Phalanx", f"({best[0].label})", values)

    def _add(self, label: str, text: str, values: list[float | None]) -> None:
        self.rows.append([label, text, *("" if value is None else show_ratio(value) for value in values)])
        self._values.append([None, None, *values])

    def value(self, row: int, column: int) -> float | None:
        """The ratio there, if it is one."""
        return self._values[row][column]


def tables(report: BenchReport) -> Iterator[CallTable]:
    """All of them, in the order in which they were measured."""
    return (CallTable(report, cell) for cell in report.cells)


def _more(report: BenchReport) -> Iterator[tuple[str, str]]:
    yield from ((name, str(standing)) for name, standing in standings(report))
    if any(column.name == "torch" for column in report.columns):
        yield "torch.distributed.rpc", "polls without a rest, so it is stopped while others have their turn"
    yield from left_out(report)


def show(report: BenchReport, out: TextIO) -> None:
    """Writes it all; errors are the caller's business."""
    present(out, list(tables(report)), FOOTNOTES, list(_more(report)))


def all_errors(report: BenchReport) -> list[str]:
    """All failures, each once, with the cell."""
    failed = [
        f"{title(cell.operation, cell.size)}: {timing.error}"
        for cell in report.cells
        for timing in cell.timings
        if timing.error
    ]
    return list(dict.fromkeys([*report.errors, *failed]))
