"""Runs the programs of many seeds on the core with jitter.

    make jitter SEEDS=1000            # or, of one seed: make jitter-seeds FIRST=17 SEEDS=1
    make jitter-seeds ARGS="--only late"

Each seed is a world of two or three processes. A failure is shown with its seed and how to run it again. The seed
decides where ranks pause and for how long, but not what else the machine does: a seed that failed may need a few runs
to fail again. Exits with 1 if a seed failed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import signal
import sys
import time

from rich.console import Console
from rich.progress import Progress
from tests.jitter import programs

import phalanx as px
from phalanx._native import core
from phalanx.launching.failures import Died
from phalanx.testing import run_ranks

LIMIT = 60.0
"""Seconds for one seed; it takes about one."""


def run_seed(seed: int, only: str | None) -> str | None:
    """What is wrong with a seed; None if nothing is."""
    size = 2 + seed % 2
    try:
        results = run_ranks(
            size, programs.run, seed, only, backend="mesh", timeout=LIMIT, may_die=range(size), options=px.Options()
        )
        crashed = [died for died in results if isinstance(died, Died) and died.signal != signal.SIGKILL]
        if crashed:
            return "\n".join(f"rank {died.rank} {died}" for died in crashed)
        programs.judge([result for result in results if not isinstance(result, Died)])
    except Exception as error:
        return str(error)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.jitter", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="worlds at a time")
    parser.add_argument("--only", choices=programs.PROGRAMS, help="this program, in every seed")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    if not hasattr(core, "seed_jitter"):
        console.print("[red]this is not the core with jitter: use make jitter")
        return 2
    seeds = range(options.first, options.first + options.seeds)
    began = time.monotonic()
    failed: collections.Counter[str] = collections.Counter()
    with (
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        bar = progress.add_task("seeds", total=len(seeds))
        running = {pool.submit(run_seed, seed, options.only): seed for seed in seeds}
        for done in concurrent.futures.as_completed(running):
            progress.advance(bar)
            seed, wrong = running[done], done.result()
            if wrong is not None:
                failed[wrong.strip().split("\n", 1)[0]] += 1
                only = f' ARGS="--only {options.only}"' if options.only else ""
                console.print(f"[red]seed {seed} failed[/]; again: make jitter-seeds FIRST={seed} SEEDS=1{only}")
                console.print(wrong, markup=False)
    seconds = time.monotonic() - began
    console.print(f"{len(seeds)} seeds in {seconds:.0f} s, {failed.total()} failed")
    for words, count in failed.most_common():
        console.print(f"  {count} times: {words}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
