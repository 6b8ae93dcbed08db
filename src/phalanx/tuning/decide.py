"""Turns what was measured into settings. Without I/O: every measurement can be tested.

A setting changes only for a clear gain: at least 10 % in the geometric mean of the cells that it changes, with no cell
of them more than 5 % slower. Else the default stays, so that a noisy minute costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .measure import COPIED_SIZES, COPYING_RANKS, LONG_SIZES, REDUCED_SIZES, Copies, Measured
from .values import BOUNDS, DEFAULTS, RARELY, Tuning

__all__ = ["Decision", "decide", "tuning_of"]

CLEAR = 1.10
"""The least gain that counts."""
WORSE = 0.95
"""The least ratio that no cell may be below."""
_EQUAL = 0.01
"""Logarithms of gains that differ by less are equal."""


class Decision(NamedTuple):
    """A setting, and why it is what it is."""

    setting: str
    default: int
    chosen: int
    reason: str


class _Cell(NamedTuple):
    """One operation: its seconds with the default, and with another value."""

    name: str
    default: float
    other: float


def decide(measured: Measured) -> list[Decision]:
    """All settings, in the order of `Tuning`."""
    return [
        _reduced_by_all(measured),
        _spins(measured),
        _copy_once_from(measured),
        # Each rank reads as much as it writes.
        _ahead_from(measured),
        _long_copies("past_from", measured, 1, lambda copies: (copies.plain, copies.past)),
    ]


def tuning_of(decisions: Iterable[Decision]) -> Tuning:
    """The settings that were decided."""
    return Tuning(**{decision.setting: decision.chosen for decision in decisions})


def _best(setting: str, default: int, candidates: dict[int, list[_Cell]]) -> Decision:
    """The candidate with the largest clear gain, else the default. Of equal ones, the nearest to the default."""
    chosen, best, reason = default, 0.0, "nothing was measured"
    for value, cells in sorted(candidates.items(), key=lambda item: abs(math.log(item[0] / default))):
        if not cells or not all(math.isfinite(cell.default) and math.isfinite(cell.other) for cell in cells):
            continue
        gains = [cell.default / cell.other for cell in cells]
        # Of two clear gains, the one that more cells have: so the sum of the logarithms, not their mean.
        total = sum(map(math.log, gains))
        mean = math.exp(total / len(gains))
        if mean >= CLEAR and min(gains) >= WORSE and total > best + _EQUAL:
            chosen, best = value, total
            reason = f"{mean:.2f} times the default's speed ({_shown(cells)})"
        elif chosen == default:
            reason = "no other value is clearly better"
    return Decision(setting, default, chosen, reason)


def _shown(cells: list[_Cell]) -> str:
    return ", ".join(f"{cell.name}: {cell.other * 1e6:.1f} µs in place of {cell.default * 1e6:.1f}" for cell in cells)


def _reduced_by_all(measured: Measured) -> Decision:
    default = DEFAULTS.reduced_by_all
    candidates: dict[int, list[_Cell]] = {}
    for value in (REDUCED_SIZES[0] // 2, *REDUCED_SIZES):
        if value == default:
            continue
        cells = []
        for (ranks, size), together in measured.by_all.items():
            apart = measured.by_parts.get((ranks, size))
            if apart is None or (size <= value) == (size <= default):
                continue
            now, other = (together, apart) if size <= default else (apart, together)
            cells.append(_Cell(_name(ranks, size), now, other))
        candidates[value] = cells
    return _best("reduced_by_all", default, candidates)


def _copy_once_from(measured: Measured) -> Decision:
    default = DEFAULTS.copy_once_from
    candidates: dict[int, list[_Cell]] = {}
    for value in (*COPIED_SIZES, RARELY):
        cells = []
        for size, once in measured.by_address.items():
            twice = measured.through.get(size)
            if twice is None or (size >= value) == (size >= default):
                continue
            now, other = (once, twice) if size >= default else (twice, once)
            cells.append(_Cell(f"gather of {size >> 9} KiB on 2 ranks", now, other))
        candidates[value] = cells
    return _best("copy_once_from", default, candidates)


def _ahead_from(measured: Measured) -> Decision:
    """Not where stores that bypass the caches are quicker still: there, to ask ahead has slowed down what several ranks
    read (a broadcast of 8 MiB by a third), and gained nothing.
    """
    longest = measured.copies.get(LONG_SIZES[-1])
    if longest is not None and longest.past < longest.ahead:
        default = DEFAULTS.ahead_from
        return Decision("ahead_from", default, default, "to bypass the caches is quicker")
    # What a collective copies was written by another rank just before.
    return _long_copies(
        "ahead_from", measured, 2 * COPYING_RANKS, lambda copies: (copies.plain_of_another, copies.ahead_of_another)
    )


def _long_copies(
    setting: str, measured: Measured, times: int, pair: Callable[[Copies], tuple[float, float]]
) -> Decision:
    """From which length on another way of copying is the better one. The setting counts bytes `times` over."""
    candidates = {
        times * value: [
            _Cell(f"copy of {size >> 20} MiB by each of {COPYING_RANKS} ranks", *pair(copies))
            for size, copies in measured.copies.items()
            if size >= value
        ]
        for value in LONG_SIZES
    }
    return _best(setting, getattr(DEFAULTS, setting), candidates)


def _spins(measured: Measured) -> Decision:
    """Looks for twice as long as a wake-up costs: a wait never loses more than that by not sleeping at once.

    Never shorter than the default: that could only make a wait slower.
    """
    default = DEFAULTS.spins
    if measured.look is None or measured.wake_up is None or not math.isfinite(measured.wake_up) or measured.look <= 0:
        return Decision("spins", default, default, "nothing was measured")
    wanted = min(round(2 * measured.wake_up / measured.look), BOUNDS["spins"][1])
    reason = f"a wake-up takes {measured.wake_up * 1e6:.1f} µs, {default} looks {default * measured.look * 1e6:.1f} µs"
    return Decision("spins", default, wanted if wanted > CLEAR * default else default, reason)


def _name(ranks: int, size: int) -> str:
    return f"all_reduce of {size >> 10} KiB on {ranks} ranks"
