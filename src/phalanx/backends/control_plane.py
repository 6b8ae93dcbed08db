"""The health of a world: tells open groups of lost ranks, and keeps the first cause for later questions."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import structs

from ..errors import Evicted, PeerLost, PhalanxError, RendezvousError
from ..news import News
from ..rendezvous.control import KnownStatuses
from ..rendezvous.error_codec import decode_error
from ..slate.slate import Slate
from ..wire.control import EncodedError, OperationStatus

__all__ = ["ControlPlane", "Watcher"]

logger = logging.getLogger("phalanx.backends")

MOST_CLOSED = 64
"""Closed groups whose status is kept."""
IDLE = OperationStatus("", 0, 0, "", False, 0.0)


class Watcher(Protocol):
    """A group, or anything else that breaks when one of its members is lost."""

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The world ranks of its members."""

    def fail(self, error: PhalanxError) -> None:
        """Breaks the group. Called in any thread; must not wait."""

    def left(self, rank: int) -> None:
        """Handles that a world rank has closed its world on purpose."""

    def status(self, sequence: int = 0) -> OperationStatus:
        """This rank's operation in the group: the current one, or its collective of that number."""

    def look_for_long_waits(self) -> None:
        """Speaks of an operation that waits for a rank for long. Called about once a second; must not wait."""


