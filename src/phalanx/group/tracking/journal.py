"""The last operations of a rank in a group, kept for the errors of others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..._native import dtype_name_of_code
from ...wire.control import OperationStatus
from . import call_site
from .call import CollectiveCall, name_of_call
from .noting import Notes
from .whereabouts import whereabouts

if TYPE_CHECKING:
    from ..._core import Recorder
    from ...slate.writing import OperationPlace
    from .call_site import CallSite

    Record = tuple[str, int, str, int, int, tuple[int, ...], int, int, CallSite, float, float, bool]

__all__ = ["Entry", "Journal", "describe"]

KEPT = 256
"""Messages, and collectives: many messages must not push out the collective that another thread is in."""
LONGEST_LIST = 200
"""Characters of a list of arrays that an error shows."""
BFLOAT16 = "bfloat16"


class Entry:
    """One operation: when it began and ended, and where it was called.

    Args:
        operation: The name of a message.
        sequence: The number of a collective; 0 for a message.
        call: What a collective is. Its name is made of it when an error has to tell it.
        notes: Where others see it; None for one that the core has noted.
    """

    __slots__ = (
        "_call", "_message", "_notes", "_operation", "_place", "began", "caller", "ended", "failed", "fingerprint",
        "sequence",
    )  # fmt: skip

    def __init__(
        self,
        operation: str,
        sequence: int,
        caller: CallSite,
        call: CollectiveCall | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._operation = operation
        self._call = call
        self._notes = notes
        self._place: OperationPlace | None = None
        self._message: tuple[int | None, int] | None = None
        """The other end and the size of a message that others have not been shown yet."""
        self.sequence = sequence
        self.fingerprint = 0
        """The fingerprint of a collective that has begun to run."""
        self.began = time.monotonic()
        self.ended: float | None = None
        self.failed = False
        self.caller = caller

    @classmethod
    def of_record(cls, record: Record) -> Entry:
        """The entry of an operation that a fast path has recorded."""
        verb, rank, op, tag, dtype, shape, sequence, fingerprint, caller, began, ended, failed = record
        root = rank if rank >= 0 else None
        if sequence:
            name = dtype_name_of_code(dtype) if dtype >= 0 else ""
            entry = cls("", sequence, caller, CollectiveCall(verb, name, shape, op, root))
        else:
            entry = cls(name_of_call(verb, root, op, tag=tag), 0, caller)
        entry.fingerprint = fingerprint
        entry.began, entry.ended, entry.failed = began, ended or None, failed
        return entry

    @property
    def operation(self) -> str:
        """The operation with its arguments."""
        return self._operation if self._call is None else self._call.name

    @property
    def site(self) -> str:
        """The user's source line."""
        return call_site.describe_site(self.caller)

    @property
    def collective(self) -> bool:
        """True for a collective, False for a message."""
        return self.sequence > 0

    @property
    def name(self) -> str:
        """The operation, with its number if it is a collective."""
        return f"{self.operation} #{self.sequence}" if self.collective else self.operation

    @property
    def full_name(self) -> str:
        """The name with the dtype and shape of the array: two operations may differ in nothing else."""
        if self._call is None or not self.fingerprint:
            return self.name
        return self.name + _on(self._call.dtype, self._call.shape)

    def start(self) -> int:
        """Notes that a collective begins to run; returns its fingerprint."""
        assert self._call is not None
        self.fingerprint = self._call.fingerprint(self.sequence)
        if self._notes is not None:
            self._place = self._notes.begin_collective(self._call, self.sequence, self.fingerprint, self.caller)
        return self.fingerprint

    def post_message(self, peer: int | None, size: int) -> None:
        """Notes a message that nobody waits for yet.

        Args:
            peer: The rank of the group at the other end; None for any.
        """
        self._message = (peer, size)

    def show_message(self) -> None:
        """From now on the program waits for the message."""
        if self._notes is not None and self._message is not None:
            (peer, size), self._message = self._message, None
            self._place = self._notes.begin_message(self._operation, peer, size, self.caller)

    def end(self, *, failed: bool = False) -> None:
        """The operation is over, well or not.

        Args:
            failed: It did not come to its end.
        """
        self.failed = failed
        self.ended = time.monotonic()
        self.show_message()
        if self._notes is not None:
            self._notes.end(self._place, failed)
            self._place = None


