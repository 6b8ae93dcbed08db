"""The command line of `python -m benchmarks checkpoint`."""

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
    "Time until the last rank has returned: median over rounds. The raw write has as many bytes, in one file per rank.",
)


@click.command(
    "checkpoint",
    short_help="Measure saves, beside torch's DCP and a plain write.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-n", "--ranks", type=click.IntRange(1, 256), multiple=True, default=[1, 4], show_default=True)
@click.option("--mib", default=1024, show_default=True, help="Size of the large tensor.")
@click.option("--rounds", default=5, show_default=True, help="Saves by each contender, in turns.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="On the disk to measure.")
def command(ranks: tuple[int, ...], mib: int, rounds: int, folder: Path | None) -> None:
    """Measure the time to save a thousand small tensors, and a large one, by px.checkpoint and by torch's DCP."""
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed (pip install torch; its CPU build is enough)")
    from .rank import CONTENDERS, TREES, run_rank

    table = PlainTable("Time to save", ["", "ranks", *CONTENDERS, "Phalanx / write", "DCP / Phalanx"])
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as place:
        for count in ranks:
            for name in TREES:
                found = px.launch(run_rank, count, place, name, mib << 20, rounds)
                raw, ours, theirs = (statistics.median(found[0][contender]) for contender in CONTENDERS)
                times = [show_seconds(each) for each in (raw, ours, theirs)]
                table.rows.append([name, str(count), *times, f"{ours / raw:.2f}", f"{theirs / ours:.1f}"])
    present(sys.stdout, [table], FOOTNOTES, [])
