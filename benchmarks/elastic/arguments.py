"""The command line of `python -m benchmarks elastic`."""

from __future__ import annotations

import statistics
import sys

import click

import phalanx as px
from phalanx.cli.bench.show import present
from phalanx.cli.bench.sizes import show_seconds

from ..table import PlainTable
from .rank import CONTENDERS, PLAIN, run_rank

__all__ = ["command"]

FOOTNOTES = (
    "Time that a step of a loop takes more than a plain one: the difference of the medians, and its share of the step.",
)


@click.command(
    "elastic",
    short_help="Measure steps that are committed, beside plain ones.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-n", "--ranks", type=click.IntRange(1, 256), default=2, show_default=True)
@click.option("--ms", type=float, multiple=True, default=[1, 10, 100], show_default=True, help="Length of a step.")
@click.option("--seconds", default=2.0, show_default=True, help="For each length and each kind of loop.")
def command(ranks: int, ms: tuple[float, ...], seconds: float) -> None:
    """Measure what committing a step costs: the vote alone, and with copies of states of several sizes."""
    names = [name for name in CONTENDERS if name != PLAIN]
    table = PlainTable("Cost of a committed step", ["step", "plain", *names])
    for length in ms:
        found = px.launch(run_rank, ranks, length / 1e3, seconds)[0]
        plain = statistics.median(found[PLAIN])
        row = [f"{length:g} ms", show_seconds(plain)]
        for name in names:
            more = statistics.median(found[name]) - plain
            row.append(f"{more * 1e6:+.0f} µs ({more / plain:+.1%})")
        table.rows.append(row)
    present(sys.stdout, [table], FOOTNOTES, [])
