"""A word about a collective that waits for a rank for long, well before its deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...backends.control_plane import ControlPlane
from ...background_thread import BackgroundThread
from .journal import Entry, Journal, describe

__all__ = ["LongWaits"]

logger = logging.getLogger("phalanx.group")

FIRST = 10.0
"""Seconds of waiting after which there is a first word."""
GROWTH = 3.0
"""The next word comes when the wait is so many times as long."""


class LongWaits:
    """Watches the collectives of a group.

    Of the ranks that wait, the first speaks for all. Nothing is said where the others cannot be asked, and nothing of a
    collective that all ranks have called: then the data takes long.

    Args:
        members: The world rank of each member.
    """

    def __init__(self, journal: Journal, control: ControlPlane, context: bytes, members: Sequence[int]) -> None:
        self._journal = journal
        self._control = control
        self._context = context
        self._members = members
        self._sequence = 0
        """The last collective that was seen, since `_since`."""
        self._since = 0.0
        self._patience = FIRST

    def look(self) -> None:
        """Looks whether a word is due. Called about once a second, by one thread; does not wait."""
        now, sequence = time.monotonic(), self._journal.sequence
        if sequence != self._sequence:
            self._sequence, self._since, self._patience = sequence, now, FIRST
        elif now - self._since >= self._patience:
            self._patience *= GROWTH
            entry = self._journal.at(sequence)
            if entry is not None and entry.ended is None:
                # In a thread of its own: the answers come through the thread that calls this.
                BackgroundThread(lambda: self._speak(entry), "phalanx-waiting").start()

    def _speak(self, entry: Entry) -> None:
        found = self._control.statuses(self._context).replies
        missing = [rank for rank in self._members if rank in found and found[rank].sequence < entry.sequence]
        waiting = [rank for rank in self._members if rank in found and rank not in missing]
        seconds = time.monotonic() - entry.began
        if not missing or entry.ended is not None or self._control.rank != min([*waiting, self._control.rank]):
            return
        lines = [f"  rank {rank} {describe(found[rank])}" for rank in missing]
        names = ", ".join(map(str, missing))
        logger.warning(
            "rank %d: %s at %s has been waiting for %.0f s; missing: %s\n%s",
            self._control.rank,
            entry.name,
            entry.site,
            seconds,
            names,
            "\n".join(lines),
        )
