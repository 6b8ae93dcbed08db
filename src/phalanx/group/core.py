"""The base of all verbs of a group: its members, its state, and the errors for deadlines that passed."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from .._native import core
from ..backends.base import LaneBackend
from ..backends.control_plane import ControlPlane
from ..deadline import Deadline
from ..errors import Closed, PhalanxError, Timeout, copy_for_raise
from ..rendezvous.control import KnownStatuses
from ..untraced import leave_calls_alone
from ..wire import codec
from .health import Health
from .tracking import call_site
from .tracking.journal import Journal, describe
from .tracking.long_waits import LongWaits
from .tracking.noting import Notes
from .tracking.whereabouts import whereabouts
from .turn_lock import PlainTurnLock

if TYPE_CHECKING:
    from .._core import Recorder, TurnLock
    from ..cuda.lending import Loans

__all__ = ["GroupCore", "release"]

WORTH_ASKING = 0.05
"""Seconds: after a shorter wait the others are not asked, so that polling with `timeout=0` stays cheap."""
LATELY = 1.0
"""Seconds for which an answer serves all messages that time out."""
MESSAGES, COLLECTIVES = 1, 2  # the numbers of a group's lanes; 0 is the backend's own


class GroupCore:
    """An ordered set of ranks, its two lanes, and its first cause of failure."""

    def __init__(self, backend: LaneBackend) -> None:
        backend.check_usable()
        leave_calls_alone()
        self._backend = backend
        self._timeout = backend.timeout
        self._context = backend.next_context("group")
        self._control = backend.control
        notes = Notes.of(self._control.slate, self._context, backend.rank, backend.world_ranks, whereabouts)
        """The notes on this group that other processes can read."""
        self._recorder: Recorder | None = None if core is None else core.Recorder(*notes.for_recorder())
        """Records of the operations on the fast paths."""
        self._journal = Journal(self._recorder, notes)
        self._told = False
        """True once the program was told that the group is broken."""
        self._closed = False
        self._is_half_closed = False
        """Whether an exception came in `close`: the next call does what is left."""
        self._before_close: list[Callable[[], None]] = []
        """Called once, when the group is closed, while it can still be used."""
        self._asking = threading.RLock()
        self._asked = (-math.inf, KnownStatuses(None))
        """The time at which all were asked last for a message's sake, and their answers."""
        self._lock = threading.RLock()
        everyone = range(backend.world_size)
        self._messages = backend.open_lane(self._context, MESSAGES, everyone)
        recorder = self._recorder
        self._fast_messages = None if recorder is None else self._messages.fast_messages(recorder, self._timeout)
        """The fast path of simple messages, where there is one."""
        self._collectives = backend.open_lane(self._context, COLLECTIVES, everyone)
        self._turn: TurnLock | PlainTurnLock = PlainTurnLock() if core is None else core.TurnLock()
        """Held by the collective that runs in a caller's thread, and while one is issued."""
        self._closers: list[Callable[[], None]] = [self._messages.close, self._collectives.close, notes.close]
        long_waits = LongWaits(self._journal, self._control, self._context, backend.world_ranks)
        self._health = Health(backend.world_ranks, (self._messages, self._collectives), self._journal, long_waits)
        self._control.watch(self._context, self._health)
        self._release = weakref.finalize(self, release, self._control, self._context, self._closers)
        # At exit the backend closes its lanes itself, in an order that lets everybody say goodbye.
        self._release.atexit = False

    @property
    def _loans(self) -> Loans | None:
        """Arrays on a GPU that members take from each other where they lie; None unless all can."""
        return None

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._backend.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The world rank of each member."""
        return self._backend.world_ranks

    @property
    def _world_rank(self) -> int:
        """This rank in the world, by which errors name it."""
        return self._backend.world_ranks[self._backend.rank]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host name of each member."""
        return self._backend.hosts

    @property
    def local_rank(self) -> int:
        """This rank among the members on its host."""
        return self._local_members.index(self.rank)

    @property
    def local_world_size(self) -> int:
        """The number of members on this rank's host."""
        return len(self._local_members)

    @property
    def _local_members(self) -> list[int]:
        ids = self._backend.host_ids
        return [rank for rank in range(self.world_size) if ids[rank] == ids[self.rank]]

    @property
    def _may_share_memory(self) -> bool:
        """True if all members are on one host, and nothing forbids them to share memory (as TLS does)."""
        ids = self._backend.memory_ids
        in_one_place = len(self._local_members) == self.world_size
        return self._backend.is_one_process or (in_one_place and bool(ids[0]) and len(set(ids)) == 1)

    @property
    def timeout(self) -> float:
        """Seconds an operation may take if it is not told otherwise."""
        return self._timeout

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._closed

    @property
    def backend(self) -> LaneBackend:
        """The backend that moves this group's bytes."""
        return self._backend

    @property
    def _limits(self) -> codec.Limits:
        """The largest object that is sent or received."""
        return _limits_of(self._backend.options.max_object)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuses an operation on a group that is closed or broken, before anything is sent.

        Raises:
            Closed: The group or its backend was closed.
            PhalanxError: The first cause of failure.
        """
        if self._closed:  # first, because closing the group of everybody closes its backend, which a user never made
            raise Closed("this group was closed", rank=self._world_rank)
        self._backend.check_usable()
        if self._health.cause is not None:
            self._told = True
            what = f"the call at {call_site.describe_site(call_site.find())}; the group was broken before it"
            raise copy_for_raise(self._health.cause, what, self._world_rank)

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.of(timeout, self._timeout)

    def _break(self, error: PhalanxError) -> NoReturn:
        """Breaks the group because of what this rank found, tells the others, and raises the first cause."""
        known = self._health.cause
        self._health.fail(error)
        if known is None:
            self._control.break_group(self._context, error)
        self._told = True
        raise copy_for_raise(known or error, error.operation or "", self._world_rank) from None

    # -- deadlines that passed -----------------------------------------------------------------------------------------

    def _timed_out(
        self, what: str, site: str, deadline: Deadline, waiting: Sequence[int], sequence: int | None
    ) -> Timeout:
        """The error for a deadline that passed: who had arrived, and what the others were last seen doing.

        Args:
            waiting: Ranks of the group that this rank waits for, as far as it can see itself.
            sequence: Of the collective; None for a message.
        """
        asking = deadline.seconds >= WORTH_ASKING
        found = self._statuses(lately=sequence is None) if asking else KnownStatuses(None)
        host = self._control.directory_host
        silent_host = host if asking and not found.answered and host is not None and self._is_waited_for(host) else None
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        asked = others if sequence is not None else list(waiting)
        arrived = [self.rank] if sequence is not None else []
        lines, missing = [], []
        for rank in asked:
            name = self.members[rank]
            status = found.replies.get(name)
            if rank == self.rank:
                words = "is this rank: it has not sent itself such a message"
            elif status is not None:
                if sequence is not None and status.sequence >= sequence:
                    arrived.append(rank)
                    continue
                words = describe(status)
            elif name in found.silent:
                seconds, last = found.silent[name]
                words = f"does not answer (last heard of {seconds:.1f} s ago"
                words += f": it {describe(last)})" if last is not None and last.operation else ")"
            elif found.answered:
                words = "has left the world or is lost"
            elif name == silent_host:
                words = "does not answer; it hosts the directory, so the others are unknown"
            else:
                words = "is unknown: the directory did not answer"
                if rank not in waiting:
                    continue
                if sequence is not None and silent_host is not None:
                    # It may itself wait for the one that is known to be silent.
                    lines.append(f"  rank {name} {words}")
                    continue
            missing.append(rank)
            lines.append(f"  rank {name} {words}")
        if not missing:  # everybody has called it: then it is the transfer that is slow
            missing = list(waiting)
            lines = [f"  rank {self.members[rank]} has called it, but its data has not arrived" for rank in missing]
        head = f"{what} at {site}: not done within {deadline.seconds:g} s"
        if sequence is not None:
            head += f"; arrived: {', '.join(str(self.members[rank]) for rank in sorted(arrived))}"
        trouble = self._control.trouble
        if trouble is not None:
            lines.append(f"  this rank, {self._world_rank}, cannot accept connections: {trouble}")
        if deadline.seconds == self._timeout:  # not the caller's own choice
            lines.append("  (if they need longer: timeout= of the call or of init(), or PHALANX_TIMEOUT)")
        names = [self.members[rank] for rank in missing]
        nobody = (
            "nobody, because this rank is alone in its group" if not others else "nobody any more: all came too late"
        )
        listed = ", ".join(map(str, names)) or nobody
        head += f"; {'missing' if sequence is not None else 'waiting for'}: {listed}"
        return Timeout(
            "\n".join([head, *lines]),
            missing=names,
            arrived=[self.members[rank] for rank in sorted(arrived)],
            seconds=deadline.seconds,
            rank=self._world_rank,
            peer=names[0] if len(names) == 1 else None,
            operation=what,
        )

    def _statuses(self, *, lately: bool) -> KnownStatuses:
        """Asks what the others are doing in this group. With `lately` an answer of the last second will do."""
        if not lately:
            return self._control.statuses(self._context)
        with self._asking:
            at, found = self._asked
            if time.monotonic() - at > LATELY:
                found = self._control.statuses(self._context)
                self._asked = (time.monotonic(), found)
            return found

    def _is_waited_for(self, name: int) -> bool:
        """True if a world rank is another member and has not left."""
        return name in self.members and name != self._world_rank and not self._control.has_left(name)


def release(control: ControlPlane, context: bytes, closers: list[Callable[[], None]]) -> None:
    """Gives back what a group holds, also when it is collected without having been closed."""
    if control.forked:
        return
    control.unwatch(context)
    for close in closers:
        close()


@functools.lru_cache(maxsize=8)
def _limits_of(bound: int) -> codec.Limits:
    return codec.Limits(max_head=bound, max_payload=bound, raised_by="Options.max_object or PHALANX_MAX_OBJECT")
