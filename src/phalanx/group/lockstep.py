"""How collectives run: in the order in which they were issued, each with one deadline and one fingerprint."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ..algorithms import Schedule
from ..backends.base import fresh
from ..deadline import Deadline
from ..errors import ChannelClosed, Desync, InvalidRank, PeerLost, PhalanxError, Timeout, UsageError
from . import executor
from .core import GroupCore
from .journal import Entry
from .work import Work

__all__ = ["Lockstep", "Turn"]


class Turn:
    """A collective whose turn has come. What it is, is said by `stamp` before anything is sent."""

    def __init__(self, group: Lockstep, entry: Entry, deadline: Deadline) -> None:
        self._group = group
        self._entry = entry
        self._deadline = deadline
        self._mark = 0

    def stamp(self, operation: str, *, dtype: str = "", count: int = 0, reduction: str = "", root: int = 0) -> None:
        """Says what must be the same on all ranks."""
        mark = executor.fingerprint(operation, self._entry.sequence, dtype, count, reduction, root)
        self._mark = self._group._journal.stamp(self._entry, mark)

    def execute(
        self, schedule: Schedule, chunks: executor.Chunks, *, reduction: str = "", dtype: str | None = None
    ) -> None:
        """Runs this rank's part of a schedule.

        Args:
            reduction: How chunks are combined, where the schedule does.
            dtype: The name of the elements' type, where the chunks cannot say it (bfloat16).
        """
        executor.run(
            schedule,
            self._group._collectives,
            chunks,
            self._mark,
            self._deadline,
            dtype=dtype,
            op=reduction,
            look_around=self._look_around,
        )

    def _look_around(self) -> None:
        # Ranks in different operations may all wait without a byte on the wire: then only asking tells.
        group = self._group
        # Some may be ahead: those tell what they had under this number. Others may be behind.
        for name, status in group._control.statuses(group._context, self._entry.sequence).replies.items():
            if name in group.members and group._journal.contradicts(status):
                raise executor.FingerprintMismatch(group.members.index(name))


class Lockstep(GroupCore):
    """What the collectives have in common."""

    _worker: _Worker | None = None

    @property
    def _is_star(self) -> bool:
        return self._backend.topology == "star"

    def _check_member(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            names = ", ".join(map(str, range(self.world_size)))
            raise InvalidRank(rank, self.world_size, f"rank {rank} is not in this group (ranks: {names})")

    def _run(self, what: str, body: Callable[[Turn], Any], timeout: float | None, async_op: bool) -> Any:
        """Runs a collective in its turn: in this thread if the lane is idle, else behind those issued before."""
        deadline = self._deadline(timeout)
        if not self._turn.acquire(timeout=deadline.remaining()):
            raise Timeout(
                f"{what}: another thread's collective on this group was not done within {deadline.seconds:g} s",
                rank=self._world_rank,
                operation=what,
            )
        try:
            entry = self._journal.begin(what, collective=True)
            if not async_op and (self._worker is None or self._worker.idle):
                return self._guarded(body, entry, deadline)
            if self._worker is None:
                self._worker = _Worker()
                self._closers.insert(0, self._worker.stop)
            work = Work(what, deadline)
            self._worker.add(work, lambda: self._guarded(body, entry, deadline))
        finally:
            self._turn.release()
        return work if async_op else work.wait()

    def _guarded(self, body: Callable[[Turn], Any], entry: Entry, deadline: Deadline) -> Any:
        try:
            return body(Turn(self, entry, deadline))
        except UsageError:
            raise  # found by all ranks alike, or when the others had what they waited for: the group can go on
        except executor.DeadlinePassed as passed:
            self._break(self._timed_out(entry.name, entry.site, deadline, passed.waiting, entry.sequence))
        except executor.FingerprintMismatch as mismatch:
            self._break(self._desync(entry, mismatch.peer))
        except Timeout as error:  # a member did not even answer when it was called
            silent = [rank for rank, name in enumerate(self.members) if name in error.missing]
            self._break(self._timed_out(entry.name, entry.site, deadline, silent, entry.sequence))
        except PhalanxError as error:
            if self._cause is None:
                self._break(self._lost(error, entry))
            raise fresh(self._cause, f"{entry.name} at {entry.site}", self._world_rank) from None
        except BaseException as interrupt:  # Ctrl-C, no memory, whatever a signal handler raises
            # The others are in the middle of it: the group cannot go on. Whether the interrupt ends this program or is
            # caught by it, they hear the same.
            lines = [*traceback.format_stack(), *traceback.format_tb(interrupt.__traceback__)]
            lines += traceback.format_exception_only(type(interrupt), interrupt)
            text = f"Traceback (most recent call last):\n{''.join(lines)}"
            words = f"it raised {type(interrupt).__name__} in {entry.name}"
            reason = PeerLost(self._world_rank, words, rank=self._world_rank, remote_traceback=text)
            self.fail(reason)
            self._control.break_group(self._context, reason)
            raise
        finally:
            entry.end()

    def _lost(self, error: PhalanxError, entry: Entry) -> PhalanxError:
        """A member that closed the group on purpose breaks a collective as much as one that died."""
        if isinstance(error, ChannelClosed):
            return ChannelClosed(error.peer if error.peer is not None else -1, f"{error.reason}, before {entry.name}")
        if isinstance(error, PeerLost):
            return error
        error.operation = error.operation or entry.name
        return error

    def _desync(self, entry: Entry, peer: int) -> Desync:
        name = self.members[peer]
        status = self._control.statuses(self._context, entry.sequence).replies.get(name)
        if status is not None and status.sequence < entry.sequence and self._journal.contradicts(status):
            entry = self._journal.at(status.sequence) or entry  # that is where the two parted
        mine = f"{entry.name} at {entry.site}"
        theirs = (
            f"{status.operation} at {status.site}" if status is not None and status.operation else "another operation"
        )
        return Desync(
            f"rank {self._world_rank} called {mine}, but rank {name} called {theirs}. All ranks of a group must call "
            "the same operations, with the same sizes, dtypes, roots and reductions, in the same order",
            mine=mine,
            theirs=theirs,
            rank=self._world_rank,
            peer=name,
            operation=entry.name,
        )


class _Worker:
    """Runs the asynchronous collectives of a group, in the order in which they were issued."""

    def __init__(self) -> None:
        self._pending = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="phalanx-collectives", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether everything that was issued has ended. Asked by whoever may issue, so it stays true until they do."""
        return self._pending == 0

    def add(self, work: Work, job: Callable[[], Any]) -> None:
        with self._lock:
            self._pending += 1
        self._jobs.put((work, job))

    def stop(self) -> None:
        """Ends the thread once everything that was issued has ended."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            work, job = item
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job()
            except BaseException as error:
                failure = error
            with self._lock:
                self._pending -= 1
            work._finish(result, failure)
            del work, job, item, result, failure  # an idle worker keeps nothing alive
