"""The goals of the plug-in beside Gloo, and how it stands."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cli.bench.results import BenchReport
from phalanx.cli.bench.sizes import show_ratio, show_size
from phalanx.cli.bench.summary import Standing, place, standings

__all__ = ["asked_for", "missed", "standing", "summary"]

_SMALL, _MEDIUM, _LARGE = 16 << 10, 1 << 20, 64 << 20


def asked_for(size: int) -> float:
    """So many times Gloo's speed, for arrays of so many bytes."""
    if size <= _SMALL:
        return 10
    if size <= _MEDIUM:
        return 4
    return 2 if size <= _LARGE else 1


def missed(report: BenchReport) -> list[Standing]:
    """The cells in which Phalanx is not as fast as asked for."""
    return [standing for standing in standings(report) if standing.ratio < asked_for(standing.cell.size)]


def slowest(report: BenchReport) -> Iterator[tuple[int, Standing]]:
    """The slowest cell of each class of sizes, with the largest size of the class."""
    found = standings(report)
    for low, high in ((0, _SMALL), (_SMALL + 1, _MEDIUM), (_MEDIUM + 1, _LARGE)):
        among = [standing for standing in found if low <= standing.cell.size <= high]
        if among:
            yield high, min(among, key=lambda standing: standing.ratio)


def standing(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Lines of a name and a text, for readers of the documentation: the slowest cell of each class of sizes."""
    for high, least in slowest(report):
        text = f"at least {show_ratio(least.ratio)} times as fast as {least.peer.label} ({place(least.cell)})"
        yield f"up to {show_size(high)}", text


def summary(report: BenchReport) -> Iterator[tuple[str, str]]:
    """The same for developers at a terminal, beside what is asked for, and what was missed."""
    for (name, text), (high, _) in zip(standing(report), slowest(report), strict=True):
        yield name, f"{text}; asked for: {asked_for(high):g}"
    for found in missed(report):
        asked = f"{asked_for(found.cell.size):g}"
        yield "missed", f"{place(found.cell)}: {show_ratio(found.ratio)} times, asked for: {asked}"
