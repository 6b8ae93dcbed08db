"""Compares the operations of all ranks: who came last, by how much, and who waited. No I/O.

Ranks of a group number their collectives alike, so an operation is known by its group and number. Each rank has noted
when it began it (its arrival) and when it was done. All else follows: the last to arrive is the one that the others
waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .reading import CallSitePlace, RankSlate

__all__ = ["JoinedOperations", "join"]

FROM_ROOT = frozenset({"broadcast", "broadcast_object", "scatter", "scatter_object"})
"""Operations in which all wait for the root alone."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class JoinedOperations:
    """Operations of one group that all its members have done: rows are operations, columns members, times ns."""

    group: int
    members: tuple[int, ...]
    """World ranks."""
    sequence: Times
    arrived: Times
    ended: Times
    bytes: Times
    sites: list[CallSitePlace]
    """Of the first member, one for each operation."""
    last: npt.NDArray[np.intp]
    """The member that the others waited for."""
    waited: Times
    """How long each waited for it."""
    late: Times
    """How much later than most each came, as far as somebody waited for that long."""
    share: float
    """The share of the operations that is here: the rest was overtaken before it was read."""

    @property
    def moved(self) -> Times:
        """The time from the last arrival to the end, for each member."""
        met = np.take_along_axis(self.arrived, self.last[:, None], axis=1)
        return np.maximum(self.ended - np.maximum(self.arrived, met), 0)


def join(slates: Mapping[int, RankSlate], done: Mapping[int, int]) -> list[JoinedOperations]:
    """The operations that have ended everywhere.

    Args:
        slates: By rank.
        done: For each group, the number of the last operation that was joined before.
    """
    groups: dict[int, tuple[int, ...]] = {}
    numbers: dict[int, dict[int, int]] = {}
    for rank, slate in slates.items():
        for group in slate.groups.values():
            if len(group.members) > 1:
                groups[group.id] = group.members
                numbers.setdefault(group.id, {})[rank] = group.number
    found = []
    for group_id, members in groups.items():
        here = tuple(rank for rank in members if rank in numbers[group_id])
        if len(here) > 1:
            joined = _join_group(
                group_id, members, here, [slates[rank] for rank in here], numbers[group_id], done.get(group_id, 0)
            )
            if joined is not None:
                found.append(joined)
    return found


def _join_group(
    group_id: int,
    members: tuple[int, ...],
    here: tuple[int, ...],
    slates: list[RankSlate],
    numbers: Mapping[int, int],
    done: int,
) -> JoinedOperations | None:
    tables = []
    for rank, slate in zip(here, slates, strict=True):
        records = slate.records
        mine = records[(records["group"] == numbers[rank]) & (records["sequence"] > done) & (records["ended_ns"] > 0)]
        # One that was interrupted and ran again is there twice: the last counts.
        _, first = np.unique(mine["sequence"][::-1], return_index=True)
        tables.append(mine[::-1][first])
    common = tables[0]["sequence"]
    for table in tables[1:]:
        common = np.intersect1d(common, table["sequence"], assume_unique=True)
    if not len(common):
        return None
    rows = [table[np.searchsorted(table["sequence"], common)] for table in tables]
    alike = np.all([row["fingerprint"] == rows[0]["fingerprint"] for row in rows], axis=0)
    if not alike.any():
        return None
    rows = [row[alike] for row in rows]
    arrived = np.stack([row["began_ns"] for row in rows], axis=1)
    ended = np.stack([row["ended_ns"] for row in rows], axis=1)
    places = [slates[0].site(int(number)) for number in rows[0]["site"]]
    last = _last(arrived, rows[0]["peer"], places, members, here)
    met = np.take_along_axis(arrived, last[:, None], axis=1)
    waited = np.maximum(np.minimum(ended, met) - arrived, 0)
    most = np.sort(arrived, axis=1)[:, (len(here) - 1) // 2 : (len(here) - 1) // 2 + 1]
    late = np.minimum(np.maximum(arrived - most, 0), waited.max(axis=1, keepdims=True))
    from_root = np.array([place.verb in FROM_ROOT for place in places])
    late[from_root[:, None] & (np.arange(len(here)) != last[:, None])] = 0
    sequence = rows[0]["sequence"].astype(np.int64)
    share = len(sequence) / max(len(sequence), int(sequence[-1]) - done)
    return JoinedOperations(
        group_id, here, sequence, arrived, ended, rows[0]["bytes"].astype(np.int64), places, last, waited, late, share
    )


def _last(
    arrived: Times, roots: Any, places: list[CallSitePlace], members: tuple[int, ...], here: tuple[int, ...]
) -> npt.NDArray[np.intp]:
    last: npt.NDArray[np.intp] = arrived.argmax(axis=1)
    for row, place in enumerate(places):
        root = int(roots[row])
        if place.verb in FROM_ROOT and 0 <= root < len(members) and members[root] in here:
            last[row] = here.index(members[root])
    return last
