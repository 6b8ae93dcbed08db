"""The command line of `python -m benchmarks seeing`."""

from __future__ import annotations

import statistics
import sys
import threading
import time

import click

import phalanx as px
from phalanx.cli.bench.show import present
from phalanx.cli.bench.sizes import show_seconds
from phalanx.seeing.slates import jobs_here, read_files
from phalanx.seeing.watch import JobWatch
from phalanx.slate import layout

from ..table import PlainTable
from .rank import Costs, run_rank

__all__ = ["command"]

LOOK = 0.25
FOOTNOTE = "Medians over the turns of all ranks; the difference is that between two turns that followed each other."


@click.command(
    "seeing",
    short_help="Measure what it costs that ranks note their operations.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("-n", "--ranks", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--turns", default=60, show_default=True, help="With each of the two groups.")
@click.option("--seconds", default=0.1, show_default=True, help="Of one turn.")
@click.option("--what", default="all_reduce,gpt", show_default=True, help="8-byte all_reduce, and models to train.")
def command(ranks: int, turns: int, seconds: float, what: str) -> None:
    """Measure operations that are noted for `phalanx top` beside operations that are not, and what a reader costs."""
    table = PlainTable(f"{ranks} ranks", ["", "noted", "not noted", "difference"])
    reader = Reader()
    for name in what.split(","):
        found = px.launch(run_rank, ranks, name, turns, seconds)
        table.rows.append([name, *_row(found)])
    reader.stop()
    look = f"A look of a reader took {show_seconds(reader.median)} of a processor, every {LOOK:g} s."
    present(sys.stdout, [table], [FOOTNOTE, f"Memory: {layout.SIZE >> 10} KiB for each rank. {look}"], [])


def _row(found: list[Costs]) -> list[str]:
    noted = statistics.median(seconds for costs in found for seconds in costs.noted)
    plain = statistics.median(seconds for costs in found for seconds in costs.plain)
    more = statistics.median(a / b - 1 for costs in found for a, b in zip(costs.noted, costs.plain, strict=True))
    return [show_seconds(noted), show_seconds(plain), f"{more:+.2%}"]


class Reader:
    """Looks at the job that runs, as the launcher does for a page."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        watches: dict[str, JobWatch] = {}
        while not self._ended.wait(LOOK):
            alive = [job.job for job in jobs_here() if job.alive][:1]
            for job in alive:
                watch = watches.setdefault(job, JobWatch(lambda job=job: read_files(job)))  # type: ignore[misc]
                began = time.thread_time()
                watch.look()
                self._times.append(time.thread_time() - began)

    def stop(self) -> None:
        """Ends looking."""
        self._ended.set()
        self._thread.join()

    @property
    def median(self) -> float:
        """Seconds of a processor for one look."""
        return statistics.median(self._times) if self._times else 0.0
