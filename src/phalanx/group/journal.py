"""What a rank did last in a group: kept for the errors of others."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from pathlib import Path

from ..wire.control import OperationStatus

__all__ = ["Entry", "Journal", "describe"]

KEPT = 256
_THIS_FOLDER = str(Path(__file__).parent)


class Entry:
    """One operation: when it began and ended, and where it was called."""

    __slots__ = ("began", "code", "collective", "ended", "line", "mark", "operation", "sequence")

    def __init__(self, operation: str, sequence: int, collective: bool) -> None:
        self.operation = operation
        self.sequence = sequence
        self.collective = collective
        self.mark = 0
        """A collective's fingerprint."""
        self.began = time.monotonic()
        self.ended: float | None = None
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_THIS_FOLDER):
            frame = frame.f_back
        self.code = frame.f_code
        self.line = frame.f_lineno

    @property
    def site(self) -> str:
        """The user's source line."""
        return f"{Path(self.code.co_filename).name}:{self.line} in {self.code.co_name}"

    @property
    def name(self) -> str:
        """The operation, with its number if it is a collective."""
        return f"{self.operation} #{self.sequence}" if self.collective else self.operation

    def end(self) -> None:
        """The operation is over, well or not."""
        self.ended = time.monotonic()


class Journal:
    """The last operations of this rank in one group."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._started = (0, 0)
        self.sequence = 0
        """Collectives issued so far."""

    def begin(self, operation: str, *, collective: bool) -> Entry:
        """Notes that an operation begins."""
        with self._lock:
            if collective:
                self.sequence += 1
            entry = Entry(operation, self.sequence, collective)
            self._entries.append(entry)
        return entry

    def stamp(self, entry: Entry, mark: int) -> int:
        """Notes the fingerprint of a collective that begins to run, and returns it."""
        entry.mark = mark
        self._started = (entry.sequence, mark)  # in one step: others compare both
        return mark

    def at(self, sequence: int) -> Entry | None:
        """The collective of that number, if it has begun to run and is still kept."""
        with self._lock:
            entries = list(self._entries)
        return next((e for e in entries if e.collective and e.sequence == sequence and e.mark), None)

    def contradicts(self, status: OperationStatus) -> bool:
        """Whether another rank's collective of some number is not what this rank has under that number."""
        mine = self.at(status.sequence)
        return mine is not None and status.mark not in (0, mine.mark)

    def status(self, sequence: int = 0) -> OperationStatus:
        """What is going on: the oldest operation that still runs, else the one that ended last.

        Args:
            sequence: Tell of this collective instead, if this rank has got so far.
        """
        with self._lock:
            entries = list(self._entries)
        now = time.monotonic()
        asked = self.at(sequence) if sequence else None
        if asked is not None:
            since = asked.began if asked.ended is None else asked.ended
            return OperationStatus(asked.name, sequence, asked.mark, asked.site, asked.ended is None, now - since)
        sequence, mark = self._started
        if not entries:
            return OperationStatus("", sequence, mark, "", False, 0.0)
        running = next((entry for entry in entries if entry.ended is None), None)
        if running is not None:
            return OperationStatus(running.name, sequence, mark, running.site, True, now - running.began)
        last = max(entries, key=lambda entry: entry.ended or 0.0)
        return OperationStatus(last.name, sequence, mark, last.site, False, now - (last.ended or now))

    def recent(self) -> list[Entry]:
        """The operations that are kept, oldest first."""
        with self._lock:
            return list(self._entries)


def describe(status: OperationStatus | None) -> str:
    """A status in words, to follow "rank 3"."""
    if status is None or not status.operation:
        return "has not called any operation of this group"
    if status.running:
        return f"is in {status.operation} at {status.site} for {status.seconds:.1f} s"
    return f"is in no operation; it finished {status.operation} at {status.site} {status.seconds:.1f} s ago"
