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
SURE = 5.0
"""A straggler's lateness beyond that of the others, in so many times its standard error. Chance does not get there, and
one long wait does not either: its error is as large as itself."""
RARE = 4.0
"""Times the usual delay from which one counts as rare, and no more than that."""
LEAST = 300e-6
"""Seconds by which it was late on average; less is the scheduler's doing."""
PARTS = 12
"""Parts that the time must have before anything is called chronic."""
ONCE = 1.0
"""Seconds from which being late once is worth a word."""

BUSY, COMPARED, SLOW = 0.3, 0.33, 125e6
"""A slow link has data on its way for so much of the time, and moves so little of what the others do. Or it
moves less than so many bytes per second, for most of the time."""
MOVING = 0.3
"""The share of the time that ranks must spend moving data before a link is blamed."""
ENOUGH = 1 << 20
"""Bytes that a link must have carried before its speed is known."""

Seconds = npt.NDArray[np.float64]


def stragglers_found(
    parts: Sequence[Seconds], counts: Seconds, observed: float, where: Mapping[int, str], active: float | None = None
) -> list[JobFinding]:
    """The ranks that the others wait for.

    Args:
        parts: The seconds by which each rank was late, for each part of the time.
        counts: The operations in which each rank was the last.
        observed: Seconds that the parts are about.
        where: For each rank, the call site at which it was late for the longest.
        active: Those of them in which there were operations at all; if not given, all.
    """
    if not parts or observed <= 0:
        return []
    worth = WORTH * (observed if active is None else min(observed, active))
    table = np.stack(parts)
    late = table.sum(axis=0)
    # Rare long delays, as the scheduler's, would hide in their spread what happens every time.
    steady = np.column_stack([_without_rare(column) for column in table.T])
    found: list[JobFinding] = []
    for rank in map(int, np.argsort(-late)):  # the worst first: the next are not compared with it
        seconds = float(late[rank])
        named = [finding.ranks[0] for finding in found if finding.kind == "straggler"]
        if len(named) + 1 >= len(late):
            break
        beyond = steady[:, rank] - np.delete(steady, [rank, *named], axis=1).mean(axis=1)
        excess = float(beyond.sum())
        sure = excess >= SURE * float(beyond.std()) * len(beyond) ** 0.5 and excess >= worth
        largest, mean = float(table[:, rank].max()), seconds / max(1.0, float(counts[rank]))
        if len(table) >= PARTS and sure and mean >= LEAST:
            text = (
                f"rank {rank} made the others wait {_seconds(seconds)} of {_seconds(observed)}, mostly in {where[rank]}"
            )
            found.append(JobFinding("straggler", text, [rank], seconds, where[rank]))
        elif largest >= max(ONCE, worth) and largest > 0.5 * seconds:
            text = f"rank {rank} was late once, by {_seconds(largest)}, in {where[rank]}"
            found.append(JobFinding("once", text, [rank], largest, where[rank]))
    return found


def _without_rare(late: Seconds) -> Seconds:
    """The seconds by which a rank was late, none of them far beyond its usual ones."""
    some = late[late > 0]
    return np.minimum(late, RARE * float(np.median(some))) if len(some) else late


def links_found(links: Sequence[LinkPicture], seconds: float, moving: float) -> list[JobFinding]:
    """The links that are slow.

    Args:
        seconds: The time that they are about.
        moving: The share of the time that ranks spend moving data.
    """
    known = [link for link in links if link.bytes_per_second * seconds >= ENOUGH and link.rate > 0]
    if moving < MOVING:
        return []
    slow = [link for link in known if _is_slow(link, [other.rate for other in known if other is not link])]
    if not slow:
        return []
    worst = min(slow, key=lambda link: link.rate)
    pairs = sorted({tuple(sorted((link.source, link.target))) for link in slow})
    fast = [link.rate for link in known if link not in slow]
    if len(pairs) == 1:
        which = f"the link from rank {worst.source} to rank {worst.target} is slow: {_rate(worst.rate)}"
    else:
        which = f"the links between ranks {', '.join(f'{a}-{b}' for a, b in pairs[:8])} are slow: {_rate(worst.rate)}"
    beside = f", others {_rate(float(np.median(fast)))}" if fast else ""
    text = f"{which}{beside}, with data on its way {worst.busy:.0%} of the time; no rank is late"
    return [JobFinding("link", text, sorted({rank for pair in pairs for rank in pair}), 0.0)]


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
