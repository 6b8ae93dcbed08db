"""The result for a person at a terminal, and for a log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from .results import BenchReport, CellName, CellResult, Timing
from .sizes import show_bytes, show_ratio, show_seconds, show_size
from .summary import place, ratio, summary

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FOOTNOTES", "Drawn", "ResultTable", "all_errors", "left_out", "present", "show", "show_timing", "tables"]

FOOTNOTES = (
    "Time per call: median over rounds of the slowest rank's loop; ± is half the distance between the quartiles.",
    "Size: that of the largest array that a rank holds. Ping-pong: half of a round trip.",
    "Limit: the best time for reading every input and writing every output once, by threads that share all memory.",
)


class Drawn(Protocol):
    """A table as words."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def value(self, row: int, column: int) -> float | None:
        """The ratio that stands there, which gives the colour; None for every other text."""


class ResultTable:
    """One operation on one number of ranks, as words."""

    def __init__(self, report: BenchReport, title: str, cells: Sequence[CellResult]) -> None:
        self.title = title
        columns = [column for column in report.columns if any(cell.of(column.name) for cell in cells)]
        peers = any(not column.ours for column in report.columns)
        limits = any(cell.limit is not None for cell in cells)
        self.head = ["size", *(column.label for column in columns)]
        self.head += ["best peer / Phalanx"] * peers + ["limit"] * limits
        self.rows: list[list[str]] = []
        self.ratios: list[float | None] = []
        self.ratio_at = len(columns) + 1 if peers else None
        for cell in cells:
            row = [show_size(cell.size), *(show_timing(cell.of(column.name)) for column in columns)]
            value = ratio(report, cell)
            row += ["" if value is None else show_ratio(value)] * peers
            row += ["" if cell.limit is None else show_seconds(cell.limit)] * limits
            self.rows.append(row)
            self.ratios.append(value)

    def value(self, row: int, column: int) -> float | None:
        """The ratio that stands there, if it is one."""
        return self.ratios[row] if column == self.ratio_at else None


def show_timing(timing: Timing | None) -> str:
    """Median and spread, or why there are none."""
    if timing is None:
        return ""
    if timing.seconds is None:
        return "n/a" if timing.lacks else "failed"
    return f"{show_seconds(timing.seconds)} ±{timing.spread:.0%}"


def tables(report: BenchReport) -> Iterator[ResultTable]:
    """All of them, in the order in which they were measured."""
    for (ranks, operation, dtype), cells in itertools.groupby(
        report.cells, key=lambda cell: (cell.ranks, cell.operation, cell.dtype)
    ):
        yield ResultTable(report, f"{operation}, {ranks} ranks{f', {dtype}' if dtype else ''}", list(cells))


def _more(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Everything beside the tables, as names and texts."""
    yield from summary(report)
    labels = {column.name: column.label for column in report.columns}
    for row in report.memory:
        name = f"memory, {labels[row.entrant]}, {row.ranks} ranks"
        text = f"{show_bytes(row.peak)} more at the peak, {show_bytes(row.kept)} kept"
        yield name, f"{text}, for an all_reduce of {show_size(row.size)}"
    for found in report.machine.bandwidth:
        which = "one core" if found.cores == 1 else f"{found.cores} cores"
        name = f"memory bandwidth, {which}, {show_size(found.size)} each"
        yield name, f"copy {found.copy / 1e9:.1f} GB/s, x += y {found.add / 1e9:.1f} GB/s of x"
    yield from left_out(report)


def left_out(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Peers and cells that were asked for and not measured, with reasons."""
    labels = {column.name: column.label for column in report.columns}
    for name, reason in report.missing.items():
        yield f"{name} left out", reason
    lacking = {
        f"{labels[timing.entrant]}: {timing.lacks}" for cell in report.cells for timing in cell.timings if timing.lacks
    }
    for text in sorted(lacking):
        yield "n/a", text
    if report.unmeasured:
        planned = len(report.cells) + len(report.unmeasured)
        which = "; ".join(_by_operation(report.unmeasured))
        yield "cut short", f"{len(report.unmeasured)} of {planned} cells were not measured: {which}"


def _by_operation(cells: Sequence[CellName]) -> Iterator[str]:
    """Cells in words: operations, each with its sizes."""
    for (operation, dtype, ranks), group in itertools.groupby(cells, key=lambda c: (c.operation, c.dtype, c.ranks)):
        name = f"{operation}{f' {dtype}' if dtype not in ('', 'float32') else ''} on {ranks} ranks"
        sizes = ", ".join(show_size(cell.size) for cell in group if cell.size)
        yield f"{name} ({sizes})" if sizes else name


def show(report: BenchReport, out: TextIO, more: Sequence[tuple[str, str]] = ()) -> None:
    """Writes the whole result, and more lines of a name and a text. The caller shows the errors."""
    present(out, list(tables(report)), FOOTNOTES, [*_more(report), *more])


def present(out: TextIO, found: Sequence[Drawn], footnotes: Sequence[str], lines: Sequence[tuple[str, str]]) -> None:
    """Writes tables, footnotes, and lines of a name and a text; with colour on a terminal."""
    if out.isatty():
        from rich.console import Console

        _present_rich(Console(file=out, highlight=False), found, footnotes, lines)
    else:
        _present_plain(out, found, footnotes, lines)


def _present_plain(
    out: TextIO, found: Sequence[Drawn], footnotes: Sequence[str], lines: Sequence[tuple[str, str]]
) -> None:
    for table in found:
        rows = [table.head, *table.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table.head))]
        out.write(f"\n{table.title}\n")
        for row in rows:
            cells = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            out.write("  ".join(cells).rstrip() + "\n")
    out.write("\n" + "\n".join(footnotes) + "\n\n")
    for name, text in lines:
        out.write(f"{name}: {text}\n")


def _present_rich(
    console: Console, found: Sequence[Drawn], footnotes: Sequence[str], lines: Sequence[tuple[str, str]]
) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in found:
        drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i, name in enumerate(table.head):
            drawn.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
        for i, row in enumerate(table.rows):
            cells = [Text(cell, "red" if cell == "failed" else "dim" if cell == "n/a" else "") for cell in row]
            for j, cell in enumerate(cells):
                value = table.value(i, j)
                if value is not None:
                    cell.stylize(_colour(value))
            drawn.add_row(*cells)
        console.print(drawn)
    for line in footnotes:
        console.print(line, style="dim")
    console.print()
    grid = RichTable.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(name, "cyan"), Text(text))
    console.print(grid)


def _colour(value: float) -> str:
    """Green where Phalanx is faster, red where it is slower by more than the noise."""
    return "bold green" if value >= 1.5 else "green" if value >= 1 else "yellow" if value >= 0.95 else "bold red"


def all_errors(report: BenchReport) -> list[str]:
    """All failures, each once, with the cell."""
    failed = [f"{place(cell)}: {timing.error}" for cell in report.cells for timing in cell.timings if timing.error]
    return list(dict.fromkeys([*report.errors, *failed]))
