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

from .reading import CallSitePlace, RankSlate, SlateGroup

__all__ = ["JoinedOperations", "join"]

FROM_ROOT = frozenset({"broadcast", "broadcast_object", "scatter", "scatter_object"})
"""Operations in which all wait for the root alone."""
TO_ROOT = frozenset({"reduce", "gather", "gather_object"})
"""Operations in which the root alone waits."""
CARRIED = 64
"""Operations before the new ones that are looked at again: what a rank lost before them may show only later."""

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
    """How much later than most each came, as far as somebody waited for that long, and its own program was why."""
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
    numbers: dict[int, dict[int, SlateGroup]] = {}
    for rank, slate in slates.items():
        for group in slate.groups.values():
            if len(group.members) > 1:
                groups[group.id] = group.members
                numbers.setdefault(group.id, {})[rank] = group
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
    numbers: Mapping[int, SlateGroup],
    done: int,
) -> JoinedOperations | None:
    tables = []
    for rank, slate in zip(here, slates, strict=True):
        records = slate.records
        first_wanted = max(1, done - CARRIED)
        place = numbers[rank]
        mine = records[(records["group"] == place.number) & (records["number"] > place.since)]
        mine = mine[(mine["sequence"] >= first_wanted) & (mine["ended_ns"] > 0)]
        # One that was interrupted and ran again is there twice: the last counts.
        _, first = np.unique(mine["sequence"][::-1], return_index=True)
        tables.append(mine[::-1][first])
    common = tables[0]["sequence"]
    for table in tables[1:]:
        common = np.intersect1d(common, table["sequence"], assume_unique=True)
    if not len(common) or common[-1] <= done:
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
    sequence = rows[0]["sequence"].astype(np.int64)
    new = sequence > done
    if not new.any():
        return None
    late = np.minimum(np.maximum(arrived - most, 0), waited.max(axis=1, keepdims=True))
    from_root = np.array([place.verb in FROM_ROOT for place in places])
    late[from_root[:, None] & (np.arange(len(here)) != last[:, None])] = 0
    own = _own_delay(slates, arrived, ended, sequence)
    apart = from_root | np.array([place.verb in TO_ROOT for place in places])
    _carry_over(own, late, waited, apart)
    late = np.minimum(late, own)
    share = new.sum() / max(new.sum(), int(sequence[-1]) - done)
    return JoinedOperations(
        group_id,
        here,
        sequence[new],
        arrived[new],
        ended[new],
        rows[0]["bytes"].astype(np.int64)[new],
        [place for place, keep in zip(places, new, strict=True) if keep],
        last[new],
        waited[new],
        late[new],
        float(share),
    )


def _own_delay(slates: list[RankSlate], arrived: Times, ended: Times, sequence: Any) -> Times:
    """How much more time than most each rank spent in its own program since its last operation, on its own clock.

    A rank that was held up in an operation, by a slow link or by another rank, is late to the next one through no fault
    of its own. Neither is it to blame for the time in which it had no processor, because others use them. And the clock
    of another host may be wrong; a span of time on it is not.
    """
    own = np.zeros_like(arrived)
    for column, slate in enumerate(slates):
        times, spent = _time_in_operations(slate)
        until = spent[np.searchsorted(times, arrived[1:, column], "right")]
        since = spent[np.searchsorted(times, ended[:-1, column], "right")]
        begins, starved = _time_without_processor(slate)
        until += starved[np.searchsorted(begins, arrived[1:, column], "right")]
        since += starved[np.searchsorted(begins, ended[:-1, column], "right")]
        own[1:, column] = np.maximum(arrived[1:, column] - ended[:-1, column] - (until - since), 0)
    follows = np.concatenate([[False], np.diff(sequence) == 1])
    usual = np.sort(own, axis=1)[:, (own.shape[1] - 1) // 2 :][:, :1]
    return np.where(follows[:, None], np.maximum(own - usual, 0), 0)


def _carry_over(own: Times, late: Times, waited: Times, apart: npt.NDArray[np.bool_]) -> None:
    """Adds to the delay of each rank what it has lost before an operation in which not all meet.

    A rank that comes late to a broadcast keeps nobody waiting. That shows in the next operation.
    """
    for row in np.flatnonzero(apart[:-1]):
        own[row + 1] += np.maximum(own[row] - waited[row] - np.minimum(late[row], own[row]), 0)


def _time_in_operations(slate: RankSlate) -> tuple[Times, Times]:
    """The ends of a rank's operations, and the time that it had spent in operations by then (from 0)."""
    records = slate.records
    done = records[records["ended_ns"] > 0]
    done = done[np.argsort(done["began_ns"], kind="stable")]
    ends = np.maximum.accumulate(done["ended_ns"]) if len(done) else done["ended_ns"]
    begins = np.maximum(done["began_ns"], np.concatenate([[0], ends[:-1]])) if len(done) else done["began_ns"]
    return ends, np.concatenate([[0], np.cumsum(np.maximum(ends - begins, 0))]).astype(np.int64)


def _time_without_processor(slate: RankSlate) -> tuple[Times, Times]:
    """The begins of a rank's operations, and the time by then in which it had no processor between them (from 0)."""
    records = slate.records[np.argsort(slate.records["began_ns"], kind="stable")]
    starved = np.cumsum(records["starved_us"].astype(np.int64) * 1000)
    return records["began_ns"], np.concatenate([[0], starved]).astype(np.int64)


def _last(
    arrived: Times, roots: Any, places: list[CallSitePlace], members: tuple[int, ...], here: tuple[int, ...]
) -> npt.NDArray[np.intp]:
    last: npt.NDArray[np.intp] = arrived.argmax(axis=1)
    for row, place in enumerate(places):
        root = int(roots[row])
        if place.verb in FROM_ROOT and 0 <= root < len(members) and members[root] in here:
            last[row] = here.index(members[root])
    return last
