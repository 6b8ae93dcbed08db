"""The command line of `python -m benchmarks memory`."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

import click

import phalanx as px
from phalanx.cli.bench.show import present
from phalanx.cli.bench.sizes import show_seconds
from phalanx.errors import BackendUnavailable

from ..table import PlainTable

__all__ = ["command"]

FOOTNOTES = (
    "Memory: the proportional share (PSS) of the rank that has most, at its peak in a step and between two steps.",
    "Python and torch themselves are part of it.",
    "Time per step: median over all steps, from the first rank's begin to the last one's end. One thread per rank.",
)


@click.command(
    "memory",
    short_help="Measure memory and time of a GPT with 124 million parameters.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-n", "--ranks", type=click.IntRange(2, 64), default=4, show_default=True)
@click.option("--size", type=click.Choice(["124M", "tiny"]), default="124M", show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Length of the text of each rank.")
@click.option("--steps", default=3, show_default=True, help="By the clock, in each round.")
@click.option("--rounds", default=2, show_default=True, help="In each, every contender takes its turn.")
@click.option("--only", default="", metavar="WORDS", help="Those whose names have these words.")
def command(ranks: int, size: str, tokens: int, steps: int, rounds: int, only: str) -> None:
    """Measure memory per rank and time per step of sharded and of plain data parallelism."""
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed (pip install torch; its CPU build is enough)")
    from .rank import CONTENDERS, Figures, run_rank

    found: dict[str, list[Figures]] = {name: [] for name in CONTENDERS if only in name}
    if not found:
        raise click.UsageError(f"--only {only!r} leaves nothing (there are {', '.join(CONTENDERS)})")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for turn in range(rounds):
            for number, name in enumerate(found):
                store = Path(folder) / f"{turn}-{number}"
                found[name] += px.launch(run_rank, ranks, str(store), name, size, tokens, steps)
    table = PlainTable(
        f"GPT, {size} parameters, {ranks} ranks", ["", "peak", "between steps", "time per step", "first loss", "last"]
    )
    for name, all_figures in found.items():
        times = [seconds for figures in all_figures for seconds in figures.steps]
        peak = max(figures.peak for figures in all_figures)
        between = max(figures.between for figures in all_figures)
        losses = all_figures[0].losses
        shown = [f"{peak >> 20} MiB", f"{between >> 20} MiB", show_seconds(statistics.median(times))]
        table.rows.append([name, *shown, f"{losses[0]:.6f}", f"{losses[-1]:.6f}"])
    present(sys.stdout, [table], FOOTNOTES, [])
