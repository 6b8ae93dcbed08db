"""Makes, uses and closes thousands of sub-groups, and looks at what is left of them.

    python -m tests.soak.groups [--groups 10000] [--ranks 4]

Descriptors, threads, mappings and /dev/shm must be as they were after the first 1,500, and memory must not grow with
the number of groups. Exits with 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import phalanx as px
from phalanx.testing import run_ranks

WARM = 1500
"""Groups before the first look: a rank remembers the last thousand that were closed."""
GROWTH = 4 << 20
"""Bytes of memory that all groups together may leave: the allocator's own, not one thing per group."""


def measure() -> dict[str, int]:
    """What a process holds."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident is not None
    shared = Path("/dev/shm")
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("phalanx"),
        "/dev/shm": len(list(shared.iterdir())) if shared.is_dir() else 0,
        "memory": int(resident[1]) << 10,
    }


def use(world: px.Group, groups: int) -> tuple[dict[str, int], dict[str, int], float]:
    """Makes and closes groups; what was held before and after, and the seconds it took."""
    before = measure()
    began = time.perf_counter()
    for number in range(groups):
        if number == WARM:
            world.barrier()
            before = measure()
        members = range(world.world_size) if number % 2 else range(2)
        if world.rank not in members:
            continue
        with world.subgroup(members) as group:
            x = np.ones(100 if number % 3 else 5000)
            group.all_reduce(x)
            assert x[0] == len(members)
            if number % 5 == 0:
                y = group.empty(1000)
                group.all_reduce(y)
                group.sendrecv(x, (group.rank + 1) % len(members), src=(group.rank - 1) % len(members))
                del y
    world.barrier()
    return before, measure(), time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.groups", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    results: list[Any] = run_ranks(options.ranks, use, options.groups, backend="mesh", timeout=3600)
    good = True
    for rank, (before, after, seconds) in enumerate(results):
        words = ", ".join(f"{name} {before[name]} -> {after[name]}" for name in before)
        console.print(f"rank {rank}: {options.groups} groups in {seconds:.0f} s: {words}", highlight=False)
        for name, value in after.items():
            most = before[name] + (GROWTH if name == "memory" else 0)
            if value > most:
                good = False
                console.print(f"[red]rank {rank}: {name} grew from {before[name]} to {value}")
    console.print("[green]nothing is left" if good else "[red]something is left")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
