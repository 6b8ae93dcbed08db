"""Schedules that the core runs: all steps of a collective with hardly any Python in between.

The core moves what can be moved and never waits; waiting, deadlines and errors stay here. It needs plain TCP channels
that are all connected and at rest. Where they are not, or there is no core, `run` does the same in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...._native import core, dtype_code, op_code
from ....algorithms.schedule import Schedule
from ....transports.channel import Inbound, Outbound
from ....transports.direct import can_receive, can_send, give_back, inbound_over, outbound_over
from ....transports.stream import ended_with
from ...outcomes import FingerprintMismatch
from .transfers import Array, Job, StepSink, memory

if TYPE_CHECKING:
    from ...._core import Plan, StepsRun

__all__ = ["FastRun", "Prepared", "prepare", "start"]

DONE, BLOCKED, MORE, INBOUND_ENDED, OUTBOUND_ENDED, REFUSED, HUNG_UP = range(7)
KEPT = 256
"""Plans that are kept."""


class Prepared:
    """A schedule as the core knows it, and which peers and chunks its numbers mean."""

    __slots__ = ("chunks", "plan", "reads", "schedule", "writes")

    def __init__(self, schedule: Schedule) -> None:
        assert core is not None
        self.schedule = schedule
        self.writes: list[int] = []
        self.reads: list[int] = []
        self.chunks: list[int] = []
        numbers: list[int] = []
        for step in schedule.steps:
            numbers += (len(step.sends), len(step.recvs))
            for send in step.sends:
                numbers += (_place(self.writes, send.peer), _place(self.chunks, send.chunk))
            for recv in step.recvs:
                flags = recv.reduce + 2 * recv.before + 4 * recv.late
                numbers += (_place(self.reads, recv.peer), _place(self.chunks, recv.chunk), flags)
        self.plan: Plan = core.Plan(numbers)


_prepared: dict[int, Prepared] = {}
"""By the identity of the schedule, which each holds: schedules are made once, and comparing them takes longer."""


def prepare(schedule: Schedule) -> Prepared:
    """The schedule as the core knows it."""
    found = _prepared.get(id(schedule))
    if found is None:
        if len(_prepared) >= KEPT:
            _prepared.clear()
        found = _prepared[id(schedule)] = Prepared(schedule)
    return found


def _place(known: list[int], number: int) -> int:
    if number not in known:
        known.append(number)
    return known.index(number)


def start(schedule: Schedule, job: Job) -> FastRun | None:
    """The schedule under way, or None if it has to be run in Python.

    Raises:
        PhalanxError: A rank cannot be reached.
    """
    if core is None or not hasattr(core, "StepsRun"):
        return None
    prepared = prepare(schedule)
    lane = job.lane
    outbound: list[Outbound] = []
    for peer in prepared.writes:
        sender = lane.outbound(peer, job.deadline)
        if not sender.stream.plain or not can_send(sender):
            return None
        outbound.append(sender)
    inbound: list[Inbound] = []
    for peer in prepared.reads:
        channel = next(iter(lane.inbound(peer)), None)
        if channel is None or not channel.stream.plain or not can_receive(channel):
            return None
        inbound.append(channel)
    return FastRun(prepared, job, outbound, inbound, _new_run(prepared, job, outbound, inbound))


def _new_run(prepared: Prepared, job: Job, outbound: Sequence[Outbound], inbound: Sequence[Inbound]) -> StepsRun:
    assert core is not None
    chunks = [job.chunks[chunk] for chunk in prepared.chunks]
    sources = [job.sources.get(chunk) for chunk in prepared.chunks] if job.sources else [None] * len(chunks)
    dtype = op = -1
    if job.op:
        dtype, op = dtype_code(job.dtype or chunks[0].dtype), op_code(job.op)
    made: StepsRun = core.StepsRun(
        prepared.plan,
        [_plain(chunk) for chunk in chunks],
        sources,
        [channel.stream.fd for channel in outbound],
        [channel.stream.fd for channel in inbound],
        job.fingerprint,
        dtype,
        op,
        job.lane.wait_policy,
    )
    return made


class FastRun:
    """A schedule that the core runs."""

    __slots__ = ("_enter", "_inbound", "_job", "_leave", "_outbound", "_prepared", "_run")

    def __init__(
        self,
        prepared: Prepared,
        job: Job,
        outbound: Sequence[Outbound],
        inbound: Sequence[Inbound],
        run: StepsRun,
    ) -> None:
        self._prepared = prepared
        self._job = job
        self._outbound = outbound
        self._inbound = inbound
        self._run = run
        locks = [sender.lock for sender in outbound] + [channel.lock for channel in inbound]
        # By hand: a stack of contexts would take longer than all the rest of a short collective.
        self._enter = [lock.__enter__ for lock in locks]
        self._leave = [lock.__exit__ for lock in locks]

    def move(self, piece: int) -> int:
        """Moves what goes now: `DONE`, `BLOCKED` if nothing has for a while, or `MORE`.

        `HUNG_UP` if all is done, but a rank has closed its connection since.

        Raises:
            FingerprintMismatch: A rank is in another operation.
            PhalanxError: As the lane fails.
        """
        run = self._run
        for enter in self._enter:
            enter()
        try:
            if self._job.lane.error is not None:  # then the descriptors may be another's by now
                raise self._job.lane.error
            for sender in self._outbound:
                sender.halfway = True
            outcome = run.move(piece)
            for number, sender in enumerate(self._outbound):
                sender.halfway = run.halfway(number)
        finally:
            for leave in self._leave:
                leave(None, None, None)
        self.check(outcome)
        return outcome

    def check(self, outcome: int) -> None:
        """Raises the error for an outcome that the core cannot go on from."""
        if MORE < outcome < HUNG_UP:
            self._fail(outcome)

    def polled(self) -> list[tuple[int, int]]:
        """The descriptors and events to wait for when nothing can be moved."""
        reads = [c.stream for i, c in enumerate(self._inbound) if self._run.receives_from(i)]
        writes = [c.stream for i, c in enumerate(self._outbound) if self._run.sends_to(i)]
        return [(s.fd, s.read_events) for s in reads] + [(s.fd, s.write_events) for s in writes]

    def waiting(self) -> list[int]:
        """The ranks that are still to send; without any, those that are still to receive."""
        reads = [peer for i, peer in enumerate(self._prepared.reads) if self._run.receives_from(i)]
        return reads or [peer for i, peer in enumerate(self._prepared.writes) if self._run.sends_to(i)]

    def _fail(self, outcome: int) -> None:
        where = self._run.where
        if outcome == OUTBOUND_ENDED:
            raise outbound_over(self._outbound[where], ended_with(self._run.error))
        if outcome == INBOUND_ENDED:
            raise inbound_over(self._inbound[where], ended_with(self._run.error))
        # An unexpected frame: the channel knows what it means.
        job, channel = self._job, self._inbound[where]
        with channel.lock:
            give_back(channel, self._run.refused())
        posted = job.lane.post(
            self._prepared.reads[where], None, StepSink(memory(np.empty(0, np.uint8)), job.fingerprint)
        )
        while not job.lane.wait([posted], job.deadline):
            if job.deadline.expired:
                break
        if posted.error is None or isinstance(posted.error, FingerprintMismatch):
            raise FingerprintMismatch(self._prepared.reads[where])
        raise posted.error


def _plain(chunk: Array) -> Array:
    """The chunk as the buffer protocol can show it."""
    return chunk if chunk.dtype.kind in "biufc" else chunk.view(np.uint8)
