"""Counts the remote calls of this process, for its slate. One call costs a fraction of a microsecond."""

from __future__ import annotations

__all__ = ["CALLS", "CallCounts"]

MOST = 63
"""Functions, each with the rank at the other end, that are counted apart; the others are counted together."""
Row = list[float]


class CallCounts:
    """How often each function was called, and how long it took.

    Threads add to it without a lock: two that do so at the same moment may count once. The slate's thread reads it.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], Row] = {}
        """By function and rank (-1: it was served here): calls, failures, seconds in all, in the queue, in the
        handler."""

    def row(self, name: str, peer: int) -> Row:
        """The row in which the calls of a function are counted."""
        row = self.rows.get((name, peer))
        if row is None:
            key = (name, peer) if len(self.rows) < MOST else ("others", peer)
            row = self.rows.setdefault(key, [0, 0, 0.0, 0.0, 0.0])
        return row

    def add(self, name: str, peer: int, ok: bool, total: float, queue: float = 0.0, handler: float = 0.0) -> None:
        """Counts a call that has ended."""
        row = self.rows.get((name, peer)) or self.row(name, peer)
        row[0] += 1
        if not ok:
            row[1] += 1
        row[2] += total
        row[3] += queue
        row[4] += handler


CALLS = CallCounts()
"""Those of this process. An agent does not know which world's slate is read."""
