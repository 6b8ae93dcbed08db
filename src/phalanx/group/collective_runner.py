"""Runs collectives in the order in which they were issued, each with one deadline and one fingerprint."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ..backends.base import LaneBackend
from ..deadline import Deadline
from ..errors import ChannelClosed, Desync, PeerLost, PhalanxError, Timeout, UsageError, copy_for_raise
from ..frames import user_stack
from ..system_limits import naming_limits, out_of_resources
from ..wire.control import OperationStatus
from .core import GroupCore
from .data.arrays import has_gpu_arrays
from .engines.base import Engine, EngineSetup
from .engines.choose import choose_engine, device_fast_path, engine_for_devices
from .fast_path import AnyFastPath, DeviceFastPath, FastPathMaker
from .outcomes import DeadlinePassed, FingerprintMismatch
from .running_collective import Peers, RunningCollective
from .tracking.call import CollectiveCall
from .tracking.journal import Entry
from .work import Work
from .worker import CollectiveWorker, QueuedWork

if TYPE_CHECKING:
    from .._core import IssuedCollective
    from ..cuda.lending import Loans

__all__ = ["CollectiveRunner"]


Body = Callable[[Engine, RunningCollective], Any]
"""The part of a verb that is called when its collective runs."""


class CollectiveRunner(GroupCore):
    """Runs the collectives of a group, on the engine that its first one has chosen."""

    _worker: CollectiveWorker | None = None
    _engine: Engine | None = None
    _device_engine: Engine | None = None
    """The engine above it, once the program has used an array on a GPU."""
    _fast_path: AnyFastPath | None = None
    """The fast path of calls on plain arrays, once the engine has opened one."""

    def __init__(self, backend: LaneBackend) -> None:
        super().__init__(backend)
        self._peers = Peers(self._collectives, self._control, self._context, self._journal)
        reference = weakref.ref(self)

        def run(call: CollectiveCall, body: Body) -> None:
            group = reference()
            assert group is not None, "a verb of the group calls its fast path"
            group._check()
            group._run(call, body, None, False)

        def failed(
            outcome: int,
            sequence: int,
            blamed: list[int],
            interrupt: BaseException | int | None,
            seconds: float,
            later: bool,
        ) -> None:
            group = reference()
            if group is not None:
                group._fast_path_failed(outcome, sequence, blamed, interrupt, seconds, later)

        def go_on(
            rest: Callable[[RunningCollective], None],
            sequence: int,
            interrupt: BaseException | None,
            seconds: float,
            ends: float | None,
        ) -> None:
            group = reference()
            assert group is not None, "a verb of the group, or its work, calls its fast path"
            group._go_on(rest, sequence, interrupt, seconds, ends)

        self._note_told = functools.partial(_told, reference)
        self._fast_path_maker = FastPathMaker(self._recorder, self._turn, self._timeout, failed, go_on)
        self._device_path: DeviceFastPath | None = device_fast_path(backend, run)
        self._fast_path = self._device_path

    def _engine_for(self, running: RunningCollective) -> Engine:
        """The engine of this group's collectives; the first of them chooses it."""
        if self._engine is None:
            engine = choose_engine(EngineSetup(running, self._backend, self._collectives, self._context))
            self._closers.append(engine.close)
            self._use_fast_path(engine.open_fast_path(self._fast_path_maker))
            self._engine = engine
        if not has_gpu_arrays():
            return self._engine
        if self._device_engine is None:
            self._device_engine = engine_for_devices(self._engine, self._backend, self._collectives)
            self._closers.append(self._device_engine.close)
        return self._device_engine

    @property
    def _loans(self) -> Loans | None:
        return None if self._device_engine is None else self._device_engine.loans

    def _use_fast_path(self, fast_path: AnyFastPath | None) -> None:
        if fast_path is None:
            return
        if self._worker is not None:
            self._worker.hold_back(fast_path)
        if self._device_path is None:
            self._fast_path = fast_path
        else:
            self._device_path.plain = fast_path

    def _fast_path_failed(
        self,
        outcome: int,
        sequence: int,
        blamed: list[int],
        interrupt: BaseException | int | None,
        seconds: float,
        later: bool,
    ) -> None:
        """Raises the error for an operation that failed on the fast path, as the general path would.

        Args:
            sequence: The operation's number. Another thread may have begun the next one since.
            blamed: The segment's ranks that it failed because of.
            seconds: The time that it had.
            later: Whether it was asynchronous.
        """
        entry = self._journal.at(sequence)
        assert entry is not None

        def fail() -> None:
            if self._engine is not None:
                self._engine.raise_failure(outcome, blamed, interrupt)
            self._check()  # another thread has closed the group meanwhile

        guarded = self._unheard if later else self._guarded
        guarded(fail, entry, Deadline(seconds))

    def _go_on(
        self,
        rest: Callable[[RunningCollective], None],
        sequence: int,
        interrupt: BaseException | None,
        seconds: float,
        ends: float | None,
    ) -> None:
        """Runs the rest of a collective that lasts longer than the fast path waits, or that has gone wrong there.

        Args:
            sequence: The operation's number.
            interrupt: What a signal handler has raised meanwhile.
            seconds: The time that it has.
            ends: Of an asynchronous one: when that time is over, which began when it was issued.
        """
        entry = self._journal.at(sequence)
        assert entry is not None
        deadline = Deadline(seconds)
        deadline.at = entry.began + seconds if ends is None else ends

        def job() -> None:
            if interrupt is not None:
                raise interrupt
            rest(RunningCollective(entry, deadline, self._peers, entry.fingerprint))

        guarded = self._guarded if ends is None else self._unheard
        guarded(job, entry, deadline)

    def _wait_for_receivers(self) -> None:
        """Waits for others to come to what this rank did not wait for, before the group is closed."""
        if self._worker is not None:
            self._worker.stop()
        if self._engine is None or not self._turn.acquire(timeout=0):  # another thread's collective: it will be ended
            return
        try:
            self._engine.flush(min(CLOSING_WAIT, self._timeout))
        except FingerprintMismatch as mismatch:
            last = self._journal.at(self._journal.sequence)
            if last is not None:
                with contextlib.suppress(PhalanxError):  # it is raised once everything has been given back
                    self._break(self._desync(last, mismatch.peer))
                self._told = False
        finally:
            self._turn.release()

    def _run(self, call: CollectiveCall, body: Body, timeout: float | None, async_op: bool) -> Any:
        """Runs a collective: in this thread if none is under way, else behind those issued before.

        Args:
            call: What it is.
            body: What to do when it runs, in this thread or in the worker's.
        """
        deadline = self._deadline(timeout)
        if not self._turn.acquire(timeout=deadline.remaining()):
            what = call.name
            if self._turn.is_mine():
                raise UsageError(
                    f"{what} was called in the middle of another collective of this group, by the handler of a signal: "
                    "the group does one after the other (let the handler set a flag that the program looks at)"
                )
            raise Timeout(
                f"{what}: another thread's collective on this group was not done within {deadline.seconds:g} s",
                seconds=deadline.seconds,
                rank=self._world_rank,
                operation=what,
            )
        try:
            at_once = not async_op and (self._worker is None or self._worker.idle)
            worker = None if at_once else self._running_worker()
            entry = self._journal.issue(call)

            def job() -> Any:
                running = RunningCollective(entry, deadline, self._peers, entry.start())
                return body(self._engine_for(running), running)

            if worker is None:
                return self._guarded(job, entry, deadline)
            work = QueuedWork(call.name, deadline, lambda: self._unheard(job, entry, deadline), self._note_told)
            worker.add(work, at_once=True)
        finally:
            self._turn.release()
        return work if async_op else work.wait()

    def _later(self, verb: str, *arguments: Any) -> Work[Any] | None:
        """Issues an asynchronous collective on the fast path; None if that declines it.

        Args:
            arguments: Of the verb on the fast path; the last one is the timeout.
        """
        fast = self._fast_path
        if fast is None or not self._turn.acquire(timeout=0.0):
            return None
        try:
            worker = self._worker or self._running_worker()
            issued: IssuedCollective | None = getattr(fast, verb)(*arguments, True)
            if issued is None:
                return None
            return worker.take(verb, issued, self)
        finally:
            self._turn.release()

    def _running_worker(self) -> CollectiveWorker:
        """The worker; the first asynchronous collective starts it. Asked by the holder of the turn.

        Raises:
            OutOfResources: The system has no thread left. Nothing has happened.
        """
        if self._worker is None:
            with naming_limits():
                self._worker = CollectiveWorker(self._note_told)
            self._closers.insert(0, self._worker.stop)
            if self._fast_path is not None:
                self._worker.hold_back(self._fast_path)
        return self._worker

    def _unheard(self, job: Callable[[], Any], entry: Entry, deadline: Deadline) -> Any:
        """As `_guarded`, of an asynchronous one: the program hears of a failure only when it asks the `Work`."""
        told = self._told
        try:
            return self._guarded(job, entry, deadline)
        except BaseException:
            self._told = told
            raise

    def _guarded(self, job: Callable[[], Any], entry: Entry, deadline: Deadline) -> Any:
        """Runs a job of the engine, and makes the caller's error of however it fails."""
        failed = True
        try:
            result = job()
            failed = False
            return result
        except UsageError:
            raise  # found by all ranks alike, or when the others had what they waited for: the group can go on
        except DeadlinePassed as passed:
            self._give_up(entry, deadline, passed.waiting)
        except FingerprintMismatch as mismatch:
            self._break(self._desync(entry, mismatch.peer))
        except Timeout as error:  # a member did not even answer when it was called
            silent = [rank for rank, name in enumerate(self.members) if name in error.missing]
            self._give_up(entry, deadline, silent)
        except PhalanxError as error:
            if self._health.cause is None:
                self._break(self._lost(error, entry))
            self._told = True
            raise copy_for_raise(self._health.cause, f"{entry.name} at {entry.site}", self._world_rank) from None
        except BaseException as interrupt:  # Ctrl-C, no memory, whatever a signal handler raises
            limit = out_of_resources(interrupt)
            if limit is not None:
                self._break(self._lost(limit, entry))
            # The others are in the middle of it: the group cannot go on. Whether the interrupt ends this program or is
            # caught by it, they hear the same.
            words = f"it raised {type(interrupt).__name__} in {entry.name}"
            reason = PeerLost(self._world_rank, words, rank=self._world_rank, remote_traceback=user_stack(interrupt))
            self._health.fail(reason)
            self._control.break_group(self._context, reason)
            raise
        finally:
            entry.end(failed=failed)

    def _give_up(self, entry: Entry, deadline: Deadline, waiting: list[int]) -> NoReturn:
        """Raises the error for a collective whose deadline has passed.

        The lane ends before the others are asked what they do: a rank that comes meanwhile must not succeed.
        """
        in_brief = Timeout(f"{entry.name} at {entry.site}: not done within {deadline.seconds:g} s")
        self._collectives.fail(in_brief)
        self._break(self._timed_out(entry.name, entry.site, deadline, waiting, entry.sequence))

    def _lost(self, error: PhalanxError, entry: Entry) -> PhalanxError:
        """A member that closed the group on purpose breaks a collective as much as one that died."""
        if isinstance(error, ChannelClosed):
            return ChannelClosed(error.peer if error.peer is not None else -1, f"{error.reason}, before {entry.name}")
        if isinstance(error, PeerLost):
            return error
        error.operation = error.operation or entry.name
        return error

    def _where_they_parted(self, entry: Entry, name: int) -> tuple[Entry, OperationStatus | None]:
        """The first of the last operations that this rank and another have under one number, but not alike."""
        found: tuple[Entry, OperationStatus | None] = (entry, None)
        number = entry.sequence
        patience = Deadline(_ANSWER_WAIT)
        while number > max(0, entry.sequence - _LOOK_BACK):
            known = self._control.statuses(self._context, number)
            status = known.replies.get(name)
            if name in known.silent and not patience.expired:
                continue  # it was in its operation just now: its machine is busy
            if status is not None and status.sequence < number:
                number = status.sequence  # it has not got so far: ask what it had there
                continue
            mine = self._journal.at(number)
            if status is None or mine is None:
                break
            if self._journal.contradicts(status):
                found = (mine, status)
            elif found[1] is not None:
                break  # up to here they were together
            number -= 1
        return found

    def _desync(self, entry: Entry, peer: int) -> Desync:
        name = self.members[peer]
        entry, status = self._where_they_parted(entry, name)
        mine = f"{entry.full_name} at {entry.site}"
        theirs = (
            f"{status.operation} at {status.site}" if status is not None and status.operation else "another operation"
        )
        alike = status is not None and status.operation.partition(" of ")[0] == entry.name
        gathers = entry.name.startswith(("all_gather #", "gather(dst"))
        ragged = _RAGGED if alike and gathers else ""
        return Desync(
            f"rank {self._world_rank} called {mine}, but rank {name} called {theirs}. All ranks of a group must call "
            f"the same operations, with the same shapes, dtypes, roots and reductions, in the same order{ragged}",
            mine=mine,
            theirs=theirs,
            rank=self._world_rank,
            peer=name,
            operation=entry.name,
        )


def _told(group: weakref.ref[CollectiveRunner]) -> None:
    """Notes that the program has been given the error of an asynchronous operation."""
    found = group()
    if found is not None:
        found._told = True


_RAGGED = ' (arrays of different lengths along dim 0: counts="auto" gathers them)'
CLOSING_WAIT = 1.0
"""Seconds that closing a group waits for others to come to this rank's last broadcast."""
_ANSWER_WAIT = 5.0
"""Seconds in which a member that is in another operation is asked again, if it does not say in which."""
_LOOK_BACK = 16
"""The most operations that a rank may have run ahead before it notices that it is alone."""
