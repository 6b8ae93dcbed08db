"""The command line of `python -m benchmarks torch-calls`: what torch.distributed adds to the calls of Phalanx."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Sequence

import click

import phalanx as px
from phalanx.cli.bench.options import sizes_of
from phalanx.cli.bench.show import present
from phalanx.cli.bench.sizes import show_size
from phalanx.errors import BackendUnavailable

from ..table import PlainTable

__all__ = ["command"]

FOOTNOTES = (
    "Bare: the call of a group of Phalanx on a NumPy array. The others: what torch.distributed takes beyond it.",
    "Asynchronous: async_op=True, isend and irecv, with wait() at once. Nothing: a process group that does nothing.",
    "A message is one way there; its nothing is that of a send and a receive. 2 ranks; the best quarter of the rounds.",
)


@click.command(
    "torch-calls",
    short_help="Measure what torch.distributed adds to the calls of Phalanx.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-s", "--sizes", metavar="LIST", default="4,16K", show_default=True, callback=sizes_of)
@click.option("--rounds", type=click.IntRange(4), default=60, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=60, show_default=True, help="In each round.")
def command(sizes: list[int], rounds: int, calls: int) -> None:
    """Measure the microseconds that a call of torch.distributed adds to the bare call, by profile."""
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed (pip install torch; its CPU build is enough)")
    from .added_rank import ASYNCHRONOUS, BARE, FLOOR, SYNCHRONOUS, run_rank

    tables = []
    for size in sizes:
        found = px.launch(run_rank, 2, size, rounds, calls)
        head = ["operation", "bare", "torch adds", "nothing", "asynchronous adds", "nothing"]
        table = PlainTable(f"{show_size(size)}, in µs", head)
        for name in found[0]:
            ways = {way: _best(*(ranks[name][way] for ranks in found)) for way in found[0][name]}
            row = [name, f"{ways[BARE]:.1f}"]
            for way in (SYNCHRONOUS, ASYNCHRONOUS):
                if way not in ways:
                    row += ["", ""]
                    continue
                row += [f"{ways[way] - ways[BARE]:.1f}", f"{ways[way + FLOOR]:.1f}"]
            table.rows.append(row)
        tables.append(table)
    present(sys.stdout, tables, FOOTNOTES, [])


def _best(*ranks: Sequence[float]) -> float:
    """Microseconds of the slower rank, at the lower quartile of the rounds."""
    slower = [max(times) for times in zip(*ranks, strict=True)]
    quarter: float = statistics.quantiles(slower, n=4)[0]
    return quarter * 1e6
