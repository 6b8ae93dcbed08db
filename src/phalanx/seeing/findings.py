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
SURE = 4.5
"""A straggler's lateness beyond that of the others, in so many times its standard error. Chance does not get there, and
one long wait does not either: its error is as large as itself."""
LEAST = 300e-6
"""Seconds by which it was late on average; less is the scheduler's doing."""
PARTS = 8
"""Parts that the time must have before anything is called chronic."""
ONCE = 1.0
"""Seconds from which being late once is worth a word."""

BUSY, COMPARED, SLOW = 0.3, 0.33, 125e6
"""A slow link has data on its way for so much of the time, and moves so little of what the others do. With no other
link to compare, it moves less than so many bytes per second, for most of the time."""
MOVING = 0.3
"""The share of the time that ranks must spend moving data before a link is blamed."""
ENOUGH = 1 << 20
"""Bytes that a link must have carried before its speed is known."""

Seconds = npt.NDArray[np.float64]


def stragglers_found(
    parts: Sequence[Seconds], counts: Seconds, observed: float, where: Mapping[int, str]
) -> list[JobFinding]:
    """The ranks that the others wait for.

    Args:
        parts: The seconds by which each rank was late, for each part of the time.
        counts: The operations in which each rank was the last.
        observed: Seconds that the parts are about.
        where: For each rank, the call site at which it was late for the longest.
    """
    if not parts or observed <= 0:
        return []
    table = np.stack(parts)
    late = table.sum(axis=0)
    found: list[JobFinding] = []
    for rank in map(int, np.argsort(-late)):  # the worst first: the next are not compared with it
        seconds = float(late[rank])
        named = [finding.ranks[0] for finding in found]
        if len(named) + 1 >= len(late):
            break
        beyond = table[:, rank] - np.delete(table, [rank, *named], axis=1).mean(axis=1)
        excess, spread = float(beyond.sum()), float(beyond.std()) * len(beyond) ** 0.5
        if excess < WORTH * observed:
            continue
        largest, mean = float(table[:, rank].max()), seconds / max(1.0, float(counts[rank]))
        if len(table) >= PARTS and excess >= SURE * spread and mean >= LEAST:
            text = (
                f"rank {rank} made the others wait {_seconds(seconds)} of {_seconds(observed)}, mostly in {where[rank]}"
            )
            found.append(JobFinding("straggler", text, [rank], seconds, where[rank]))
        elif largest >= ONCE and largest > 0.5 * seconds:
            text = f"rank {rank} was late once, by {_seconds(largest)}, in {where[rank]}"
            found.append(JobFinding("once", text, [rank], largest, where[rank]))
    return found


def links_found(
    links: Sequence[LinkPicture], carried: Mapping[tuple[int, int], float], moving: float
) -> list[JobFinding]:
    """The links that are slow.

    Args:
        carried: The bytes that each has carried.
        moving: The share of the time that ranks spend moving data.
    """
    known = [link for link in links if carried.get((link.source, link.target), 0) >= ENOUGH and link.rate > 0]
    if moving < MOVING:
        return []
    found: dict[frozenset[int], JobFinding] = {}
    for link in sorted(known, key=lambda link: link.rate):
        if link.busy < BUSY:
            continue
        ends = {link.source, link.target}
        others = [
            other.rate for other in known if not ends & {other.source, other.target} or other.rate > 3 * link.rate
        ]
        compared = bool(others) and link.rate <= COMPARED * float(np.median(others))
        if not compared and (others or link.rate >= SLOW or link.busy < 0.5):
            continue
        beside = f", others {_rate(float(np.median(others)))}" if others else ""
        text = (
            f"the link from rank {link.source} to rank {link.target} is slow: {_rate(link.rate)}{beside}, with data on "
            f"its way {link.busy:.0%} of the time; no rank is late"
        )
        found.setdefault(frozenset(ends), JobFinding("link", text, [link.source, link.target], 0.0))
    return list(found.values())


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _rate(rate: float) -> str:
    value: Any = rate
    for unit in ("B/s", "kB/s", "MB/s"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB/s"
