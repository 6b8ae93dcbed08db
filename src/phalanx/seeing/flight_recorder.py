"""The last collectives of all ranks in the format of torch's flight recorder, for its analyser.

`python -m torch.distributed.flight_recorder.fr_trace FOLDER` reads it. Slates have no shapes, so arrays are shown as
bytes, and messages are left out: their analyser compares the sizes of both sides, and a receive does not know its own
beforehand.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .reading import RankSlate, SlateGroup

__all__ = ["write_flight_records"]

VERSION = "2.10"
PREFIX = "rank_"
NAMES = {
    "broadcast", "reduce", "all_gather", "all_reduce", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
}  # fmt: skip
"""The operations that the analyser knows; any other is shown as the one that it is most like."""


def write_flight_records(slates: Mapping[int, RankSlate], folder: Path) -> list[Path]:
    """Writes one file for each rank; returns their paths.

    Raises:
        ConfigError: The folder holds records of other ranks, which torch's analyser would take for this job's.
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = {path.name for path in folder.glob(f"{PREFIX}*")} - {f"{PREFIX}{rank}" for rank in slates}
    if others:
        raise ConfigError(
            f"{folder} has {', '.join(sorted(others))} of another job, which torch's analyser would take for this "
            "one's (remove them, or name another folder)"
        )
    firsts = _firsts(slates)
    written = []
    for rank, slate in sorted(slates.items()):
        path = folder / f"{PREFIX}{rank}"
        path.write_bytes(pickle.dumps(_dump(slate, firsts)))
        written.append(path)
    return written


def _firsts(slates: Mapping[int, RankSlate]) -> dict[int, int]:
    """For each group the first operation that all ranks still have: what only some have would look like a mistake."""
    firsts: dict[int, int] = {}
    for slate in slates.values():
        for number, group in slate.groups.items():
            mine = slate.records["sequence"][(slate.records["group"] == number) & (slate.records["sequence"] > 0)]
            if len(mine):
                firsts[group.id] = max(firsts.get(group.id, 0), int(mine.min()))
    return firsts


def _dump(slate: RankSlate, firsts: Mapping[int, int]) -> dict[str, Any]:
    names = {group.id: _name_of(group) for group in slate.groups.values()}
    entries = []
    for record in slate.records:
        group = slate.groups.get(int(record["group"]))
        if group is None or record["sequence"] < firsts.get(group.id, np.inf):
            continue
        entries.append(_entry(slate, record, group, names[group.id]))
    config = {
        names[group.id]: {"name": names[group.id], "desc": "phalanx", "ranks": str(list(group.members))}
        for group in slate.groups.values()
    }
    status = {
        names[group.id]: {"last_enqueued_collective": group.sequence, "last_started_collective": group.sequence}
        for group in slate.groups.values()
    }
    return {
        "version": VERSION,
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
        "host_name": slate.text("host"),
        "rank": slate.rank,
    }


def _name_of(group: SlateGroup) -> str:
    return f"{group.id:016x}"


def _entry(slate: RankSlate, record: Any, group: SlateGroup, name: str) -> dict[str, Any]:
    site = slate.site(int(record["site"]))
    verb = site.verb.removesuffix("_object").removesuffix("_many")
    verb = verb if verb in NAMES else "all_gather" if "gather" in verb else "all_reduce"
    size, ranks = int(record["bytes"]), len(group.members)
    given, taken = size, size
    if verb == "all_gather":
        given, taken = size // ranks, size // ranks * ranks
    elif verb == "reduce_scatter":
        given, taken = size // ranks * ranks, size // ranks
    ended = max(0, int(record["ended_ns"]))  # one that failed did not complete
    return {
        "record_id": int(record["number"]),
        "pg_id": group.number,
        "process_group": (name, "phalanx"),
        "collective_seq_id": int(record["sequence"]),
        "p2p_seq_id": 0,
        "op_id": int(record["sequence"]),
        "profiling_name": f"nccl:{verb}",  # the analyser of torch before 2.13 knows no other name but xccl
        "time_created_ns": int(record["began_ns"]),
        "time_discovered_started_ns": int(record["began_ns"]),
        "time_discovered_completed_ns": ended or None,
        "duration_ms": (ended - int(record["began_ns"])) / 1e6 if ended else None,
        "input_sizes": [[given]],
        "input_dtypes": ["Byte"],
        "output_sizes": [[taken]],
        "output_dtypes": ["Byte"],
        "state": "completed" if ended else "started",
        "retired": bool(ended),
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": site.function, "filename": site.file, "line": site.line}],
    }
