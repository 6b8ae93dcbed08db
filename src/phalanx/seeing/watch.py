"""Watches a job: reads its slates again and again, and adds up what they tell."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocking import RankState, blocked_text, root_causes, states_of
from .findings import links_found, stragglers_found
from .joining import JoinedOperations, join
from .lateness import LatenessTable
from .picture import CallPicture, JobFinding, LinkPicture, Picture, RankPicture, SitePicture
from .reading import CallSitePlace, RankSlate
from .slates import SlateSource

__all__ = ["JobWatch"]

WINDOW = 5.0
"""Seconds that the rates are about."""
BLOCKED_AFTER = 0.5
"""Seconds after which a wait is worth a word."""
SETTLE = 1
"""Operations of a group that say nothing about who is slow: the first one waits for programs that start, and sets
memory up."""
PAUSE = 1.0
"""Seconds without an operation that count as a part of the work; a longer pause is something else."""

Seconds = npt.NDArray[np.float64]
_Links = dict[tuple[int, int], tuple[int, int, int, int]]
"""Between two ranks: bytes sent, and microseconds with data on its way, in all and while the other side did not
read."""


@dataclass
class _SiteSums:
    """One call site, as far as its operations were joined."""

    waiting: Seconds
    late: Seconds
    last: Seconds
    """How often each rank came last."""
    operations: float = 0.0

    @classmethod
    def of(cls, size: int) -> _SiteSums:
        return cls(np.zeros(size), np.zeros(size), np.zeros(size))


@dataclass
class _Look:
    """The sums of one look, for the rates of the last seconds."""

    at: float
    waiting: Seconds
    moving: Seconds
    bytes: Seconds
    operations: Seconds
    links: _Links

    @classmethod
    def of(cls, now_ns: int, size: int, slates: Mapping[int, RankSlate]) -> _Look:
        return cls(now_ns / 1e9, np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size), _links_of(slates))


class JobWatch:
    """Watches one job.

    Args:
        source: Reads its slates.
        clock_ns: The clock of the slates.
    """

    def __init__(self, source: SlateSource, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._source = source
        self._clock_ns = clock_ns
        self.slates: dict[int, RankSlate] = {}
        """The slates, as they were read last. Those of ranks that have gone stay."""
        self.joined: list[JoinedOperations] = []
        """The operations that the last look has found ended."""
        self._done: dict[int, int] = {}
        self._size = 0
        self._since_ns = 0
        self._last_end = 0.0
        self._joined_any = False
        self._looks: deque[_Look] = deque()
        self._sites: dict[CallSitePlace, _SiteSums] = {}
        self._active = 0.0
        """Seconds in which there were operations, but for longer pauses between them."""
        self._moving = 0.0
        """Seconds that a rank has spent moving data, on average."""

    def look(self) -> Picture | None:
        """Reads the slates; None as long as there are none."""
        found = self._source()
        now_ns = self._clock_ns()
        self.slates.update(found)
        for rank, slate in self.slates.items():
            slate.gone = rank not in found
        if not self.slates:
            return None
        if max(self.slates) >= self._size:
            self._begin(now_ns)
        self.joined = join(self.slates, self._done)
        look = _Look.of(now_ns, self._size, self.slates)
        for operations in self.joined:
            self._add(operations, look)
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].at < look.at - WINDOW:
            self._looks.popleft()
        return self._picture(now_ns)

    def _begin(self, now_ns: int) -> None:
        """Begins to add up; anew for an elastic world that has a rank with a higher number."""
        self._size = max(self.slates) + 1
        self._looks.clear()
        self._sites.clear()
        self._waits = np.zeros((self._size, self._size))
        self._late = LatenessTable(self._size)
        self._since_ns = now_ns
        # Before the first look there was the start of the job.
        started = min(slate.began_ns for slate in self.slates.values())
        self._looks.append(_Look.of(min(now_ns, started), self._size, {}))

    # -- adding up ---------------------------------------------------------------------------------------------------

    def _add(self, joined: JoinedOperations, look: _Look) -> None:
        members = np.array(joined.members)
        scale = 1.0 / joined.share
        self._done[joined.group] = int(joined.sequence[-1])
        if not self._joined_any:  # what comes before the first operation is no time in which anybody could wait
            self._since_ns = int(joined.arrived.min() if joined.sequence[0] > SETTLE else joined.ended[0].max())
            self._joined_any = True
        ends = joined.ended.max(axis=1) / 1e9
        if len(joined.members) == self._size:
            self._active += float(np.minimum(np.diff(ends, prepend=self._last_end or ends[0]), PAUSE).clip(0).sum())
            self._last_end = float(ends[-1])
        lately = joined.ended.max(axis=1) >= (look.at - WINDOW) * 1e9
        look.bytes[members] += float(joined.bytes[lately].sum()) * scale
        look.operations[members] += lately.sum() * scale
        kept = joined.sequence > SETTLE
        if not kept.any():
            return
        waited, late, last = joined.waited[kept] / 1e9, joined.late[kept] / 1e9, joined.last[kept]
        look.waiting[members] += joined.waited[kept & lately].sum(axis=0) / 1e9 * scale
        look.moving[members] += joined.moved[kept & lately].sum(axis=0) / 1e9 * scale
        self._moving += float(joined.moved[kept].sum()) / 1e9 * scale / self._size
        for column, rank in enumerate(members):
            mine = last == column
            self._waits[members, rank] += waited[mine].sum(axis=0) * scale
        rows = np.zeros((len(late), self._size))
        rows[:, members] = late
        self._late.add(rows, scale)
        self._add_sites(joined, kept, waited, late, last, members, scale)

    def _add_sites(
        self, joined: JoinedOperations, kept: Any, waited: Any, late: Any, last: Any, members: Any, scale: float
    ) -> None:
        rows = [place for place, keep in zip(joined.sites, kept, strict=True) if keep]
        places = {place: number for number, place in enumerate(dict.fromkeys(rows))}
        which = np.array([places[place] for place in rows])
        for place, number in places.items():
            mine = which == number
            sums = self._sites.get(place)
            if sums is None:
                sums = self._sites[place] = _SiteSums.of(self._size)
            sums.waiting[members] += waited[mine].sum(axis=0) * scale
            sums.late[members] += late[mine].sum(axis=0) * scale
            sums.last[members] += np.bincount(last[mine], minlength=len(members)) * scale
            sums.operations += float(mine.sum()) * scale

    # -- the picture -------------------------------------------------------------------------------------------------

    def _picture(self, now_ns: int) -> Picture:
        states = states_of(self.slates, now_ns)
        first = next(iter(self.slates.values()))
        span = self._span
        recent = list(self._looks)[1:]
        sums = [sum((getattr(look, name) for look in recent), np.zeros(self._size)) for name in _RATES]
        running = any(slate.alive and slate.state == 0 and not slate.gone for slate in self.slates.values())
        end_ns = now_ns if running else max(slate.beat_ns for slate in self.slates.values())
        observed = max(1e-3, self._active, (end_ns - self._since_ns) / 1e9)
        link_span = max(1e-3, self._looks[-1].at - self._looks[0].at)
        links = self._links(self._looks[0].links, link_span)
        return Picture(
            job=first.text("job"),
            program=first.text("program"),
            world_size=max(slate.world_size for slate in self.slates.values()),
            elapsed=max(0.0, (end_ns - min(slate.began_ns for slate in self.slates.values())) / 1e9),
            observed=observed,
            running=running,
            ranks=[_rank_picture(self.slates[rank], states[rank], span, sums) for rank in sorted(states)],
            sites=self._site_pictures(),
            waits=self._waits.round(6).tolist(),
            links=links,
            calls=_calls_of(self.slates),
            findings=self._findings(states, links, link_span, observed),
            clock_error=max(slate.error_ns for slate in self.slates.values()) / 1e9,
        )

    def _site_pictures(self) -> list[SitePicture]:
        # A place may be there twice: noted by the core, and by Python.
        totals: dict[CallSitePlace, dict[int, list[float]]] = {}
        for rank, slate in self.slates.items():
            for place, row in list(zip(slate.sites, slate.site_table, strict=False))[1:]:
                if row["count"]:
                    sums_here = totals.setdefault(place, {}).setdefault(rank, [0.0, 0.0, 0.0])
                    for at, name in enumerate(("count", "bytes", "total_ns")):
                        sums_here[at] += float(row[name])
        found = []
        for place, by_rank in totals.items():
            rows = list(by_rank.values())
            sums = self._sites.get(place)
            last = int(sums.late.argmax()) if sums is not None and sums.late.any() else -1
            ranks = max(1, len(rows))
            found.append(
                SitePicture(
                    place.verb,
                    place.where,
                    place.file,
                    place.line,
                    int(max(row[0] for row in rows)),
                    int(max(row[1] for row in rows)),
                    sum(row[2] for row in rows) / 1e9 / ranks,
                    float(sums.waiting.mean()) if sums is not None else 0.0,
                    last,
                    float(sums.late[last]) if sums is not None and last >= 0 else 0.0,
                    float(sums.last[last] / max(1.0, sums.operations)) if sums is not None and last >= 0 else 0.0,
                    sums.late.round(6).tolist() if sums is not None else [],
                )
            )
        return sorted(found, key=lambda site: -site.seconds)

    @property
    def _span(self) -> float:
        """Seconds that the rates are about."""
        return min(WINDOW, max(1e-3, self._looks[-1].at - self._looks[0].at))

    def _links(self, before: _Links, span: float) -> list[LinkPicture]:
        """The links since they had these numbers, so many seconds ago."""
        found = []
        for (source, target), (sent, busy, held, segments) in sorted(self._looks[-1].links.items()):
            sent_before, busy_before, held_before, segments_before = before.get((source, target), (0, 0, 0, 0))
            carried = max(0, sent - sent_before)
            active = max(0, busy - busy_before - (held - held_before)) / 1e6
            row = next(row for row in self.slates[source].peers if row["rank"] == target)
            room = max(0, segments - segments_before) * int(row["longest_segment"])
            found.append(
                LinkPicture(
                    source,
                    target,
                    carried / span,
                    min(1.0, active / span),
                    carried / active if active > 0 else 0.0,
                    int(row["round_trip_us"]) / 1e6,
                    int(row["lost"]),
                    min(1.0, carried / room) if room else 1.0,
                )
            )
        return found

    def _findings(
        self, states: Mapping[int, RankState], links: list[LinkPicture], span: float, observed: float
    ) -> list[JobFinding]:
        found = _blocked(states)
        where = {rank: self._where_late(rank) for rank in range(self._size)}
        found += stragglers_found(self._late.parts, observed, where, self._active or None)
        if any(finding.kind == "straggler" for finding in found):
            return found
        lately = sum(float(look.moving.mean()) for look in list(self._looks)[1:]) / self._span
        slow = links_found(links, span, lately)
        return found + (slow or links_found(self._links({}, observed), observed, self._moving / observed))

    def _where_late(self, rank: int) -> str:
        late = [(float(sums.late[rank]), str(place)) for place, sums in self._sites.items()]
        return max(late, default=(0.0, "an unknown place"))[1]


_RATES = ("waiting", "moving", "bytes", "operations")


def _rank_picture(slate: RankSlate, state: RankState, span: float, sums: list[Any]) -> RankPicture:
    waiting, moving, moved, operations = (float(each[slate.rank]) for each in sums)
    if state.site is not None and state.waits_for and slate.alive:
        waiting += min(span, state.seconds)
    return RankPicture(
        rank=slate.rank,
        pid=slate.pid,
        host=slate.text("host"),
        state=state.state,
        operation=state.name,
        line=state.line,
        seconds=round(state.seconds, 3),
        waits_for=state.waits_for,
        waiting=min(1.0, waiting / span),
        moving=max(0.0, min(moving / span, 1.0 - waiting / span)),
        bytes_per_second=moved / span,
        operations_per_second=operations / span,
        memory=slate.memory,
    )


def _blocked(states: Mapping[int, RankState]) -> list[JobFinding]:
    """Finds who blocks whom, if ranks have been waiting for a while."""
    waiting = [state for state in states.values() if state.waits_for and state.seconds >= BLOCKED_AFTER]
    found = []
    for state in states.values():
        for other in state.differs_from:
            if other > state.rank and other in states:
                text = f"{state}, but {states[other]}: they have called different operations"
                found.append(JobFinding("mismatch", text, [state.rank, other], state.seconds, state.line))
    unknown = [state for state in states.values() if state.in_unknown_group and state.seconds >= BLOCKED_AFTER]
    for state in unknown:
        text = f"{state}; its group is one too many to know who else is in it"
        found.append(JobFinding("blocked", text, [state.rank], state.seconds, state.line))
    if waiting:
        roots, circle = root_causes(states)
        if roots or circle:
            where = states[roots[0]].line if roots and roots[0] in states else ""
            text = blocked_text(states, roots, circle)
            found.append(JobFinding("blocked", text, roots or circle, max(state.seconds for state in waiting), where))
    return found


def _links_of(slates: Mapping[int, RankSlate]) -> _Links:
    return {
        (rank, int(row["rank"])): (
            int(row["sent"]),
            int(row["busy_us"]),
            int(row["held_us"]),
            int(row["segments"]),
        )
        for rank, slate in slates.items()
        for row in slate.peers
    }


def _calls_of(slates: Mapping[int, RankSlate]) -> list[CallPicture]:
    """Remote calls: what the caller has measured, less what the server has."""
    served = {
        (rank, bytes(row["name"])): row for rank, slate in slates.items() for row in slate.calls if row["peer"] < 0
    }
    found = []
    for rank, slate in slates.items():
        for row in slate.calls:
            if row["peer"] < 0:
                continue
            count = int(row["count"])
            other = served.get((int(row["peer"]), bytes(row["name"])))
            queue = handler = 0.0
            if other is not None:
                queue, handler = (float(other[name]) / int(other["count"]) / 1e9 for name in ("queue_ns", "handler_ns"))
            total = float(row["total_ns"]) / count / 1e9
            name = bytes(row["name"]).decode(errors="replace")
            wire = max(0.0, total - queue - handler)
            found.append(
                CallPicture(name, rank, int(row["peer"]), count, int(row["failed"]), total, queue, handler, wire)
            )
    return sorted(found, key=lambda call: -call.seconds * call.count)