class ControlPlane:
    """A process's knowledge of its world: lost ranks, ranks that left, broken groups.

    This base class serves worlds without a directory, which only see their own connections.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._watchers: dict[bytes, weakref.ref[Watcher]] = {}
        self._condition = News()
        self._ended: PhalanxError | None = None
        self._lost: dict[int, PhalanxError] = {}
        self._left: set[int] = set()
        self._broken: dict[bytes, PhalanxError] = {}
        self._closed: dict[bytes, tuple[OperationStatus, float]] = {}
        """The last status of groups that were closed here of late, and when that was."""
        self.forked = False
        """True in a forked child, whose locks may be held by threads that exist only in the parent."""
        self.slate: Slate | None = None
        """The notes of this rank that other processes can read; None where it makes none."""
        self.directory_host: int | None = None
        """The rank that hosts the directory, if a rank does: it is lost when the directory does not answer."""
        self.arrivals = 0
        """The number of ranks that wait to join the world, when last heard."""

    @property
    def trouble(self) -> PhalanxError | None:
        """The reason why this rank cannot accept connections at present; None if it can."""
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

    def announce_leaving(self) -> None:
        """Says that this rank is about to close its world on purpose, before any of its channels is closed."""

    def unwatch(self, context: bytes) -> None:
        """Forgets a group."""
        with self._condition:
            self._watchers.pop(context, None)
            self._broken.pop(context, None)

    def keep_status(self, context: bytes, last: OperationStatus) -> None:
        """Keeps what this rank did last in a group that it closes: others may still wait for each other there."""
        with self._condition:
            self._closed[context] = last, time.monotonic()
            while len(self._closed) > MOST_CLOSED:
                del self._closed[next(iter(self._closed))]

    def verdict(self, rank: int, members: Sequence[int], wait: float) -> PhalanxError | None:
        """The reason why a rank has gone from a group. Waits up to `wait` seconds for the news.

        The rank may be lost itself, or it may have left because another member is.
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
        """The reason why the world has ended for all ranks; None if it has not."""
        return self._ended

    @property
    def has_lost_ranks(self) -> bool:
        """True once a rank has died."""
        return bool(self._lost)

    def has_left(self, rank: int) -> bool:
        """True once a rank has closed its world on purpose."""
        return rank in self._left

    def abort(self, reason: str, traceback: str, peer: int | None = None, *, on_purpose: bool = False) -> None:
        """Ends the world for this rank and all others that can be reached.

        Args:
            peer: The rank that this one lost, if that is the reason.
            on_purpose: Whether the program asked for it. An elastic world outlives the end of a rank, but not this.
        """
        self.on_abort(self.rank, reason, traceback)

    def break_group(self, context: bytes, error: PhalanxError) -> None:
        """Tells the other members of a group that it is broken, if they can be reached."""

    def statuses(self, context: bytes, sequence: int = 0) -> KnownStatuses:
        """The operations of the other ranks in a group, if they can be asked.

        Args:
            sequence: Ask for this collective, of those that have got so far.
        """
        return KnownStatuses(None)

    def answers(self, rank: int) -> bool:
        """Asks a rank now; true if it answers that it is alive."""
        return rank in self.statuses(b"").replies

    # -- what happens ------------------------------------------------------------------------------------------------

    def on_lost(self, rank: int, reason: str, traceback: str = "") -> None:
        """Handles that a rank has died."""
        error = PeerLost(rank, reason, remote_traceback=traceback or None)
        self._note_failure()
        with self._condition:
            self._lost.setdefault(rank, error)
            self._condition.notify_all()
        self._tell_groups(lambda watcher: watcher.fail(error), rank)

    def on_abort(self, rank: int, reason: str, traceback: str) -> None:
        """Handles that a rank has ended the world."""
        error = PeerLost(rank, reason, remote_traceback=traceback or None)
        self._end(error)

    def on_evicted(self, context: bytes, error: Evicted, is_world: bool) -> None:
        """Handles that this rank was voted out of a group, or of the whole world."""
        if is_world:
            self._end(error)
            return
        with self._condition:
            reference = self._watchers.get(context)
        watcher = reference() if reference is not None else None
        if watcher is not None:
            watcher.fail(error)

    def on_arrivals(self, count: int) -> None:
        """Handles that ranks wait to join the world."""
        self.arrivals = count

    def note(self, text: str) -> None:
        """Has the launcher show a line, if there is one."""

    def on_left(self, rank: int) -> None:
        """Handles that a rank has closed its world on purpose."""
        with self._condition:
            self._left.add(rank)
            self._condition.notify_all()
        self._tell_groups(lambda watcher: watcher.left(rank), rank)

    def on_break(self, context: bytes, rank: int, cause: EncodedError) -> None:
        """Handles that another member has found a group broken."""
        error = decode_error(cause, rank)
        if isinstance(error, PeerLost) and error.peer == self.rank:
            # The connection between the two broke, and both are alive. An error must not say that this rank is lost.
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

    def on_beat(self) -> None:
        """Handles that about a second has passed."""
        for watcher in self._alive():
            watcher.look_for_long_waits()

    def on_directory_lost(self, reason: str) -> None:
        """Handles that the directory has gone without giving a reason."""
        self._end(RendezvousError(f"the directory went away, so the loss of a rank is no longer noticed: {reason}"))

    def status(self, context: bytes | None, sequence: int = 0) -> OperationStatus:
        """This rank's operation in a group; without a context, the one that it began last."""
        found = [watcher.status() for watcher in self._alive()]
        last = max(found, key=lambda s: (s.running, -s.seconds), default=IDLE)
        if context is None:
            return last
        reference = self._watchers.get(context)
        watcher = reference() if reference is not None else None
        here = watcher.status(sequence) if watcher is not None else self._status_of_closed(context)
        if here.running or here.sequence == sequence != 0 or not last.running:
            return here
        words = f"{last.operation} of another group"
        return OperationStatus(words, here.sequence, here.fingerprint, last.site, True, last.seconds)

    def _status_of_closed(self, context: bytes) -> OperationStatus:
        last, closed_at = self._closed.get(context, (IDLE, 0.0))
        if not last.operation:
            return IDLE
        return structs.replace(last, seconds=last.seconds + time.monotonic() - closed_at)

    def slate_contents(self) -> bytes | None:
        """The contents of this rank's slate; None if it has none."""
        return None if self.slate is None else self.slate.contents()

    def _note_failure(self) -> None:
        if self.slate is not None:
            self.slate.fail()

    def _end(self, error: PhalanxError) -> None:
        self._note_failure()
        self._note_end(error)
        self._tell_groups(lambda watcher: watcher.fail(error))

    def _note_end(self, error: PhalanxError) -> None:
        """The world has ended, for this reason unless there was one before."""
        with self._condition:
            if self._ended is None:
                self._ended = error
            self._condition.notify_all()

    def _tell_groups(self, tell: Callable[[Watcher], None], rank: int | None = None) -> None:
        """Tells all groups, or those of a rank. An error in one of them, or in a callback there, is not the others'."""
        for watcher in self._alive():
            if rank is None or rank in watcher.world_ranks:
                try:
                    tell(watcher)
                except Exception:
                    logger.exception("an unexpected error in a group that was told of a rank that is gone")

    def _alive(self) -> Sequence[Watcher]:
        with self._condition:
            references = list(self._watchers.values())
        return [watcher for reference in references if (watcher := reference()) is not None]
