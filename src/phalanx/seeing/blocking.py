"""Finds who waits for whom just now, and who is at the end of the chain. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..slate import layout
from .reading import CallSitePlace, RankSlate

__all__ = ["RankState", "blocked_text", "root_causes", "states_of"]

SILENT_AFTER = 2.0
"""Seconds without a beat after which a rank's interpreter is said not to answer; it beats four times a second."""


@dataclass
class RankState:
    """The state of a rank just now."""

    rank: int
    state: str
    seconds: float
    """Since the operation began, or since the last one ended."""
    site: CallSitePlace | None = None
    """Of the operation that runs; None if none does."""
    name: str = ""
    """The operation with its number."""
    place: str = ""
    """Where the program is, if no operation runs."""
    last: str = ""
    """The operation that ended last."""
    waits_for: list[int] = field(default_factory=list)
    differs_from: list[int] = field(default_factory=list)
    """Ranks that are in another operation under the same number."""
    in_unknown_group: bool = False
    """It is in an operation of a group that there was no room for on its slate."""

    @property
    def line(self) -> str:
        """The line at which it is."""
        return self.site.where if self.site is not None else self.place or "an unknown place"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.doing}"

    @property
    def doing(self) -> str:
        """The state in words, to follow "rank 3"."""
        if self.state == "lost":
            inside = (
                f"in {self.name} at {self.line} for {self.seconds:.1f} s"
                if self.site is not None
                else f"at {self.line}"
            )
            after = f", after {self.last}" if self.site is None and self.last else ""
            return f"is gone; it was last seen {inside}{after}"
        if self.state == "failed":
            if self.site is not None:
                return f"has failed in {self.name} at {self.line}, in which it was for {self.seconds:.1f} s"
            return (
                "has failed"
                + (f" after {self.last}" if self.last else "")
                + (f", at {self.place}" if self.place else "")
            )
        if self.state == "closed":
            return "has left the world" + (f" after {self.last}" if self.last else "")
        stop = {"stopped": "is stopped (SIGSTOP), ", "silent": "does not answer (its interpreter is busy or stuck), "}
        words = stop.get(self.state, "")
        if self.site is not None:
            return f"{words}is in {self.name} at {self.line} for {self.seconds:.1f} s"
        since = f", in no operation for {self.seconds:.1f} s" if self.last else ", in no operation so far"
        return f"{words}is at {self.line}{since}"


def states_of(slates: Mapping[int, RankSlate], now_ns: int) -> dict[int, RankState]:
    """The state of each rank, with the ranks that it waits for."""
    found = {rank: _state_of(slate, now_ns) for rank, slate in slates.items()}
    for rank, slate in slates.items():
        if found[rank].site is not None and found[rank].state != "closed":
            _find_waits(found[rank], slate, slates)
    return found


def _state_of(slate: RankSlate, now_ns: int) -> RankState:
    records = slate.records
    if slate.gone or slate.state == layout.CLOSED:
        state = "closed"
    elif slate.state == layout.FAILED:
        state = "failed"
    elif not slate.alive:
        state = "lost"
    elif slate.stopped:
        state = "stopped"
    else:
        state = "silent" if now_ns - slate.beat_ns > SILENT_AFTER * 1e9 else "running"
    ended = records[records["ended_ns"] > 0]
    last = ended[ended["ended_ns"].argmax()] if len(ended) else None
    # After a crash the clock does not go on.
    now = (
        now_ns
        if slate.alive and not slate.gone
        else max(slate.beat_ns, int(records["began_ns"].max()) if len(records) else 0)
    )
    place = slate.place
    record = _waited_in(slate)
    if record is not None:
        site = slate.site(int(record["site"]))
        name = f"{site.verb} #{record['sequence']}" if record["sequence"] else site.verb
        now = now if record["ended_ns"] == 0 else -int(record["ended_ns"])
        return RankState(slate.rank, state, max(0, now - int(record["began_ns"])) / 1e9, site, name, place)
    if last is None:
        return RankState(slate.rank, state, max(0, now - slate.began_ns) / 1e9, place=place)
    site = slate.site(int(last["site"]))
    name = f"{site.verb} #{last['sequence']}" if last["sequence"] else site.verb
    seconds = max(0, now - int(last["ended_ns"])) / 1e9
    return RankState(slate.rank, state, seconds, place=place, last=f"{name} at {site.where}")


def _waited_in(slate: RankSlate) -> Any:
    """The operation that the rank is in, or in which it failed; None if there is none."""
    records = slate.records
    running = records[records["ended_ns"] == 0]
    # A message that waits while the rank goes on with other operations is another thread's affair.
    running = running[(running["sequence"] > 0) | (running["number"] == records["number"].max(initial=0))]
    if len(running):
        return running[0]
    broken = slate.state == layout.FAILED and len(records) > 0 and records[-1]["ended_ns"] < 0
    return records[-1] if broken else None


def _find_waits(state: RankState, slate: RankSlate, slates: Mapping[int, RankSlate]) -> None:
    record = _waited_in(slate)
    group = slate.groups.get(int(record["group"]))
    if group is None:
        state.in_unknown_group = True
        return
    sequence, fingerprint, peer = int(record["sequence"]), int(record["fingerprint"]), int(record["peer"])
    others = [rank for rank in group.members if rank != slate.rank]
    if not sequence:
        state.waits_for = [group.members[peer]] if 0 <= peer < len(group.members) else others
        return
    for rank in others:
        other = slates.get(rank)
        theirs = None if other is None else next((g for g in other.groups.values() if g.id == group.id), None)
        if theirs is None or theirs.sequence < sequence:
            if other is not None or group.members == tuple(range(slate.world_size)):
                state.waits_for.append(rank)
        elif theirs.sequence == sequence and theirs.fingerprint != fingerprint:
            state.differs_from.append(rank)


def root_causes(states: Mapping[int, RankState]) -> tuple[list[int], list[int]]:
    """The ranks at the end of the chains, which wait for nobody; and those that wait for each other in a circle."""
    roots, circle = set(), set()
    for start, state in states.items():
        if not state.waits_for:
            continue
        seen: set[int] = set()
        front = {start}
        ends = set()
        while front:
            seen |= front
            following = set()
            for rank in front:
                further = states[rank].waits_for if rank in states else []
                if not further and rank != start:
                    ends.add(rank)
                following |= set(further)
            if start in following and not ends:
                circle.add(start)
            front = following - seen
        roots |= ends
    return sorted(roots), sorted(circle) if not roots else []


def blocked_text(states: Mapping[int, RankState], roots: list[int], circle: list[int]) -> str:
    """Says in words who blocks whom."""
    waiting = sorted(rank for rank, state in states.items() if state.waits_for and rank not in roots)
    if circle:
        return "; ".join(f"{states[rank]}, waiting for {_ranks(states[rank].waits_for)}" for rank in circle)
    causes = [str(states[rank]) if rank in states else _unknown(rank) for rank in roots]
    example = states[waiting[0]] if waiting else None
    at = f" in {example.name} at {example.line}" if example is not None and example.site is not None else ""
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{_ranks(waiting)} {verb}{at}, because {', '.join(causes)}"


def _unknown(rank: int) -> str:
    return f"nothing is known of rank {rank} (it has not started, or does not answer)"


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
