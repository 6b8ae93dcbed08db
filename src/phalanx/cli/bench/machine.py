"""This machine: what it is, how fast its memory is, and the least time that an operation can take on it.

A limit is measured, not computed. Threads of this process do what the operation cannot do without: they read every
byte of its inputs once and write every byte of its outputs once, each an even part of them, at the same time. No thread
waits for another, nothing is copied that need not be, and every array lies where all can reach it. The time is what it
would be if faster threads took more than slower ones. The fastest of several ways and of all tries is the limit: no way
between processes does less.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from phalanx._native import core
from phalanx.cli.run.plan import cores
from phalanx.tuning import MOST_HELPERS
from phalanx.tuning.store import cpu_model

from .results import Bandwidth, Machine

__all__ = ["MOVERS", "MachineLimits", "Movement", "describe", "measure_bandwidth"]

MOVERS = (
    "memcpy by tiles",
    "memcpy",
    "non-temporal stores",
    "process_vm_readv",
    "memcpy by large tiles",
    "asking ahead",
)
"""The ways in which bytes are moved, by their numbers in cpp/phalanx/machine.hpp."""
WORKING_SETS = (128 << 10, 4 << 20, 64 << 20)
"""Bytes of a core's array for which the bandwidth is shown: of the inner caches, the outer one, and the memory."""
_ROUNDS = 15
_ROUNDS_OF_BANDWIDTH = 5
"""For a table that is no limit of anything: whoever calls `phalanx bench` waits for it."""
_BUDGET = 0.25
"""Seconds for one way of one try."""
_NEAR = 1.25
"""A way that was slower than the best by this factor is not tried again."""


class Movement(NamedTuple):
    """The bytes that an operation must read and write at least, all ranks together."""

    bytes: int
    """Of each array."""
    reads: int
    """Arrays that are read, and combined into one."""
    writes: int
    """Arrays that are written."""
    in_place: bool
    """Whether those that are written are among those that are read."""


TimeMovement = Callable[..., float]


def describe(bandwidth: list[Bandwidth]) -> Machine:
    """This machine, with its measured bandwidth."""
    return Machine(
        cores=cores(),
        model=cpu_model(),
        kernel=f"{platform.system()} {platform.release().split('-')[0]}",
        python=platform.python_version(),
        numpy=np.__version__,
        bandwidth=bandwidth,
    )


def measure_bandwidth(threads: int, time_movement: TimeMovement | None = None) -> list[Bandwidth]:
    """The bandwidth of so many cores at once, each with arrays of its own, by their size. Empty without the core."""
    limits = MachineLimits(time_movement, threads, rounds=_ROUNDS_OF_BANDWIDTH)
    found = []
    for size in WORKING_SETS:
        copy = limits.measure(Movement(threads * size, 1, 1, False), threads)
        add = limits.measure(Movement(threads * size, 2, 1, True), threads)
        if copy is not None and add is not None:
            found.append(Bandwidth(cores=threads, size=size, copy=threads * size / copy, add=threads * size / add))
    return found


class MachineLimits:
    """The least times that were seen for movements, over all tries.

    Args:
        time_movement: As the core's function of that name, which it is by default.
        available: Cores, by default those of this process.
        rounds: Of one way in one try.
    """

    def __init__(
        self, time_movement: TimeMovement | None = None, available: int | None = None, *, rounds: int = _ROUNDS
    ) -> None:
        self._rounds = rounds
        self._time = time_movement or getattr(core, "time_movement", None)
        self._cores = available or cores()
        self._best: dict[tuple[Movement, int], dict[int, float]] = {}

    def measure(self, movement: Movement, ranks: int) -> float | None:
        """Tries a movement once more. Returns the seconds of the best try so far; None without the core, or memory."""
        if self._time is None:
            return None
        # A rank may have threads that help it: the least time is that of the better team.
        teams = sorted({min(ranks, self._cores), min(ranks * (1 + MOST_HELPERS), self._cores)})
        found = [self._try(movement, threads) for threads in teams]
        return None if None in found else min(seconds for seconds in found if seconds is not None)

    def _try(self, movement: Movement, threads: int) -> float | None:
        assert self._time is not None
        seen = self._best.setdefault((movement, threads), {})
        fastest = min(seen.values(), default=math.inf)
        for mover in range(len(MOVERS)):
            if seen.get(mover, 0.0) > _NEAR * fastest:
                continue
            time_once = functools.partial(self._time, *movement, mover, threads)
            try:
                seconds = time_once(self._rounds, _BUDGET)
            except MemoryError:
                return None
            seen[mover] = min(seconds, seen.get(mover, math.inf))
        best = min(seen.values())
        return best if math.isfinite(best) else None
