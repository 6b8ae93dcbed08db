"""The goals of the plug-in beside Gloo, and how it stands."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cli.bench.results import BenchReport
from phalanx.cli.bench.sizes import show_ratio, show_size
from phalanx.cli.bench.summary import Standing, place, standings

__all__ = ["asked_for", "missed", "summary"]

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


def summary(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Lines of a name and a text: the least of each class of sizes, and what was missed."""
    found = standings(report)
    bounds = (("up to", 0, _SMALL), ("up to", _SMALL + 1, _MEDIUM), ("up to", _MEDIUM + 1, _LARGE))
    for word, low, high in bounds:
        among = [standing for standing in found if low <= standing.cell.size <= high]
        if among:
            least = min(among, key=lambda standing: standing.ratio)
            text = f"at least {show_ratio(least.ratio)} times {least.peer.label} ({place(least.cell)})"
            yield f"{word} {show_size(high)}", f"{text}; asked for: {asked_for(high):g}"
    for standing in missed(report):
        asked = f"{asked_for(standing.cell.size):g}"
        yield "missed", f"{place(standing.cell)}: {show_ratio(standing.ratio)} times, asked for: {asked}"
