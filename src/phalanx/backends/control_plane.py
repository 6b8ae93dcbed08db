"""Who must hear of a loss: every group that is open, and the first cause for those that ask later."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from ..errors import PeerLost, PhalanxError, RendezvousError
from ..rendezvous.control import Statuses
from ..rendezvous.error_codec import from_cause
from ..wire.control import Cause, OperationStatus

__all__ = ["ControlPlane", "Watcher"]

IDLE = OperationStatus("", 0, 0, "", False, 0.0)


class Watcher(Protocol):
    """Something that breaks when one of its members is lost."""

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """Its members."""

    def fail(self, error: PhalanxError) -> None:
        """Breaks it, from any thread, without waiting."""

    def left(self, rank: int) -> None:
        """That world rank closed its world on purpose."""

    def status(self, sequence: int = 0) -> OperationStatus:
        """What this rank is doing in it, or did as its collective of that number."""


class ControlPlane:
    """What a process knows of its world's health. The base serves worlds that only see their own connections."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._watchers: dict[bytes, weakref.ref[Watcher]] = {}
        self._condition = threading.Condition()
        self._ended: PhalanxError | None = None
        self._lost: dict[int, PhalanxError] = {}
        self._left: set[int] = set()
        self._broken: dict[bytes, PhalanxError] = {}
        self.forked = False
        """Whether this is a forked child's copy, whose locks may be held by threads that exist only in the parent."""
        self.directory_host: int | None = None
        """The rank that the directory ends with, if one does: when nobody answers, it is the one that does not."""

    @property
    def trouble(self) -> PhalanxError | None:
        """Why this rank can accept no connection at present, if it cannot."""
        return None

    # -- for groups --------------------------------------------------------------------------------------------------

    def watch(self, context: bytes, watcher: Watcher) -> None:
        """Tells `watcher` of every loss from now on, and at once of one that it missed."""
        with self._condition:
            self._watchers[context] = weakref.ref(watcher)
            known = self._ended or self._broken.pop(context, None)
            known = known or next((self._lost[r] for r in watcher.world_ranks if r in self._lost), None)
            left = self._left.intersection(watcher.world_ranks)
        if known is not None:
            watcher.fail(known)
        for rank in left:
            watcher.left(rank)

    def unwatch(self, context: bytes) -> None:
        """Forgets a group."""
        with self._condition:
            self._watchers.pop(context, None)
            self._broken.pop(context, None)

    def verdict(self, rank: int, members: Sequence[int], wait: float) -> PhalanxError | None:
        """Why a rank is gone from a group, after waiting a moment for word of it.

        It may be lost itself, or have left because another member is.
        """
        end = time.monotonic() + wait
        with self._condition:
            while True:
                lost = (self._lost[member] for member in (rank, *members) if member in self._lost)
                known = self._ended or next(lost, None)
                if known is not None or rank in self._left:
                    return known
                if not self._condition.wait(max(0.0, end - time.monotonic())):
                    return None

    @property
    def ended(self) -> PhalanxError | None:
        """Why the world has ended for all ranks, if it has."""
        return self._ended

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a rank died."""
        return bool(self._lost)

    def has_left(self, rank: int) -> bool:
        """Whether a rank closed its world on purpose."""
        return rank in self._left

    def abort(self, reason: str, traceback: str, peer: int | None = None) -> None:
        """Ends the world for all ranks that can be told; this one included.

        Args:
            peer: The rank without which this one cannot go on, if that is why.
        """
        self.on_abort(self.rank, reason, traceback)

    def break_group(self, context: bytes, error: PhalanxError) -> None:
        """Tells the other members of a group that it is broken, where there is a way to."""

    def statuses(self, context: bytes, sequence: int = 0) -> Statuses:
        """What the other ranks are doing in a group, where they can be asked.

        Args:
            sequence: Ask for this collective, of those that have got so far.
        """
        return Statuses(None)

    def answers(self, rank: int) -> bool:
        """Whether a rank says, when asked now, that it is alive."""
        return rank in self.statuses(b"").replies

    # -- what happens ------------------------------------------------------------------------------------------------

    def on_lost(self, rank: int, reason: str) -> None:
        """A rank died."""
        error = PeerLost(rank, reason)
        with self._condition:
            self._lost.setdefault(rank, error)
            self._condition.notify_all()
        for watcher in self._alive():
            if rank in watcher.world_ranks:
                watcher.fail(error)

    def on_abort(self, rank: int, reason: str, traceback: str) -> None:
        """A rank ended the world."""
        error = PeerLost(rank, reason, remote_traceback=traceback or None)
        self._end(error)

    def on_left(self, rank: int) -> None:
        """A rank closed its world on purpose."""
        with self._condition:
            self._left.add(rank)
            self._condition.notify_all()
        for watcher in self._alive():
            if rank in watcher.world_ranks:
                watcher.left(rank)

    def on_break(self, context: bytes, rank: int, cause: Cause) -> None:
        """Another member found a group broken."""
        error = from_cause(cause, rank)
        if isinstance(error, PeerLost) and error.peer == self.rank:
            # Their connection broke while both are alive. Of oneself it makes no sense to hear that one is lost.
            error = type(error)(rank, f"it has lost its connection to this rank: {error.reason}")
        with self._condition:
            reference = self._watchers.get(context)
            if reference is None:
                # This rank may not have made the group yet. Only a few are kept: most are groups it is not in.
                self._broken[context] = error
                while len(self._broken) > 64:
                    del self._broken[next(iter(self._broken))]
        watcher = reference() if reference is not None else None
        if watcher is not None:
            watcher.fail(error)

    def on_directory_lost(self, reason: str) -> None:
        """Nobody watches any more, and nobody said why."""
        self._end(RendezvousError(f"the directory went away, and nobody watches the ranks any more: {reason}"))

    def status(self, context: bytes | None, sequence: int = 0) -> OperationStatus:
        """What this rank is doing in a group; without one, what it began last."""
        found = [watcher.status() for watcher in self._alive()]
        last = max(found, key=lambda s: (s.running, -s.seconds), default=IDLE)
        if context is None:
            return last
        reference = self._watchers.get(context)
        watcher = reference() if reference is not None else None
        here = watcher.status(sequence) if watcher is not None else IDLE
        if here.running or here.sequence == sequence != 0 or not last.running:
            return here
        words = f"{last.operation} of another group"
        return OperationStatus(words, here.sequence, here.fingerprint, last.site, True, last.seconds)

    def _end(self, error: PhalanxError) -> None:
        with self._condition:
            if self._ended is None:
                self._ended = error
            self._condition.notify_all()
        for watcher in self._alive():
            watcher.fail(error)

    def _alive(self) -> Sequence[Watcher]:
        with self._condition:
            references = list(self._watchers.values())
        return [watcher for reference in references if (watcher := reference()) is not None]
