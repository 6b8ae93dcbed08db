"""Runs a schedule over a lane: the sends and receives of a step together, the steps in order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._native import reduce_into
from ..algorithms.schedule import Schedule, Step
from ..backends.lane import Lane
from ..deadline import Deadline
from ..transports.mailbox import Envelope, Operation, Receive, Sink
from ..wire.frames import Kind
from .arrays import memory_of

__all__ = ["DeadlinePassed", "FingerprintMismatch", "fingerprint", "run"]


Chunks = Sequence[npt.NDArray[Any]] | Mapping[int, npt.NDArray[Any]]

SUSPICIOUS = 0.5
"""Seconds without the end of a step after which a rank asks what the others are doing.

Later it asks less and less often.
"""


class DeadlinePassed(Exception):
    """The schedule could not be finished in time; `waiting` are the ranks of the group that are still to send."""

    def __init__(self, waiting: list[int]) -> None:
        super().__init__()
        self.waiting = waiting


class FingerprintMismatch(Exception):
    """A member is in another operation; `peer` is its rank in the group."""

    def __init__(self, peer: int) -> None:
        super().__init__()
        self.peer = peer


def fingerprint(operation: str, sequence: int, dtype: str, count: int, reduction: str, root: int) -> int:
    """64 bits that say which operation this is."""
    text = f"{operation}|{sequence}|{dtype}|{count}|{reduction}|{root}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class _StepSink(Sink):
    """Takes one transfer of the expected operation and size; anything else is a mismatch."""

    def __init__(self, target: memoryview, mark: int) -> None:
        self._target = target
        self._mark = mark

    def open(self, envelope: Envelope) -> memoryview:
        if envelope.tag != self._mark or envelope.kind is not Kind.STEP or envelope.size != len(self._target):
            raise FingerprintMismatch(envelope.src)
        return self._target


def run(
    schedule: Schedule,
    lane: Lane,
    chunks: Chunks,
    mark: int,
    deadline: Deadline,
    *,
    dtype: str | None = None,
    op: str = "",
    look_around: Callable[[], None],
) -> None:
    """Executes a rank's part of a collective.

    Args:
        chunks: The memory of each chunk that this rank's part names: flat and contiguous.
        mark: The operation's fingerprint, which every transfer carries.
        dtype: The name of the elements' type, where the buffer cannot say it (bfloat16).
        op: The reduction.
        look_around: Called when a step takes suspiciously long; raises if it can never be done.

    Raises:
        DeadlinePassed, FingerprintMismatch: See there.
        PhalanxError: As the lane fails.
    """
    for step in schedule.steps:
        _run_step(step, lane, chunks, mark, deadline, dtype, op, look_around)


def _run_step(
    step: Step,
    lane: Lane,
    chunks: Chunks,
    mark: int,
    deadline: Deadline,
    dtype: str | None,
    op: str,
    look_around: Callable[[], None],
) -> None:
    receives: list[Receive] = []
    reductions: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    for transfer in step.recvs:
        target = chunks[transfer.chunk]
        if transfer.reduce:
            incoming = np.empty_like(target)
            reductions.append((target, incoming))
            target = incoming
        receives.append(lane.post(transfer.peer, None, _StepSink(memory_of(target), mark)))
    operations: list[Operation] = list(receives)
    for send in step.sends:
        payload = [memory_of(chunks[send.chunk])]
        operations.append(lane.start_send(send.peer, Kind.STEP, mark, b"", payload, deadline))
    finished = _wait(lane, operations, deadline, look_around)
    for operation in operations:
        if operation.error is not None:
            if isinstance(operation.error, FingerprintMismatch) and isinstance(operation, Receive):
                assert operation.envelope is not None
                raise FingerprintMismatch(lane.source_of(operation.envelope))
            raise operation.error
    if not finished:
        waiting = [t.peer for t, r in zip(step.recvs, receives, strict=True) if not r.done]
        raise DeadlinePassed(waiting or [send.peer for send in step.sends])
    for target, incoming in reductions:
        reduce_into(target, incoming, op, dtype=dtype)


def _wait(lane: Lane, operations: list[Operation], deadline: Deadline, look_around: Callable[[], None]) -> bool:
    pause = SUSPICIOUS
    while not lane.wait(operations, deadline.sooner(pause)):
        if deadline.expired:
            return False
        look_around()
        pause *= 2
    return True