class Journal:
    """The last operations of this rank in one group.

    Args:
        recorder: Where the fast paths of the core note theirs, if there is a core.
        notes: What other processes see.
    """

    def __init__(self, recorder: Recorder | None = None, notes: Notes | None = None) -> None:
        self._recorder = recorder
        self._notes = notes
        self._messages: deque[Entry] = deque(maxlen=KEPT)
        self._collectives: deque[Entry] = deque()
        self._lock = threading.Lock()
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Collectives issued so far, by whatever path."""
        return self._sequence if self._recorder is None else self._recorder.sequence

    def begin(self, operation: str, peer: int | None = None, size: int = 0, *, posted: bool = False) -> Entry:
        """Notes that a message begins.

        Args:
            peer: The rank of the group at the other end; None for any.
            size: Its bytes, as far as they are known.
            posted: The caller does not wait for it: see `Entry.show_message`.
        """
        entry = Entry(operation, 0, call_site.find(), notes=self._notes)
        entry.post_message(peer, size)
        if not posted:
            entry.show_message()
        with self._lock:
            self._messages.append(entry)
        return entry

    def issue(self, call: CollectiveCall) -> Entry:
        """Notes that a collective was issued, and numbers it. It may run later: see `Entry.start`."""
        caller = call_site.find()
        with self._lock:
            if self._recorder is not None:
                self._recorder.sequence += 1
            else:
                self._sequence += 1
            entry = Entry("", self.sequence, caller, call, self._notes)
            self._collectives.append(entry)
            # They end in their order. Those that have not are kept: they are the ones that others ask for.
            while len(self._collectives) > KEPT and self._collectives[0].ended is not None:
                self._collectives.popleft()
        return entry

    def at(self, sequence: int) -> Entry | None:
        """The collective of that number, if it has begun to run and is still kept."""
        return next((e for e in self.recent() if e.collective and e.sequence == sequence and e.fingerprint), None)

    def contradicts(self, status: OperationStatus) -> bool:
        """True if another rank's collective differs from the one that this rank has under the same number."""
        mine = self.at(status.sequence)
        return mine is not None and status.fingerprint not in (0, mine.fingerprint)

    def status(self, sequence: int = 0, locate: Callable[[], str] = whereabouts) -> OperationStatus:
        """The state of this rank: the oldest operation that still runs, else the one that ended last.

        Args:
            sequence: Tell of this collective instead, if this rank has got so far.
            locate: Says where the program is, if no operation runs.
        """
        entries = self.recent()
        now = time.monotonic()
        begun = [entry for entry in entries if entry.collective and entry.fingerprint]
        asked = next((entry for entry in begun if entry.sequence == sequence), None)
        if asked is not None:
            since = asked.began if asked.ended is None else asked.ended
            return OperationStatus(
                asked.full_name,
                sequence,
                asked.fingerprint,
                asked.site,
                asked.ended is None,
                now - since,
                failed=asked.failed,
            )
        last_begun = max(begun, key=lambda entry: entry.sequence, default=None)
        number, fingerprint = (last_begun.sequence, last_begun.fingerprint) if last_begun is not None else (0, 0)
        if not entries:
            return OperationStatus("", number, fingerprint, "", False, 0.0, locate())
        running = next((entry for entry in entries if entry.ended is None), None)
        if running is not None:
            return OperationStatus(running.full_name, number, fingerprint, running.site, True, now - running.began)
        last = max(entries, key=lambda entry: entry.ended or 0.0)
        seconds = now - (last.ended or now)
        return OperationStatus(last.full_name, number, fingerprint, last.site, False, seconds, locate(), last.failed)

    def recent(self) -> list[Entry]:
        """The operations that are kept, oldest first."""
        with self._lock:
            entries = [*self._collectives, *self._messages]
        if self._recorder is not None:
            entries += [Entry.of_record(record) for record in self._recorder.records()]
        return sorted(entries, key=lambda entry: entry.began)


def _on(dtype: str, shape: tuple[int, ...]) -> str:
    """The array of a collective in words, where all ranks have the same."""
    if not dtype:
        return ""
    if "[" in dtype:  # a list of arrays, or what their rows have in common
        return f" of {dtype if len(dtype) <= LONGEST_LIST else dtype[:LONGEST_LIST] + '…'}"
    kind, place, where = dtype.partition(" on ")
    name = np.dtype(kind).name if kind[0] in "<|>=" else kind
    return f" of {name}{list(shape)}{place}{where}"


def describe(status: OperationStatus | None) -> str:
    """A status in words, to follow "rank 3"."""
    at = f"; it is at {status.at}" if status is not None and status.at else ""
    if status is None or not status.operation:
        return f"has not called any operation of this group{at}"
    if status.running:
        return f"is in {status.operation} at {status.site} for {status.seconds:.1f} s"
    what = f"{status.operation} at {status.site}"
    ended = f"its {what} failed" if status.failed else f"it finished {what}"
    return f"is in no operation; {ended} {status.seconds:.1f} s ago{at}"
