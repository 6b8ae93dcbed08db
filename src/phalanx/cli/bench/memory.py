"""The extra memory that a process needs for a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

__all__ = ["Usage", "watch_memory"]


class Usage(msgspec.Struct, frozen=True):
    """Bytes beyond what the process had before."""

    peak: int
    """At the highest point (VmHWM). A page that ranks share counts in full for each of them."""
    kept: int
    """Afterwards (PSS). A page that ranks share counts in parts."""


def _field(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    raise LookupError(f"/proc/self/{file} has no {name}")


def watch_memory(call: Callable[[], object]) -> Usage:
    """Calls a function; returns the memory that the call took."""
    # Sets the high-water mark to what is there now. Where it is not allowed, the mark is that of the whole life of the
    # process, which for one that has done nothing yet is the same.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    resident, shared = _field("status", "VmRSS"), _field("smaps_rollup", "Pss")
    call()
    peak, kept = _field("status", "VmHWM"), _field("smaps_rollup", "Pss")
    return Usage(peak=max(0, peak - resident), kept=kept - shared)
