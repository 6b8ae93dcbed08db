"""Watches calls inside MPI, which cannot be interrupted: one that will never return ends the process, with a message.

It is the last resort. A rank that is late, or in another operation, is found before MPI is entered; this is for one
that dies or stops in the middle of a transfer, under a launcher that lets the others live on.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from ....background_thread import BackgroundThread

__all__ = ["Watched", "watch"]

PAUSE = 0.25
"""Seconds between two looks."""
GRACE = 1.0
"""Seconds in which a call may still end by itself after its time is over, or after the group has broken."""


class Watched(Protocol):
    """An engine whose calls may get stuck."""

    closed: bool

    @property
    def longest(self) -> float:
        """Seconds that a call may take."""

    @property
    def inside(self) -> int:
        """The number of the call that is inside MPI now; 0 if none is."""

    @property
    def is_broken(self) -> bool:
        """True if a call inside MPI may never return, because the group has broken meanwhile."""

    def give_up(self, seconds: float) -> None:
        """Ends the process: a call is stuck for so many seconds."""


_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_lock = threading.Lock()
_thread: BackgroundThread | None = None


def watch(engine: Watched) -> None:
    """Looks after an engine as long as it lives and is not closed."""
    global _thread  # noqa: PLW0603 - one thread looks after all groups of the process
    with _lock:
        _watched.add(engine)
        if _thread is None:
            _thread = BackgroundThread(_run, "phalanx-mpi-watch").start()


def _run() -> None:
    global _thread  # noqa: PLW0603
    seen: weakref.WeakKeyDictionary[Watched, tuple[int, float]] = weakref.WeakKeyDictionary()
    while True:
        time.sleep(PAUSE)
        with _lock:
            engines = [engine for engine in _watched if not engine.closed]
            if not engines:
                _thread = None
                return
        now = time.monotonic()
        for engine in engines:
            call = engine.inside
            if call == 0:
                seen.pop(engine, None)
                continue
            known, since = seen.get(engine, (0, now))
            if known != call:
                seen[engine] = (call, now)
                continue
            limit = GRACE if engine.is_broken else engine.longest + GRACE
            if now - since > limit:
                engine.give_up(now - since)
        del engines
