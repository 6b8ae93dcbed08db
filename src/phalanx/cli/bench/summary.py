"""The figures in words: how Phalanx stands beside the best peer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .results import BenchReport, CellResult, Column
from .sizes import show_ratio, show_seconds, show_size

__all__ = ["Standing", "best_peer", "geometric_mean", "operations", "place", "primary", "ratio", "standings", "summary"]

_FROM = 16 << 10
"""Bytes from which on all_reduce is compared with Open MPI's by itself."""
_OPENMPI = ("openmpi", "openmpi-tcp")
_SHORT, _LONG = 1 << 10, 1 << 20
"""Bytes up to which a call is all overhead, and from which on it is all transfer."""


class Standing(NamedTuple):
    """One cell in which Phalanx and at least one peer took part."""

    cell: CellResult
    ratio: float
    """The best peer's time in parts of Phalanx's: above 1, Phalanx is faster."""
    peer: Column


def primary(report: BenchReport) -> Column:
    """The column that peers are compared with: Phalanx, over the first transport, with ordinary arrays."""
    return next(column for column in report.columns if column.ours)


def best_peer(report: BenchReport, cell: CellResult) -> tuple[float, Column] | None:
    """The fastest peer's time in a cell; None if none took part."""
    times = []
    for column in report.columns:
        timing = cell.of(column.name)
        if not column.ours and timing is not None and timing.seconds is not None:
            times.append((timing.seconds, column))
    return min(times, key=lambda pair: pair[0], default=None)


def ratio(report: BenchReport, cell: CellResult, *, against: str | None = None, of: str | None = None) -> float | None:
    """A peer's time in parts of Phalanx's; the best peer's, unless one is named. None where either is missing."""
    ours = cell.of(of or primary(report).name)
    if ours is None or ours.seconds is None:
        return None
    if against is None:
        best = best_peer(report, cell)
        return None if best is None else best[0] / ours.seconds
    peer = cell.of(against)
    return None if peer is None or peer.seconds is None else peer.seconds / ours.seconds


def standings(report: BenchReport) -> list[Standing]:
    """All cells that can be compared."""
    found = []
    for cell in report.cells:
        value, best = ratio(report, cell), best_peer(report, cell)
        if value is not None and best is not None:
            found.append(Standing(cell, value, best[1]))
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean, which is the right one for ratios."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def operations(cells: Sequence[CellResult]) -> list[str]:
    """The operations of the cells, in order."""
    return list(dict.fromkeys(cell.operation for cell in cells))


def place(cell: CellResult) -> str:
    """A cell in words."""
    size = f" of {show_size(cell.size)}" if cell.size else ""
    dtype = f" {cell.dtype}" if cell.dtype not in ("", "float32") else ""
    return f"{cell.operation}{size}{dtype} on {cell.ranks} ranks"


def summary(report: BenchReport) -> list[tuple[str, str]]:
    """Lines of a name and a text. Empty without peers."""
    found = standings(report)
    if not found:
        return []
    by_operation = {
        operation: geometric_mean(standing.ratio for standing in found if standing.cell.operation == operation)
        for operation in operations([standing.cell for standing in found])
    }
    worst = min(found, key=lambda standing: standing.ratio)
    slower = [standing for standing in found if standing.ratio < 0.95]
    mean = geometric_mean(standing.ratio for standing in found)
    lines = [
        ("all cells", f"{show_ratio(mean)} times the best peer's speed ({len(found)} cells)"),
        *((operation, f"{show_ratio(value)} times") for operation, value in by_operation.items()),
        ("worst cell", f"{show_ratio(worst.ratio)} times {worst.peer.label}, {place(worst.cell)}"),
        ("more than 5 % slower", f"{len(slower)} of {len(found)} cells"),
    ]
    return [*lines, *_added_to_mpi(report), *_beside_openmpi(report), *_in_segment(report)]


def _added_to_mpi(report: BenchReport) -> list[tuple[str, str]]:
    """The time that Phalanx adds to a call of the MPI that it runs on."""
    lines = []
    for column in report.columns:
        base = column.name.removeprefix("phalanx-").removesuffix("-apart")
        beside = next((peer for peer in report.columns if peer.name == base), None)
        if not column.ours or column.in_segment or beside is None or beside.ours:
            continue
        short, long = [], []
        for cell in report.cells:
            mine, bare = cell.of(column.name), cell.of(base)
            if mine is None or bare is None or mine.seconds is None or bare.seconds is None:
                continue
            if cell.size <= _SHORT:
                short.append(mine.seconds - bare.seconds)
            elif cell.size >= _LONG:
                long.append(mine.seconds / bare.seconds)
        texts = []
        if short:
            texts.append(f"{statistics.median(short) * 1e6:.2f} µs up to {show_size(_SHORT)} (median of cells)")
        if long:
            texts.append(f"{(geometric_mean(long) - 1) * 100:.1f} % from {show_size(_LONG)} (geometric mean)")
        if texts:
            lines.append((f"added to {beside.label} per call", ", ".join(texts)))
    return lines


def _beside_openmpi(report: BenchReport) -> list[tuple[str, str]]:
    lines = []
    for column in report.columns:
        cells = [cell for cell in report.cells if cell.operation == "all_reduce" and cell.size >= _FROM]
        pairs = [(ratio(report, cell, against=column.name), cell) for cell in cells]
        known = [(value, cell) for value, cell in pairs if value is not None]
        if column.name not in _OPENMPI or not known:
            continue
        least, where = min(known, key=lambda pair: pair[0])
        largest = max(cell.size for _, cell in known)
        at_largest = " and ".join(f"{show_ratio(value)} on {c.ranks} ranks" for value, c in known if c.size == largest)
        text = f"from {show_size(_FROM)} up at least {show_ratio(least)} times ({place(where)})"
        lines.append((f"all_reduce beside {column.label}", f"{text}; {at_largest} at {show_size(largest)}"))
    return lines


def _in_segment(report: BenchReport) -> list[tuple[str, str]]:
    lines = []
    for column in report.columns:
        if not column.in_segment:
            continue
        for cell in report.cells:
            timing = cell.of(column.name)
            if timing is None or timing.seconds is None or cell.size != max(c.size for c in report.cells):
                continue
            beside = [
                f"{show_ratio(value)} times {peer.label}"
                for peer in report.columns
                if not peer.ours and (value := ratio(report, cell, against=peer.name, of=column.name)) is not None
            ]
            lines.append((f"{column.label}, {place(cell)}", f"{show_seconds(timing.seconds)}: {', '.join(beside)}"))
    return lines
