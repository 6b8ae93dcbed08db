"""Tells a straggler from noise, chronic from once, and a slow link from a slow rank. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .picture import JobFinding, LinkPicture

__all__ = ["links_found", "stragglers_found"]

WORTH = 0.02
"""The share of the time that the others must have lost."""
SURE, SURER = 4.0, 6.0
"""How much later than each of the others a straggler is, in so many times the standard error. Chance does not get
there, and one long wait does not either: its error is as large as itself. More is wanted for one of two ranks, where
the later one is always the last, and for several stragglers at a time."""
OFTEN = 8
"""Parts of the time in which it was late."""
MOST = 16
"""Stragglers that are named at a time."""
RARE = 4.0
"""Times the usual delay from which one counts as rare, and no more than that."""
ONCE = 1.0
"""Seconds from which being late once is worth a word."""

BUSY, COMPARED, SLOW = 0.3, 0.33, 125e6
"""A slow link has data on its way for so much of the time, and moves so little of what the others do. Or it
moves less than so many bytes per second, for most of the time."""
MOVING = 0.3
"""The share of the time that ranks must spend moving data before a link is blamed."""
ENOUGH = 1 << 20
"""Bytes that a link must have carried before its speed is known."""

FILLED = 0.25
"""How full its packets must be: the rate of short messages says nothing about a link."""

Seconds = npt.NDArray[np.float64]


def stragglers_found(
    table: Seconds, observed: float, where: Mapping[int, str], active: float | None = None
) -> list[JobFinding]:
    """The ranks that the others wait for.

    Args:
        table: The seconds by which each rank (columns) was late, in each part of the time (rows).
        observed: Seconds that the table is about.
        where: For each rank, the call site at which it was late for the longest.
        active: Those of them in which there were operations at all; if not given, all.
    """
    if not len(table) or observed <= 0:
        return []
    worth = WORTH * (observed if active is None else min(observed, active))
    late = table.sum(axis=0)
    # Rare long delays, as the scheduler's, would hide in their spread what happens every time.
    steady = _without_rare(table)
    chronic = _chronic(steady, worth)
    found: list[JobFinding] = []
    for rank in map(int, np.argsort(-late)):
        seconds, largest = float(late[rank]), float(table[:, rank].max())
        if rank in chronic:
            text = (
                f"rank {rank} made the others wait {_seconds(seconds)} of {_seconds(observed)}, mostly in {where[rank]}"
            )
            found.append(JobFinding("straggler", text, [rank], seconds, where[rank]))
        elif largest >= max(ONCE, worth) and largest > 0.5 * seconds:
            text = f"rank {rank} was late once, by {_seconds(largest)}, in {where[rank]}"
            found.append(JobFinding("once", text, [rank], largest, where[rank]))
    return found


def _chronic(steady: Seconds, worth: float) -> list[int]:
    """The ranks that are late all the time: later than each of the others, in the same operations, beyond chance."""
    sums = steady.sum(axis=0)
    worst = [int(rank) for rank in np.argsort(-sums)[:MOST]]
    for count in range(min(MOST, max(1, len(sums) // 2)), 0, -1):
        these = worst[:count]
        others = np.delete(np.arange(len(sums)), these)
        sure = SURE if count == 1 and len(others) > 1 else SURER
        if len(others) and all(_stands_out(steady, rank, others, sure, worth) for rank in these):
            return these
    return []


def _stands_out(steady: Seconds, rank: int, others: npt.NDArray[np.intp], sure: float, worth: float) -> bool:
    mine = steady[:, rank]
    if mine.sum() - np.median(steady[:, others].sum(axis=0)) < worth or int((mine > 0).sum()) < OFTEN:
        return False
    later = mine[:, None] - steady[:, others]
    return bool((later.sum(axis=0) >= sure * later.std(axis=0) * len(later) ** 0.5).all())


def _without_rare(table: Seconds) -> Seconds:
    """The seconds by which each rank was late, none of them far beyond its usual ones.

    What is usual for a rank that was seldom late, as in the first steps of a program, the others tell.
    """
    usual = float(np.median(table[table > 0])) if (table > 0).any() else 0.0
    often = (table > 0).sum(axis=0) >= OFTEN
    own = [float(np.median(column[column > 0])) if many else usual for column, many in zip(table.T, often, strict=True)]
    return np.minimum(table, RARE * np.array(own))


def links_found(links: Sequence[LinkPicture], seconds: float, moving: float) -> list[JobFinding]:
    """The links that are slow.

    Args:
        seconds: The time that they are about.
        moving: The share of the time that ranks spend moving data.
    """
    known = [
        link for link in links if link.bytes_per_second * seconds >= ENOUGH and link.rate > 0 and link.filled >= FILLED
    ]
    if moving < MOVING:
        return []
    slow = [link for link in known if _is_slow(link, [other.rate for other in known if other is not link])]
    if not slow:
        return []
    worst = min(slow, key=lambda link: link.rate)
    pairs = sorted({_pair(link) for link in slow})
    # Pairs are named without a direction: the way back of one is no other link.
    fast = [link.rate for link in known if (link not in slow if len(pairs) == 1 else _pair(link) not in pairs)]
    if len(pairs) == 1:
        which = f"the link from rank {worst.source} to rank {worst.target} is slow: {_rate(worst.rate)}"
    else:
        which = f"the links between ranks {', '.join(f'{a}-{b}' for a, b in pairs[:8])} are slow: {_rate(worst.rate)}"
    beside = f", others {_rate(float(np.median(fast)))}" if fast else ""
    text = f"{which}{beside}, with data on its way {worst.busy:.0%} of the time; no rank is always late"
    return [JobFinding("link", text, sorted({rank for pair in pairs for rank in pair}), 0.0)]


def _pair(link: LinkPicture) -> tuple[int, int]:
    return min(link.source, link.target), max(link.source, link.target)


def _is_slow(link: LinkPicture, others: list[float]) -> bool:
    if link.busy < BUSY:
        return False
    far_below = bool(others) and link.rate <= COMPARED * float(np.median(others))
    return far_below or (link.rate < SLOW and link.busy >= 0.5)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _rate(rate: float) -> str:
    value: Any = rate
    for unit in ("B/s", "kB/s", "MB/s"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB/s"
