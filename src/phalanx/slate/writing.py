"""Notes operations on a slate where there is no native core. The core's `SlateWriter` does the same."""

from __future__ import annotations

import contextlib
import threading
import time
from types import CodeType
from typing import Any, Protocol

import numpy as np

from ..operating_system import run_delay
from ..transports.shared_memory import map_memory
from . import layout

__all__ = ["OperationPlace", "PlaceInProgram", "PythonWriter"]

OperationPlace = tuple[int, int, int, int]
"""An operation on the slate: its number, its site, its bytes, and when it began in ns."""


class PlaceInProgram(Protocol):
    """A place in the user's program; see `phalanx.group.tracking.call_site`."""

    @property
    def code(self) -> CodeType | None:
        """The function."""

    @property
    def line(self) -> int:
        """The line."""


class _RunDelay:
    """How long this rank was ready to run and had no processor, as `cpp/phalanx/run_delay.hpp` counts it."""

    LONG = 1_000_000
    """Nanoseconds: only what took longer is looked at, because looking takes some microseconds."""

    def __init__(self) -> None:
        self._total = 0
        self._ended_ns = 0

    def begin(self, now: int) -> int:
        """An operation begins: the delay since the last one has ended, in microseconds."""
        gap = now - self._ended_ns
        if gap < self.LONG or not self._ended_ns:
            return 0
        return max(0, min(self._since_last_look(), gap)) // 1000

    def end(self, began: int, now: int) -> None:
        """An operation has ended."""
        if now - began >= self.LONG:
            self._since_last_look()
        self._ended_ns = now

    def _since_last_look(self) -> int:
        before, self._total = self._total, run_delay()
        return self._total - before


class PythonWriter:
    """Notes operations.

    Args:
        fd: The slate.
    """

    def __init__(self, fd: int) -> None:
        mapped = map_memory(fd, layout.SIZE)
        self.memory: Any = np.frombuffer(mapped, np.uint8)
        self._mapped = mapped
        self._retired = False
        memory = self.memory
        self._header = np.frombuffer(memory, layout.HEADER, 1)[0]
        self._records = np.frombuffer(memory, layout.RECORD, layout.RECORDS, layout.RECORDS_AT)
        self._sites = np.frombuffer(memory, layout.SITE, layout.SITES, layout.SITES_AT)
        self._groups = np.frombuffer(memory, layout.GROUP, layout.GROUPS, layout.GROUPS_AT)
        self._text = np.frombuffer(memory, np.uint8, layout.TEXT_BYTES, layout.TEXT_AT)
        self._known: dict[tuple[str, CodeType | None, int], int] = {}
        self._count = 0
        self._delay = _RunDelay()
        self._lock = threading.Lock()  # of this process's threads: a reader never waits for it

    def begin(
        self, group: int, verb: str, site: PlaceInProgram, peer: int, size: int, sequence: int, fingerprint: int
    ) -> OperationPlace:
        """Notes that an operation begins."""
        with self._lock:
            now = time.monotonic_ns()
            if self._retired:
                return 0, 0, 0, now
            number = self._site_of(verb, site)
            self._count += 1
            record = self._records[self._count % layout.RECORDS]
            record["number"] = 0
            record["began_ns"], record["ended_ns"] = now, 0
            record["sequence"], record["bytes"], record["fingerprint"] = sequence, size, fingerprint
            record["group"], record["site"], record["peer"] = group, number, peer
            record["starved_us"] = self._delay.begin(now)
            record["number"] = self._count
            self._header["count"] = self._count
            if sequence:
                self._groups[group]["fingerprint"] = fingerprint
                self._groups[group]["sequence"] = sequence
            return self._count, number, size, now

    def end(self, place: OperationPlace, failed: bool = False) -> None:
        """Notes that it is over."""
        number, at, size, began = place
        with self._lock:
            if self._retired or not number:
                return
            now = time.monotonic_ns()
            record = self._records[number % layout.RECORDS]
            if record["number"] == number:
                record["ended_ns"] = -now if failed else now
            site = self._sites[at]
            site["count"] += 1
            site["bytes"] += size
            site["total_ns"] += now - began
            site["longest_ns"] = max(int(site["longest_ns"]), now - began)
            self._delay.end(began, now)

    def retire(self) -> None:
        """Gives the memory back, once no array of it is left. Later operations are not noted."""
        with self._lock:
            self._retired = True
            del self.memory, self._header, self._records, self._sites, self._groups, self._text
            with contextlib.suppress(BufferError):
                self._mapped.close()

    def _site_of(self, verb: str, site: PlaceInProgram) -> int:
        key = (verb, site.code, site.line)
        found = self._known.get(key)
        if found is None:
            found = self._add_site(verb, site) if len(self._known) < layout.SITES else 0
            if found:
                self._known[key] = found
        return found

    def _add_site(self, verb: str, site: PlaceInProgram) -> int:
        file, name = (site.code.co_filename, site.code.co_name) if site.code is not None else ("", "")
        text = "\0".join([verb, file, name, str(site.line)]).encode(errors="replace")
        next_site, at = int(self._header["sites"]), int(self._header["text"])
        if next_site >= layout.SITES or at + len(text) > layout.TEXT_BYTES:
            return 0
        self._text[at : at + len(text)] = np.frombuffer(text, np.uint8)
        self._header["text"] = at + len(text)
        self._sites[next_site]["text"], self._sites[next_site]["length"] = at, len(text)
        self._header["sites"] = next_site + 1
        return next_site
