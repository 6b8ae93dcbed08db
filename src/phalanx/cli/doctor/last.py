"""`phalanx doctor --last`: the last seconds of the job that failed last, from what its ranks have left in memory."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.seeing.blocking import RankState, blocked_text, root_causes, states_of
from phalanx.seeing.flight_recorder import write_flight_records
from phalanx.seeing.picture import Picture
from phalanx.seeing.reading import RankSlate
from phalanx.seeing.slates import jobs_here, read_files
from phalanx.seeing.watch import JobWatch

__all__ = ["tell_last", "write_last_records"]

SECONDS = 5.0
"""How far back it tells."""
MOST = 24
"""Lines about operations."""


def tell_last() -> str:
    """The last seconds of the last job that failed.

    Raises:
        PhalanxError: There is none.
    """
    slates = _last()
    end_ns = max(_end_of(slate) for slate in slates.values())
    watch = JobWatch(lambda: slates, lambda: end_ns)
    picture = watch.look()
    assert picture is not None
    return "\n".join([*_head(slates, picture), "", *_ranks(slates, end_ns), "", *_operations(slates, end_ns)])


def write_last_records(folder: Path) -> list[Path]:
    """Writes them in the format of torch's flight recorder.

    Raises:
        PhalanxError: No job has failed.
        OSError: The folder cannot be written to.
    """
    return write_flight_records(_last(), folder)


def _last() -> dict[int, RankSlate]:
    failed = [job for job in jobs_here() if job.failed]
    if not failed:
        raise PhalanxError(
            "no job of this user has left anything behind on this machine (only the last one that failed is kept, "
            "until the machine starts again)"
        )
    return read_files(failed[0].job)


def _end_of(slate: RankSlate) -> int:
    records = slate.records
    times = [slate.beat_ns]
    if len(records):
        times += [int(records["began_ns"].max()), int(np.abs(records["ended_ns"]).max())]
    return max(times)


def _head(slates: dict[int, RankSlate], picture: Picture) -> list[str]:
    first = min(slates.values(), key=lambda slate: slate.began_ns)
    began = int(first.header["began_wall_ns"]) / 1e9
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began))
    lines = [
        (
            f"{picture.program or 'a job'}: {len(slates)} of {picture.world_size} ranks were on this machine; it began "
            f"{when} and lasted {picture.elapsed:.1f} s"
        )
    ]
    failure = next((slate.text("failure") for slate in slates.values() if slate.text("failure")), "")
    lines += [f"  {failure}"] if failure else []
    lines += [f"  {finding.text}" for finding in picture.findings]
    if not picture.findings:
        # Those that failed because of another one were in an operation with it, be it for a moment.
        states = states_of(slates, max(_end_of(slate) for slate in slates.values()))
        roots, circle = root_causes(states)
        lines += [f"  {blocked_text(states, roots, circle)}"] if roots or circle else []
    return lines


def _ranks(slates: dict[int, RankSlate], end_ns: int) -> list[str]:
    states = states_of(slates, end_ns)
    return [f"  {_words(states[rank])}" for rank in sorted(states)]


def _words(state: RankState) -> str:
    waits = f", waiting for {', '.join(map(str, state.waits_for))}" if state.waits_for else ""
    return f"rank {state.rank} {state.doing}{waits}"


def _operations(slates: dict[int, RankSlate], end_ns: int) -> list[str]:
    """The last operations of all ranks, in the order in which they began."""
    found: list[tuple[int, str]] = []
    for rank, slate in slates.items():
        for record in slate.records[-MOST:]:
            began, ended = int(record["began_ns"]), max(0, int(record["ended_ns"]))
            if max(began, ended) < end_ns - SECONDS * 1e9:
                continue
            site = slate.site(int(record["site"]))
            number = f" #{record['sequence']}" if record["sequence"] else ""
            took = f"{(ended - began) / 1e6:.1f} ms" if ended else "did not end"
            found.append((began, f"rank {rank}  {site.verb}{number} at {site.where}, {took}"))
    found.sort()
    lines = [f"  {(began - end_ns) / 1e9:+.3f} s  {text}" for began, text in found[-MOST:]]
    return [f"the last {SECONDS:.0f} seconds:", *lines] if lines else ["no operation in the last seconds"]
