"""The goals of Phalanx's remote calls, and how it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phalanx.cli.bench.results import BenchReport, CellResult, Column
from phalanx.cli.bench.sizes import show_ratio
from phalanx.cli.bench.summary import ratio

from .plan import title

__all__ = ["GOALS", "YARDSTICK", "SpeedGoal", "best_peer", "standings"]

YARDSTICK = "pipe"
"""Beside the peers and none of them: it calls nothing."""


class SpeedGoal(NamedTuple):
    """So many times a contender's speed in one cell."""

    operation: str
    size: int
    against: str
    times: float


GOALS = (
    SpeedGoal("echo", 8, "torch", 10),
    SpeedGoal("echo", 8, "pipe", 1),
    SpeedGoal("in_flight", 8, "torch", 8),
    SpeedGoal("array", 16 << 20, "zmq", 2),
    SpeedGoal("array", 16 << 20, "torch", 2),
)
"""The same for shared memory and for TCP alone."""


class GoalStanding(NamedTuple):
    """How Phalanx, by one transport, stands beside a goal."""

    goal: SpeedGoal
    ours: Column
    peer: Column
    value: float

    @property
    def reached(self) -> bool:
        """Whether it is as fast as asked for."""
        return self.value >= self.goal.times

    def __str__(self) -> str:
        asked = f"{self.goal.times:g}" if self.reached else f"{self.goal.times:g}, missed"
        return f"{show_ratio(self.value)} times {self.peer.label}'s speed (asked for: {asked})"


def standings(report: BenchReport) -> Iterator[tuple[str, GoalStanding]]:
    """For every goal whose cell and contenders were measured: what it is about, and how it stands."""
    columns = {column.name: column for column in report.columns}
    for ours in (column for column in report.columns if column.ours):
        for goal in GOALS:
            cell = _cell(report, goal)
            value = None if cell is None else ratio(report, cell, against=goal.against, of=ours.name)
            if value is not None:
                text = f"{ours.label}, {title(goal.operation, goal.size)}"
                yield text, GoalStanding(goal, ours, columns[goal.against], value)


def _cell(report: BenchReport, goal: SpeedGoal) -> CellResult | None:
    return next((cell for cell in report.cells if (cell.operation, cell.size) == goal[:2]), None)


def best_peer(report: BenchReport, cell: CellResult) -> tuple[Column, float] | None:
    """The fastest peer and its time; None if none took part. The yardstick is none."""
    found = [
        (column, timing.seconds)
        for column in report.columns
        if not column.ours and column.name != YARDSTICK
        if (timing := cell.of(column.name)) is not None and timing.seconds is not None
    ]
    return min(found, key=lambda pair: pair[1], default=None)
