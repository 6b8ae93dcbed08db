"""Which algorithm is the fastest over TCP on this machine: where the crossover points of `algorithms.select` come from.

    python -m tests.soak.crossover [ranks] [seconds per cell]

The algorithms of an operation take turns in one run, so that a busy machine is unfair to all of them alike. Each cell
is the median of rank 0 in microseconds; `*` marks what `select` chooses.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import phalanx as px
from phalanx.algorithms import select
from phalanx.config.algorithms import ALGORITHMS
from phalanx.group.engines.network import NetworkEngine
from phalanx.testing import run_ranks

SIZES = [8, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
ROUNDS = 7


def call(group: px.Group, operation: str, nbytes: int) -> Callable[[], Any]:
    n = group.world_size
    row = np.ones(max(nbytes // 4 // n, 1) * n, np.float32)
    part = row[: row.size // n].copy()
    other = np.empty_like(row)
    return {
        "all_gather": lambda: group.all_gather(part, other),
        "all_reduce": lambda: group.all_reduce(row, "max"),
        "all_to_all": lambda: group.all_to_all(row, other),
        "barrier": group.barrier,
        "broadcast": lambda: group.broadcast(row, 0),
        "reduce": lambda: group.reduce(row, 0, "max"),
        "reduce_scatter": lambda: group.reduce_scatter(row, "max", part),
    }[operation]


def measure(group: px.Group, seconds: float) -> list[tuple[str, int, dict[str, float]]]:
    table = []
    for operation, names in ALGORITHMS.items():
        engines = {
            name: NetworkEngine(group._collectives, is_star=False, algorithm=f"{operation}={name}") for name in names
        }
        for nbytes in SIZES if operation != "barrier" else [0]:
            run = call(group, operation, nbytes)
            times: dict[str, list[float]] = {name: [] for name in names}
            for number in range(ROUNDS + 1):
                for name, engine in engines.items():
                    group._engine = engine
                    run()
                    began = time.perf_counter()
                    run()
                    share = seconds / ROUNDS / len(names) / max(time.perf_counter() - began, 1e-6)
                    repeats = int(group.broadcast(np.array([min(max(share, 1), 200)], np.int64), 0)[0])
                    for _ in range(repeats if number else 0):  # the first round warms up
                        began = time.perf_counter()
                        run()
                        times[name].append(time.perf_counter() - began)
            table.append((operation, nbytes, {name: statistics.median(found) * 1e6 for name, found in times.items()}))
    return table


def main() -> None:
    ranks, seconds = int((*sys.argv[1:], 4)[0]), float((*sys.argv[2:], 0.5)[0])
    for operation, nbytes, medians in run_ranks(
        ranks, measure, seconds, backend="mesh", env={"PHALANX_TRANSPORT": "tcp"}, timeout=3600
    )[0]:
        chosen = select.choose(operation, ranks, nbytes)
        cells = [f"{name}{'*' if name == chosen else ''} {median:.0f}" for name, median in medians.items()]
        print(f"{operation:14} {nbytes:>9}  {'   '.join(cells)}")


if __name__ == "__main__":
    main()
