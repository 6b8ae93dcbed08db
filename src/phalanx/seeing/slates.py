"""Where the slates of a job are read: the files of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..operating_system import process_state
from ..slate import layout
from ..slate.files import SlateFile, is_written, listed, shares_processes
from .reading import RankSlate

__all__ = ["JobHere", "SlateSource", "combined", "jobs_here", "read_files"]

SlateSource = Callable[[], dict[int, RankSlate]]
"""Reads the slates of a job now, by rank."""


@dataclass(frozen=True)
class JobHere:
    """A job that has slates on this machine."""

    job: str
    program: str
    world_size: int
    ranks: list[int]
    alive: bool
    failed: bool
    beat_ns: int
    """When one of its ranks last noted something."""
    began_ns: int
    """When its first rank began."""


def read_files(job: str, *, ended: bool = True) -> dict[int, RankSlate]:
    """The slates of a job on this machine.

    Args:
        ended: Also those whose process has ended.
    """
    found: dict[int, RankSlate] = {}
    for file in listed():
        if file.job != job:
            continue
        slate = _read(file)
        if slate is None or (not ended and not slate.alive):
            continue
        known = found.get(slate.rank)
        # A second world of the same rank, or a job that was started again with the same token.
        if known is None or (slate.alive, slate.began_ns) > (known.alive, known.began_ns):
            found[slate.rank] = slate
    return found


def combined(here: SlateSource, afar: SlateSource) -> SlateSource:
    """The slates of this machine, and of others those that are not here."""

    def read() -> dict[int, RankSlate]:
        found = here()
        return {**{rank: slate for rank, slate in afar().items() if rank not in found}, **found}

    return read


def jobs_here() -> list[JobHere]:
    """The jobs of this user on this machine, the one that noted something last in front."""
    found = []
    for job in sorted({file.job for file in listed()}):
        slates = read_files(job)
        if not slates:
            continue
        some = next(iter(slates.values()))
        alive = any(slate.alive for slate in slates.values())
        failed = any(slate.state != layout.CLOSED or slate.text("failure") for slate in slates.values())
        beat = max(slate.beat_ns for slate in slates.values())
        began = min(slate.began_ns for slate in slates.values())
        ended = failed and not alive
        found.append(JobHere(job, some.text("program"), some.world_size, sorted(slates), alive, ended, beat, began))
    return sorted(found, key=lambda job: (job.alive, job.beat_ns), reverse=True)


def _read(file: SlateFile) -> RankSlate | None:
    data = file.read()
    if data is None:
        return None
    slate = RankSlate(data)
    if slate.rank != file.rank:  # damaged
        return None
    slate.alive = is_written(data)
    slate.stopped = slate.alive and shares_processes(data) and process_state(slate.pid) in ("T", "t")
    return slate
