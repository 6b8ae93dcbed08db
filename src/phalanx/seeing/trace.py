"""Every operation of all ranks on one clock, as a file for Perfetto and Chrome (the trace event format).

A rank is a process of the trace, a group a thread of it. Inside an operation lies the part in which the rank waited,
and an arrow comes from the rank that it waited for. Messages are on tracks of their own, because they overlap.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .joining import JoinedOperations
from .reading import RankSlate

if TYPE_CHECKING:
    from .picture import Picture
    from .watch import JobWatch

__all__ = ["TraceFile", "TraceOutput"]

logger = logging.getLogger("phalanx.seeing")

KEPT = 100_000
"""Slices that are remembered: an operation may have ended on one rank long before it does on another."""
ARROW_FROM = 100_000
"""Nanoseconds of waiting from which there is an arrow."""


class TraceOutput(Protocol):
    """Takes the text of a trace: a file, or what carries it to one. Each may raise an `OSError`."""

    def write(self, text: str, /) -> object:
        """Takes more of it."""

    def flush(self) -> None:
        """Has others see what was written."""

    def close(self) -> None:
        """That was all."""


class TraceFile:
    """Writes the trace while the job runs. The file can be read at any time, and after a crash.

    If the disk is full, it ends there, with a warning: no job fails for its trace.

    Args:
        path: Is overwritten.
        output: What takes the text instead, for a file that is not on this host.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, output: TraceOutput | None = None) -> None:
        self._path = path
        self._file: TraceOutput = path.open("w", encoding="utf-8") if output is None else output
        self._ended = False
        self._file.write("[\n")
        self._seen: dict[int, int] = {}
        """The number of the last record of each rank that is in the file."""
        self._running: dict[int, set[int]] = {}
        """The numbers of those that had not ended when they were seen."""
        self._origin: int | None = None
        self._ends: dict[tuple[int, int], float] = {}
        """Where the last slice of each thread ends."""
        self._slices: dict[tuple[int, int, int], tuple[float, float]] = {}
        """The slices that were written lately, by rank, thread and number of the operation."""
        self._arrows = 0
        self._first = True
        self._named: set[tuple[int, int]] = set()
        self._errors: dict[int, int] = {}

    def update(self, watch: JobWatch, picture: Picture) -> None:
        """Writes what has ended since the last look."""
        if self._ended:
            return
        try:
            self._add(watch)
            self._file.flush()
        except OSError as error:
            self._end(error)

    def close(self, how: str = "") -> None:
        """Ends the file."""
        if self._ended:
            return
        try:
            self._file.write("\n]\n")
            self._file.close()
        except OSError as error:
            self._end(error)

    # ----------------------------------------------------------------------------------------------------------------

    def _end(self, error: OSError) -> None:
        self._ended = True
        with contextlib.suppress(OSError):  # what it holds back cannot be written either
            self._file.close()
        logger.warning("the trace in %s is incomplete: %s", self._path, error.strerror or error)

    def _add(self, watch: JobWatch) -> None:
        if self._origin is None:
            self._origin = min(slate.began_ns for slate in watch.slates.values())
        for slate in watch.slates.values():
            self._add_rank(slate)
            self._add_records(slate)
        for joined in watch.joined:
            self._add_waits(joined, watch)
        while len(self._slices) > KEPT:
            del self._slices[next(iter(self._slices))]

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event, separators=(",", ":")))
        self._first = False

    def _time(self, ns: int) -> float:
        assert self._origin is not None
        return (int(ns) - self._origin) / 1e3

    def _add_rank(self, slate: RankSlate) -> None:
        if slate.rank not in self._errors:
            name = f"rank {slate.rank} ({slate.text('host')}, process {slate.pid})"
            self._write({"ph": "M", "pid": slate.rank, "name": "process_name", "args": {"name": name}})
            self._write(
                {"ph": "M", "pid": slate.rank, "name": "process_sort_index", "args": {"sort_index": slate.rank}}
            )
        if self._errors.get(slate.rank) != slate.error_ns:
            self._errors[slate.rank] = slate.error_ns
            words = f"clock within {slate.error_ns / 1e6:.3f} ms" if slate.error_ns else "the clock of this trace"
            self._write({"ph": "M", "pid": slate.rank, "name": "process_labels", "args": {"labels": words}})

    def _add_thread(self, rank: int, number: int, words: str) -> None:
        if (rank, number) not in self._named:
            self._named.add((rank, number))
            self._write({"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": words}})

    def _add_records(self, slate: RankSlate) -> None:
        records = slate.records
        seen = self._seen.get(slate.rank, 0)
        fresh = records[records["number"] > seen]
        running = self._running.setdefault(slate.rank, set())
        for record in records[np.isin(records["number"], list(running)) | (records["number"] > seen)]:
            if record["ended_ns"]:
                running.discard(int(record["number"]))
                self._add_record(slate, record)
            else:
                running.add(int(record["number"]))
        if not len(fresh):
            return
        missed = int(fresh["number"][0]) - seen - 1
        if missed:
            at = self._time(fresh["began_ns"][0])
            words = f"{missed} operations were not seen"
            self._write({"ph": "i", "s": "p", "pid": slate.rank, "tid": 0, "ts": at, "name": words, "cat": "missed"})
        self._seen[slate.rank] = int(fresh["number"][-1])

    def _add_record(self, slate: RankSlate, record: Any) -> None:
        site = slate.site(int(record["site"]))
        group = slate.groups.get(int(record["group"]))
        peer = int(record["peer"])
        if group is not None and 0 <= peer < len(group.members):
            peer = group.members[peer]
        arguments = {"where": site.where, "bytes": int(record["bytes"])}
        if peer >= 0:
            arguments["peer"] = peer
        began, ended = self._time(record["began_ns"]), self._time(abs(record["ended_ns"]))
        common = {"pid": slate.rank, "name": site.verb}
        if record["sequence"]:
            thread = 1 + int(record["group"])
            words = f"group of {len(group.members)}" if group is not None else "a group"
            self._add_thread(slate.rank, thread, words)
            arguments["number"] = int(record["sequence"])
            # A better estimate of a clock moves all that comes later: slices of one thread must not cross.
            began = max(began, self._ends.get((slate.rank, thread), began))
            ended = max(began, ended)
            self._ends[slate.rank, thread] = ended
            self._slices[slate.rank, thread, int(record["sequence"])] = (began, ended)
            duration = {"ts": began, "dur": ended - began}
            self._write({**common, "ph": "X", "cat": "collective", "tid": thread, **duration, "args": arguments})
        else:
            key = f"{slate.rank}.{record['number']}"
            self._write({**common, "ph": "b", "cat": "message", "tid": 0, "id": key, "ts": began, "args": arguments})
            self._write({**common, "ph": "e", "cat": "message", "tid": 0, "id": key, "ts": ended})

    def _add_waits(self, joined: JoinedOperations, watch: JobWatch) -> None:
        threads = {}
        for rank in joined.members:
            found = (group for group in watch.slates[rank].groups.values() if group.id == joined.group)
            threads[rank] = 1 + next((group.number for group in found), 0)
        for row, number in enumerate(map(int, joined.sequence)):
            last = joined.members[joined.last[row]]
            source = self._slices.get((last, threads[last], number))
            met = self._time(joined.arrived[row, joined.last[row]])
            for column, rank in enumerate(joined.members):
                waited = int(joined.waited[row, column])
                inside = self._slices.get((rank, threads[rank], number))
                if rank == last or waited < ARROW_FROM or inside is None:
                    continue
                began, end = inside[0], min(inside[1], inside[0] + waited / 1e3)
                name = f"waits for rank {last}"
                place = {"pid": rank, "tid": threads[rank]}
                self._write({**place, "ph": "X", "cat": "waiting", "name": name, "ts": began, "dur": end - began})
                if source is not None:
                    self._arrows += 1
                    arrow = {"cat": "late", "name": "late", "id": self._arrows}
                    at = min(max(met, source[0]), source[1])
                    self._write({**arrow, "ph": "s", "pid": last, "tid": threads[last], "ts": at})
                    self._write({**arrow, **place, "ph": "f", "bp": "e", "ts": end})
