"""Runs a schedule over a lane: the sends and receives of a step together, the steps in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ....algorithms.schedule import Recv, Schedule, Send, Step
from ....backends.lane import Lane
from ....backends.polling import sleep
from ....deadline import Deadline
from ....transports.direct import LONG_PIECE, PIECE
from ...outcomes import DeadlinePassed
from . import fast_path
from .transfers import Array, Chunks, Flow, Inflow, Job, outflow

__all__ = ["Chunks", "go_on", "piece_of", "run"]

_T = TypeVar("_T", Send, Recv)

SUSPICIOUS = 0.5
"""Seconds without the end of a step after which a rank asks what the others are doing.

Later it asks less and less often.
"""
LOOKS = 20
"""Looks at the channels before a rank sleeps, where every rank has a core of its own: to be woken takes longer."""
LOOKS_OVERSUBSCRIBED = 2


def run(
    schedule: Schedule,
    lane: Lane,
    chunks: Chunks,
    fingerprint: int,
    deadline: Deadline,
    *,
    dtype: str | None = None,
    op: str = "",
    sources: Mapping[int, Array] | None = None,
    check_peers: Callable[[], None],
) -> None:
    """Executes a rank's part of a collective.

    Args:
        chunks: The memory of each chunk that this rank's part names: flat and contiguous.
        fingerprint: The operation's fingerprint, which every transfer carries.
        dtype: The name of the elements' type, where the buffer cannot say it (bfloat16).
        op: The reduction.
        sources: Where chunks lie at first that must stay as they are: what is received goes to `chunks`.
        check_peers: Called when a step takes suspiciously long; raises if it can never be done.

    Raises:
        DeadlinePassed, FingerprintMismatch: See there.
        PhalanxError: As the lane fails; also if all is done here, but another rank has given the operation up.
    """
    if not schedule.steps:  # a rank that is alone
        return
    job = Job(lane, chunks, fingerprint, deadline, dtype, op, sources, check_peers)
    try:
        fast = fast_path.start(schedule, job) if lane.direct else None
        if fast is not None:
            _run_fast(fast, job)
            return
        for step in schedule.steps:
            _run_step(step, job)
        lane.check_members()
    finally:
        job.end()


def go_on(
    fast_run: Callable[[Job], fast_path.FastRun],
    outcome: int,
    lane: Lane,
    fingerprint: int,
    deadline: Deadline,
    *,
    check_peers: Callable[[], None],
) -> None:
    """Finishes a collective that the core's fast path has begun.

    Args:
        fast_run: Makes its steps, where they stand, a part of the job.
        outcome: Why the fast path did not finish it; see `fast_path`.
        check_peers: As of `run`.

    Raises:
        As `run`.
    """
    job = Job(lane, (), fingerprint, deadline, None, "", None, check_peers)
    try:
        fast = fast_run(job)
        fast.check(outcome)
        if outcome == fast_path.HUNG_UP:
            lane.check_members()
        else:
            _run_fast(fast, job)
    finally:
        job.end()


def piece_of(lane: Lane) -> int:
    """Bytes that the core moves at once: where ranks share a core, more, so that they take turns less often."""
    return LONG_PIECE if lane.oversubscribed else PIECE


def _run_fast(fast: fast_path.FastRun, job: Job) -> None:
    patience = _Patience(job)
    piece = piece_of(job.lane)
    while True:
        if job.waker is not None:
            job.waker.clear()
        outcome = fast.move(piece)
        if outcome == fast_path.DONE:
            return
        if outcome == fast_path.HUNG_UP:
            job.lane.check_members()
            return
        if outcome == fast_path.BLOCKED:
            patience.sleep(fast.polled, fast.waiting)
        elif job.deadline.expired:
            raise DeadlinePassed(fast.waiting())


def _run_step(step: Step, job: Job) -> None:
    lane = job.lane
    if lane.error is not None:
        raise lane.error
    late: list[tuple[Recv, Array]] = []
    piece = PIECE if step.sends and step.recvs else LONG_PIECE
    receiving: list[Inflow] = []
    pending: list[Flow] = []
    try:
        if not lane.direct:  # announced first, so that what comes meanwhile goes straight to its place
            receiving = [Inflow(job, recv.peer, (recv,), late) for recv in step.recvs]
        for peer, sends in _by_peer(step.sends):
            flow = outflow(job, peer, sends)
            flow.move(piece)
            if not flow.done:
                pending.append(flow)
        if lane.direct:
            receiving = [Inflow(job, peer, recvs, late) for peer, recvs in _by_peer(step.recvs)]
        pending += receiving
        _move_all(pending, job, piece)
    except BaseException:
        for inflow in receiving:  # another thread may be in the middle of writing to their memory
            inflow.withdraw()
        raise
    for transfer, received in late:
        job.finish(transfer, received)


def _move_all(pending: list[Flow], job: Job, piece: int) -> None:
    patience: _Patience | None = None
    while pending:
        if job.waker is not None:
            job.waker.clear()
        moved = finished = False
        for flow in pending:
            moved |= flow.move(piece)
            finished |= flow.done
        if finished:
            pending = [flow for flow in pending if not flow.done]
        elif moved:
            if job.deadline.expired:
                raise DeadlinePassed(_waiting(pending))
            if patience is not None:
                patience.looks = 0
        else:
            patience = patience or _Patience(job)
            patience.wait(pending)


class _Patience:
    """The waits of a step: it looks again a few times, then it sleeps, and now and then it asks what the others do."""

    __slots__ = ("_asks_at", "_enough", "_job", "_pause", "looks")

    def __init__(self, job: Job) -> None:
        self._job = job
        self.looks = 0
        self._enough = LOOKS_OVERSUBSCRIBED if job.lane.oversubscribed else LOOKS
        self._pause = SUSPICIOUS
        self._asks_at = 0.0

    def wait(self, pending: Sequence[Flow]) -> None:
        """Nothing could be moved: returns when it is time to look again.

        Raises:
            DeadlinePassed: It is too late.
            PhalanxError: The lane has failed.
        """
        if not self._job.lane.direct:
            self._wait_for_messages(pending)
            return
        self.looks += 1
        if self.looks >= self._enough:
            self.sleep(lambda: [wanted for flow in pending for wanted in flow.polled()], lambda: _waiting(pending))

    def _wait_for_messages(self, pending: Sequence[Flow]) -> None:
        """The same on a lane that moves its messages itself."""
        job = self._job
        operations = [operation for flow in pending for operation in flow.operations]
        if not job.lane.wait(operations, job.deadline.sooner(self._pause)):
            if job.deadline.expired:
                raise DeadlinePassed(_waiting(pending))
            job.check_peers()
            self._pause *= 2

    def sleep(self, polled: Callable[[], list[tuple[int, int]]], waiting: Callable[[], list[int]]) -> None:
        """Sleeps until something can be moved, or it is time to look for another reason.

        Args:
            polled: Gives the descriptors and events to wait for.
            waiting: Gives the ranks that are waited for.

        Raises:
            As `wait`.
        """
        job = self._job
        if job.lane.error is not None:
            raise job.lane.error
        if job.waker is None:  # what happened before it could be woken must be seen first
            job.wake_up()
            return
        if job.deadline.expired:
            raise DeadlinePassed(waiting())
        self._asks_at = self._asks_at or time.monotonic() + self._pause
        left = self._asks_at - time.monotonic()
        if left <= 0:
            job.check_peers()
            self._pause *= 2
            self._asks_at = time.monotonic() + self._pause
            left = self._pause
        sleep(job.waker, polled(), job.deadline.sooner(left))


def _by_peer(transfers: Sequence[_T]) -> Iterable[tuple[int, Sequence[_T]]]:
    """The transfers of each rank, in their order."""
    if len(transfers) == 1:  # as in most steps
        return ((transfers[0].peer, transfers),)
    found: dict[int, list[_T]] = {}
    for transfer in transfers:
        found.setdefault(transfer.peer, []).append(transfer)
    return found.items()


def _waiting(pending: Sequence[Flow]) -> list[int]:
    receiving = [flow.peer for flow in pending if isinstance(flow, Inflow)]
    return receiving or [flow.peer for flow in pending]
