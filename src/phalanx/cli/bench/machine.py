"""This machine, and the speed of its memory: no collective on one machine can be faster than that allows."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from phalanx.cli.run.plan import cores

from .operations import find_operation
from .results import Bandwidth, Machine

__all__ = ["LARGE", "describe", "limit", "measure_bandwidth"]

LARGE = 32 << 20
"""Bytes from which on arrays of several ranks fit no cache, so that the estimate of a limit means something."""
_BYTES = 64 << 20
_ROUNDS = 9


def describe(bandwidth: list[Bandwidth]) -> Machine:
    """This machine, with its measured bandwidth."""
    return Machine(
        cores=cores(),
        model=_model(),
        kernel=f"{platform.system()} {platform.release().split('-')[0]}",
        python=platform.python_version(),
        numpy=np.__version__,
        bandwidth=bandwidth,
    )


_ARM = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}


def _model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or _ARM.get(fields.get("CPU part", ""), "")
    return f"{name} ({platform.machine()})" if name else platform.machine()


def measure_bandwidth(threads: int) -> Bandwidth:
    """The bandwidth of so many threads at once, each with arrays of its own. NumPy lets go of the GIL for both."""
    pairs = [(np.zeros(_BYTES // 4, np.float32), np.ones(_BYTES // 4, np.float32)) for _ in range(threads)]
    copy = _seconds([lambda x=x, y=y: np.copyto(x, y) for x, y in pairs])  # type: ignore[misc]
    for x, _ in pairs:
        x.fill(0)
    add = _seconds([lambda x=x, y=y: np.add(x, y, out=x) for x, y in pairs])  # type: ignore[misc]
    return Bandwidth(cores=threads, copy=threads * _BYTES / copy, add=threads * _BYTES / add)


def _seconds(calls: list[Callable[[], object]]) -> float:
    """The best of the rounds, in each of which all calls run at once."""
    gate = threading.Barrier(len(calls))
    times: list[list[float]] = [[] for _ in calls]

    def work(call: Callable[[], object], found: list[float]) -> None:
        call()
        for _ in range(_ROUNDS):
            gate.wait()
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, times, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slowest: list[float] = [max(together) for together in zip(*times, strict=True)]
    return min(slowest)  # a limit is what the machine can do undisturbed


def limit(operation: str, size: int, ranks: int, bandwidth: list[Bandwidth], *, in_segment: bool = False) -> float:
    """Seconds that copying and adding take at least if all cores share the work and nothing else costs anything.

    An estimate, by what must be moved through shared memory: an array of one process is copied before another can read
    it. In the segment, what would have been published is there already.
    """
    found = find_operation(operation)
    cost = (found.shared_cost if in_segment else found.cost)(ranks)
    speed = max(bandwidth, key=lambda found: found.cores if found.cores <= ranks else 0)
    return cost.copied * size / speed.copy + cost.added * size / speed.add
