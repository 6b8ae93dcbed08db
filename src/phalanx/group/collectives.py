"""The collectives of a group: validated, in order, with one deadline each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from .._native import divide_in_place, valid_ops
from ..algorithms import Schedule, ring, star, tree
from ..backends.base import fresh
from ..deadline import Deadline
from ..errors import ChannelClosed, Desync, InvalidRank, PeerLost, PhalanxError, Timeout, UnsupportedOp
from ..types import ReduceOp
from . import executor
from .arrays import BFLOAT16, adapt
from .core import GroupCore
from .journal import Entry, describe
from .work import Work

__all__ = ["Collectives"]

SLOT = 32
"""Bytes for one rank's value in `_exchange`."""


class Collectives(GroupCore):
    """Operations that every member of the group takes part in."""

    _worker: _Worker | None = None

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Work | None:
        """Returns once every member has called it.

        Raises:
            Timeout: Not all came in time; names those that did not, and what they were last seen doing.
            PeerLost: A member is gone.
            Desync: A member called another operation.
        """
        self._check()
        schedule = (star if self._is_star else tree).barrier(self.rank, self.world_size)
        nothing = np.empty(0, np.uint8)

        def run(entry: Entry, deadline: Deadline) -> None:
            mark = self._journal.stamp(entry, executor.fingerprint("barrier", entry.sequence, "", 0, "", 0))
            self._execute(schedule, nothing, mark, entry, deadline)

        work: Work | None = self._run("barrier", run, timeout, async_op)
        return work

    def broadcast(self, x: Any, src: int, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Gives every member the array of rank `src`. All pass an array of the same dtype and size.

        Returns:
            The array, changed in place; a new one where it cannot be written to.

        Raises:
            As `barrier`; `InvalidRank` and `UnsupportedArray` before anything is sent.
        """
        self._check()
        self._check_member(src)
        target = adapt(x, write=self.rank != src)
        schedule = (star if self._is_star else tree).broadcast(self.rank, self.world_size, src)
        flat = target.array.reshape(-1)

        def run(entry: Entry, deadline: Deadline) -> Any:
            mark = self._journal.stamp(
                entry, executor.fingerprint("broadcast", entry.sequence, target.dtype, flat.size, "", src)
            )
            self._execute(schedule, flat, mark, entry, deadline)
            return target.finish()

        return self._run(f"broadcast(src={src})", run, timeout, async_op)

    def all_reduce(
        self, x: Any, op: str | ReduceOp = "sum", *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Combines the arrays of all members, element by element; everybody gets the same bits.

        Args:
            op: `"sum"`, `"mean"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"` or `"bxor"`.

        Returns:
            The array, changed in place; a new one where it cannot be written to.

        Raises:
            UnsupportedOp: The dtype has no such reduction.
            As `broadcast`.
        """
        self._check()
        target = adapt(x, write=True)
        name = self._check_reduction(op, target.dtype, target.array.dtype)
        dtype = BFLOAT16 if target.dtype == BFLOAT16 else None
        schedule = (star if self._is_star else ring).all_reduce(self.rank, self.world_size)
        flat = target.array.reshape(-1)

        def run(entry: Entry, deadline: Deadline) -> Any:
            mark = self._journal.stamp(
                entry, executor.fingerprint("all_reduce", entry.sequence, target.dtype, flat.size, name, 0)
            )
            step = "sum" if name == "mean" else name
            self._execute(schedule, flat, mark, entry, deadline, dtype=dtype, op=step)
            if name == "mean":
                divide_in_place(flat, self.world_size, dtype=dtype)
            return target.finish()

        return self._run(f"all_reduce(op={name})", run, timeout, async_op)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _is_star(self) -> bool:
        return self._backend.topology == "star"

    def _check_member(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            names = ", ".join(map(str, range(self.world_size)))
            raise InvalidRank(rank, self.world_size, f"rank {rank} is not in this group (ranks: {names})")

    def _check_reduction(self, op: str | ReduceOp, name: str, dtype: np.dtype[Any]) -> str:
        try:
            wanted = ReduceOp(op).value
        except ValueError:
            valid = ", ".join(repr(known.value) for known in ReduceOp)
            raise UnsupportedOp(f"op={op!r} is not a reduction (expected one of {valid})") from None
        possible = valid_ops(BFLOAT16 if name == BFLOAT16 else dtype)
        if wanted not in possible:
            shown = name if name == BFLOAT16 else dtype.name
            raise UnsupportedOp(f"op={wanted!r} makes no sense for {shown} (expected one of {', '.join(possible)})")
        return wanted

    def _exchange(self, value: Any, timeout: float | None) -> list[Any]:
        """Everybody's value, in the order of ranks; values are small."""

        def run(entry: Entry, deadline: Deadline) -> list[Any]:
            slots = np.zeros((self.world_size, SLOT), np.uint8)
            data = msgspec.msgpack.encode(value)
            slots[self.rank, : len(data) + 1] = np.frombuffer(bytes([len(data)]) + data, np.uint8)
            mark = self._journal.stamp(
                entry, executor.fingerprint("exchange", entry.sequence, "", slots.size, "bor", 0)
            )
            schedule = (star if self._is_star else ring).all_reduce(self.rank, self.world_size)
            self._execute(schedule, slots.reshape(-1), mark, entry, deadline, op="bor")
            return [msgspec.msgpack.decode(slot[1 : 1 + slot[0]].tobytes()) for slot in slots]

        found: list[Any] = self._run("split", run, timeout, False)
        return found

    def _run(self, what: str, run: Callable[[Entry, Deadline], Any], timeout: float | None, async_op: bool) -> Any:
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
                return self._guarded(run, entry, deadline)
            if self._worker is None:
                self._worker = _Worker()
                self._closers.insert(0, self._worker.stop)
            work = Work(what, deadline)
            self._worker.add(work, lambda: self._guarded(run, entry, deadline))
        finally:
            self._turn.release()
        return work if async_op else work.wait()

    def _execute(
        self,
        schedule: Schedule,
        buffer: np.ndarray[Any, np.dtype[Any]],
        mark: int,
        entry: Entry,
        deadline: Deadline,
        *,
        dtype: str | None = None,
        op: str = "",
    ) -> None:
        def look_around() -> None:
            # Ranks in different operations may all wait without a byte on the wire: then only asking tells.
            for name, status in self._control.statuses(self._context).replies.items():
                if name in self.members and status.sequence == entry.sequence and status.mark != mark:
                    raise executor.FingerprintMismatch(self.members.index(name))

        executor.run(schedule, self._collectives, buffer, mark, deadline, dtype=dtype, op=op, look_around=look_around)

    def _guarded(self, run: Callable[[Entry, Deadline], Any], entry: Entry, deadline: Deadline) -> Any:
        try:
            return run(entry, deadline)
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
        except KeyboardInterrupt:
            # The others are in the middle of it: the group cannot go on.
            reason = PhalanxError(f"{entry.name} was interrupted on rank {self._world_rank}", rank=self._world_rank)
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
        status = self._control.statuses(self._context).replies.get(name)
        mine = f"{entry.name} at {entry.site}"
        theirs = (
            f"{status.operation} at {status.site}" if status is not None and status.operation else "another operation"
        )
        words = describe(status) if status is not None else "called another operation"
        return Desync(
            f"rank {self.members[self.rank]} called {mine}, but rank {name} {words}. All ranks of a group must call "
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
