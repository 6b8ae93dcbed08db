"""The goals of the plug-in beside Gloo, and how it stands."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cli.bench.results import BenchReport
from phalanx.cli.bench.sizes import show_ratio, show_size
from phalanx.cli.bench.summary import Standing, place, standings

from .operations import MESSAGES

__all__ = ["asked_for", "missed", "standing", "summary"]

_SMALL = 16 << 10
_ASKED = {"collectives": (6, 2.5), "messages": (4, 2)}
"""So many times Gloo's speed: up to `_SMALL` bytes, and above."""


def _kind(operation: str) -> str:
    return "messages" if operation in MESSAGES else "collectives"


def asked_for(operation: str, size: int) -> float:
    """So many times Gloo's speed, for an operation on arrays of so many bytes."""
    return _ASKED[_kind(operation)][size > _SMALL]


def missed(report: BenchReport) -> list[Standing]:
    """The cells in which Phalanx is not as fast as asked for."""
    return [found for found in standings(report) if found.ratio < asked_for(found.cell.operation, found.cell.size)]


def slowest(report: BenchReport) -> Iterator[tuple[str, Standing]]:
    """The slowest cell of each class of operations and sizes, with the name of the class."""
    found = standings(report)
    for kind in _ASKED:
        for is_long, sizes in enumerate((f"up to {show_size(_SMALL)}", "above")):
            among = [one for one in found if _kind(one.cell.operation) == kind and (one.cell.size > _SMALL) == is_long]
            if among:
                yield f"{kind} {sizes}", min(among, key=lambda standing: standing.ratio)


def standing(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Lines of a name and a text, for readers of the documentation: the slowest cell of each class."""
    for name, least in slowest(report):
        yield name, f"at least {show_ratio(least.ratio)} times as fast as {least.peer.label} ({place(least.cell)})"


def summary(report: BenchReport) -> Iterator[tuple[str, str]]:
    """The same for developers at a terminal, beside what is asked for, and what was missed."""
    for (name, text), (_, least) in zip(standing(report), slowest(report), strict=True):
        yield name, f"{text}; asked for: {asked_for(least.cell.operation, least.cell.size):g}"
    for found in missed(report):
        asked = f"{asked_for(found.cell.operation, found.cell.size):g}"
        yield "missed", f"{place(found.cell)}: {show_ratio(found.ratio)} times, asked for: {asked}"
