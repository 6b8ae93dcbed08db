"""A whole run: the machine, the measuring, the report."""

from __future__ import annotations

import contextlib
import datetime as dt
import signal
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
from .results import BenchReport, CellName, Column

__all__ = ["run"]


def run(
    plan: BenchPlan,
    *,
    missing: Sequence[Missing] = (),
    command: str = "",
    site: Site | None = None,
    json_file: Path | None = None,
) -> tuple[BenchReport, int]:
    """Measures a plan. Leaves no process or temporary file behind.

    Args:
        plan: What to measure.
        missing: Peers that were asked for and cannot take part.
        command: The command line, for the report.
        site: Where the contenders run.
        json_file: Where to write the report after each cell, so that a run that is ended has not been for nothing.

    Returns:
        The report; and the exit code: that of the signal that cut the run short, else 1 if the report cannot be relied
        on, because Phalanx failed somewhere or a limit was none, or if it could not be written.

    Raises:
        SystemExit: A signal came before the first cell was measured.
    """
    cells = [CellName(**cell._asdict()) for ranks in plan.ranks for cell in plan.cells(ranks)]

    def report() -> BenchReport:
        return BenchReport(
            date=date,
            command=command,
            version=phalanx.__version__,
            machine=machine,
            columns=_columns(plan, measuring.versions),
            missing={peer.name: peer.reason for peer in missing},
            cells=measuring.cells,
            memory=measuring.memory,
            errors=measuring.errors,
            unmeasured=cells[len(measuring.cells) :],
        )

    def measured() -> None:
        # Of what is no file, as a pipe, the reader wants one report.
        if json_file is not None and (json_file.is_file() or not json_file.exists()):
            with contextlib.suppress(OSError):  # a full disk may have room again; if it has not, the end says so
                report().write(json_file)

    code = 0
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder, progress(sys.stderr, len(cells)) as step:
        step("the memory's speed")
        teams = sorted({1, min(cores(), max(plan.ranks))})
        date = dt.datetime.now(dt.timezone.utc).date().isoformat()
        machine = describe([found for count in teams for found in measure_bandwidth(count)])
        measuring = Measuring(
            plan, site=site or Site(), folder=Path(folder), limits=MachineLimits(), step=step, measured=measured
        )
        try:
            measuring.run()
        except (KeyboardInterrupt, SystemExit) as ended:
            if not measuring.cells:
                raise
            code = int(ended.code or 0) if isinstance(ended, SystemExit) else 128 + signal.SIGINT
    unwritten = False
    try:
        if json_file is not None:
            report().write(json_file)
    except OSError as error:  # what was measured is shown all the same
        unwritten = True
        measuring.errors.append(f"the results could not be written to {json_file}: {error.strerror}")
    return report(), code or int(measuring.ours_failed or measuring.limit_broken or unwritten)


def _columns(plan: BenchPlan, versions: dict[str, str]) -> list[Column]:
    return [
        Column(
            name=entrant.name,
            label=entrant.label,
            ours=entrant.contender.is_ours,
            in_segment=entrant.in_segment,
            version=versions.get(entrant.contender.name, ""),
        )
        for entrant in plan.entrants()
    ]
