"""A whole run: the machine, the measuring, the report."""

from __future__ import annotations

import datetime as dt
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import phalanx
from phalanx.cli.run.plan import cores

from .contenders import Missing, Site
from .machine import MachineLimits, describe, measure_bandwidth
from .measure import Measuring
from .plan import BenchPlan
from .progress import progress
from .results import BenchReport, Column

__all__ = ["run"]


def run(
    plan: BenchPlan, *, missing: Sequence[Missing] = (), command: str = "", site: Site | None = None
) -> tuple[BenchReport, bool]:
    """Measures a plan. Leaves no process or file behind.

    Returns:
        The report; and whether it cannot be relied on, because Phalanx failed somewhere or a limit was none.
    """
    cells = sum(1 for ranks in plan.ranks for _ in plan.cells(ranks))
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder, progress(sys.stderr, cells) as step:
        step("the memory's speed")
        teams = sorted({1, min(cores(), max(plan.ranks))})
        bandwidth = [found for count in teams for found in measure_bandwidth(count)]
        measuring = Measuring(plan, site=site or Site(), folder=Path(folder), limits=MachineLimits(), step=step)
        measuring.run()
    columns = [
        Column(
            name=entrant.name,
            label=entrant.label,
            ours=entrant.contender.is_ours,
            in_segment=entrant.in_segment,
            version=measuring.versions.get(entrant.contender.name, ""),
        )
        for entrant in plan.entrants()
    ]
    report = BenchReport(
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        command=command,
        version=phalanx.__version__,
        machine=describe(bandwidth),
        columns=columns,
        missing={peer.name: peer.reason for peer in missing},
        cells=measuring.cells,
        memory=measuring.memory,
        errors=measuring.errors,
    )
    return report, measuring.ours_failed or measuring.limit_broken
