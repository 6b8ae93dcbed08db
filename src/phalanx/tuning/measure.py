"""Measures this machine by the core, within a time. The threads of one process stand for ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..operating_system import usable_cores
from .values import DEFAULTS, NEVER

__all__ = ["BUDGET", "COPIED_SIZES", "COPYING_RANKS", "LONG_SIZES", "REDUCED_SIZES", "Copies", "Measured", "measure"]

BUDGET = 0.18
"""Seconds for everything. What was not measured until then keeps its default."""
REDUCED_SIZES = tuple(4096 << i for i in range(6))
"""Bytes of the all_reduce that is done both ways."""
COPIED_SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
"""Bytes from each of two ranks that are gathered by address, and through shared memory. The longest fit no cache."""
LONG_SIZES = (1 << 20, 2 << 20, 8 << 20)
"""Bytes that each of two ranks copies within its own memory. The longest fit no cache of a core."""
COPYING_RANKS = 2
"""Ranks that do so at once."""
MOST_RANKS = 8
"""Threads of the larger team: more of them would take too long, and disturb the ranks that wait."""
_SLOT, _YIELDS = 1 << 20, 1000
_BY_ALL, _BY_PARTS = 1 << 30, 0
_BY_ADDRESS, _THROUGH = 1, NEVER


class Copies(NamedTuple):
    """Seconds of a long copy, in each way."""

    plain: float
    """As memcpy does."""
    ahead: float
    """Asking ahead for what comes next."""
    past: float
    """By stores that bypass the caches."""
    plain_of_another: float
    """As memcpy does, of what another thread has just written. The others are of the thread's own memory."""
    ahead_of_another: float


@dataclass(frozen=True)
class Measured:
    """Seconds; what is missing was not measured."""

    by_all: dict[tuple[int, int], float] = field(default_factory=dict)
    """(ranks, bytes) -> an all_reduce in which every rank reduces everything."""
    by_parts: dict[tuple[int, int], float] = field(default_factory=dict)
    """The same where each rank reduces a part."""
    by_address: dict[int, float] = field(default_factory=dict)
    """Bytes of each part -> a gather of two ranks, one of which reads the other's memory."""
    through: dict[int, float] = field(default_factory=dict)
    """The same through shared memory."""
    copies: dict[int, Copies] = field(default_factory=dict)
    """Bytes -> a copy by each of two ranks at once."""
    look: float | None = None
    """One look at another rank."""
    wake_up: float | None = None
    """From a call until who slept runs; the median."""
    seconds: float = 0.0
    """The whole measurement."""


def measure(core: Any, *, cores: int | None = None, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Measures as much as the time allows. With one core there is nothing to measure.

    Args:
        core: The native core, or what measures in its place.
        cores: By default those that this process may use.
    """
    begin = clock()
    found = usable_cores() if cores is None else cores
    if found < 2:
        return Measured()
    teams = sorted({2, min(found, MOST_RANKS)})
    by_all: dict[tuple[int, int], float] = {}
    by_parts: dict[tuple[int, int], float] = {}

    by_address: dict[int, float] = {}
    through: dict[int, float] = {}
    copies: dict[int, Copies] = {}

    def left() -> float:
        return BUDGET - (clock() - begin)

    look = core.time_look(5, 0.002)
    wake_up = core.time_wake_up(9, 0.02)
    for size in LONG_SIZES:
        if left() <= 0:
            break
        copies[size] = Copies(*core.time_copies(size, COPYING_RANKS, 3, 0.001))
    # Turn by turn, so that a noisy moment meets all ways; the best turn counts.
    for _ in range(2):
        for ranks in teams:
            for size in REDUCED_SIZES:
                for times, way in ((by_all, _BY_ALL), (by_parts, _BY_PARTS)):
                    if left() <= 0:
                        break
                    seconds = core.time_all_reduce(
                        size, ranks, _SLOT, way, DEFAULTS.spins, _YIELDS, 8, 9, min(0.004, left())
                    )
                    times[ranks, size] = min(seconds, times.get((ranks, size), seconds))
        for size in COPIED_SIZES:
            for gathers, copy_once_from in ((by_address, _BY_ADDRESS), (through, _THROUGH)):
                if left() <= 0:
                    break
                seconds = core.time_gather(
                    size, 2, _SLOT, copy_once_from, DEFAULTS.spins, _YIELDS, 2, 9, min(0.002, left())
                )
                gathers[size] = min(seconds, gathers.get(size, seconds))
    return Measured(by_all, by_parts, by_address, through, copies, look, wake_up, clock() - begin)
