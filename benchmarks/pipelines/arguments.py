"""The command line of `python -m benchmarks pipeline`."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Sequence

import click

import phalanx as px
from phalanx.cli.bench.show import present
from phalanx.cli.bench.sizes import show_seconds
from phalanx.errors import BackendUnavailable

from ..table import PlainTable

__all__ = ["command"]

FOOTNOTES = (
    "Bubble: the time that a rank is not in a stage, in parts of the time that it is, as measured: median of steps.",
    "Theory: if messages, autograd and the loop itself took no time.",
    "Time per step: median, until the last rank is done.",
)


@click.command(
    "pipeline",
    short_help="Measure how long ranks of a pipeline are idle, beside torch's pipelining.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-n", "--ranks", type=click.IntRange(2, 64), default=4, show_default=True)
@click.option("--microbatches", default=8, show_default=True)
@click.option("--ms", default=10.0, show_default=True, help="Of a rank's forward of a micro-batch; backward: twice.")
@click.option("--steps", default=5, show_default=True)
def command(ranks: int, microbatches: int, ms: float, steps: int) -> None:
    """Measure the bubble of each schedule."""
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed (pip install torch; its CPU build is enough)")
    from .rank import SCHEDULES, run_rank

    found = px.launch(run_rank, ranks, ms, microbatches, steps)
    table = PlainTable(
        f"{ranks} ranks, {microbatches} micro-batches, stages of {show_seconds(microbatches * 3 * ms / 1000)} per step",
        ["schedule", "theory", "Phalanx", "time per step", "torch on Phalanx", "time per step"],
    )
    for name, (per_rank, _) in SCHEDULES.items():
        row = [name, f"{(ranks - 1) / (per_rank * microbatches):.1%}"]
        for maker in ("_of_phalanx", "_of_torch"):
            each_step = list(zip(*[ranks_steps[f"{name}{maker}"] for ranks_steps in found], strict=True))
            bubbles = [_bubble(step) for step in each_step]
            seconds = [step[0][0] for step in each_step]
            row += [f"{statistics.median(bubbles):.1%}", show_seconds(statistics.median(seconds))]
        table.rows.append(row)
    present(sys.stdout, [table], FOOTNOTES, [])


def _bubble(ranks: Sequence[tuple[float, float]]) -> float:
    """Of a step: how long it took and how long the stages of each rank took."""
    return ranks[0][0] / statistics.mean(spent for _, spent in ranks) - 1
