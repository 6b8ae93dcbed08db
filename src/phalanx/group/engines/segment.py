"""Collectives inside a segment: one call into the core for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..._native import dtype_code, op_code
from ...backends.lane import Lane
from ...errors import ChannelClosed, PhalanxError
from ..data.arrays import memory_of
from ..data.reduction import Reduction
from ..fast_path import AnyFastPath, FastPathMaker
from ..outcomes import DeadlinePassed, FingerprintMismatch
from ..running_collective import RunningCollective
from ..tracking.fingerprint import kind_of
from . import segment_setup
from .base import Engine, EngineSetup, Flat, Parts, Receive

if TYPE_CHECKING:
    from ..._core import DeviceCollectives, FastPath, Segment

__all__ = ["SegmentEngine", "raise_outcome", "start"]

DONE, TIMED_OUT, _ABORTED, _INTERRUPTED, MISMATCH, LEFT, BROKEN = range(7)  # Outcome in cpp/phalanx/waiting.hpp

CAUSE_WAIT = 2.0
"""Seconds that a rank waits for the reason of another that gave up, which may have to ask around first."""


def raise_outcome(outcome: int, blamed: Sequence[int], members: Sequence[int], lane: Lane) -> NoReturn:
    """Raises the error for an operation in a segment that failed.

    Args:
        blamed: The segment's ranks that caused the failure; see `Segment.blamed`.
        members: The group's rank of each of the segment's.
        lane: What was aborted, if the operation was.
    """
    ranks = [members[rank] for rank in blamed]
    if outcome == TIMED_OUT:
        raise DeadlinePassed(ranks)
    if outcome == MISMATCH:
        raise FingerprintMismatch(ranks[0])
    if outcome == LEFT:
        raise ChannelClosed(lane.members[ranks[0]], "it has closed this group")
    if outcome == BROKEN:
        name = lane.members[ranks[0]]
        raise lane.await_error(CAUSE_WAIT) or PhalanxError(
            f"rank {name} gave up this operation before rank {lane.members[lane.rank]} joined it, and has not said why",
            peer=name,
        )
    raise lane.error or PhalanxError(f"the shared memory of this group was abandoned (outcome {outcome})")


def start(setup: EngineSetup) -> Engine | None:
    """The engine of a group whose members all share memory; None if they could not.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
    """
    (members,) = segment_setup.memory_groups(setup.backend)
    _, segment = segment_setup.open_segment(setup, members, heap=setup.backend.options.segment_heap)
    if segment is None:
        return None
    segment_setup.end_with_lane(segment, setup.lane)
    return SegmentEngine(segment, setup.lane.rank, members, setup.lane)


class SegmentEngine(Engine):
    """The members' shared memory.

    Args:
        members: The group's rank of each of the segment's, in order; `rank` is among them.
        lane: The group's, whose end is the segment's.
    """

    takes_parts = True

    def __init__(self, segment: Segment, rank: int, members: Sequence[int], lane: Lane) -> None:
        super().__init__(list(members).index(rank), len(members))
        self.segment: Segment = segment
        self._members = tuple(members)
        self._lane = lane
        self._fast_path: FastPath | None = None

    def _do(self, running: RunningCollective, operation: Callable[..., int], *arguments: Any) -> None:
        self._check(operation(*arguments, running.fingerprint, running.deadline.at))

    def _check(self, outcome: int) -> None:
        if outcome != DONE:
            raise_outcome(outcome, self.segment.blamed(outcome), self._members, self._lane)

    def _how(self, flat: Flat, reduction: Reduction) -> tuple[int, int, int]:
        divisor = self.size if reduction.name == "mean" else 1
        return dtype_code(reduction.dtype or flat.dtype), op_code(reduction.step), divisor

    def open_fast_path(self, maker: FastPathMaker) -> AnyFastPath | None:
        self._fast_path = maker.make(self.segment)
        return self._fast_path

    def use_device(self, device: DeviceCollectives | None) -> None:
        """Lets the fast path take arrays on a GPU, once all members have agreed on how they share it."""
        if self._fast_path is not None:
            self._fast_path.device = device

    def raise_failure(self, outcome: int, blamed: Sequence[int], interrupt: BaseException | int | None) -> NoReturn:
        if isinstance(interrupt, BaseException):
            raise interrupt
        raise_outcome(outcome, blamed, self._members, self._lane)

    def flush(self, seconds: float) -> None:
        """Waits until everybody has come to the last operation in which this rank has not waited for them.

        If another rank takes itself for the root, that rank finds it out, and the lane hears it.
        """
        outcome = self.segment.flush(time.monotonic() + seconds)
        if outcome == MISMATCH:
            raise FingerprintMismatch(self._members[self.segment.blamed(outcome)[0]])
        if outcome == BROKEN:
            self._lane.await_error(CAUSE_WAIT)

    def barrier(self, running: RunningCollective) -> None:
        self._do(running, self.segment.barrier)

    def broadcast(self, running: RunningCollective, flat: Flat, src: int) -> None:
        self._do(running, self.segment.broadcast, memory_of(flat), src)

    def all_reduce(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        self._do(running, self.segment.all_reduce, memory_of(flat), *self._how(flat, reduction))

    def reduce(self, running: RunningCollective, flat: Flat, dst: int, reduction: Reduction) -> None:
        self._do(running, self.segment.reduce, memory_of(flat), dst, *self._how(flat, reduction))

    def reduce_scatter(self, running: RunningCollective, source: Flat, target: Flat, reduction: Reduction) -> None:
        how = self._how(source, reduction)
        self._do(running, self.segment.reduce_scatter, memory_of(source), memory_of(target), *how)

    def all_gather(self, running: RunningCollective, source: Flat, target: Flat, counts: Sequence[int]) -> None:
        sizes = [count * source.itemsize for count in counts]
        self._do(running, self.segment.all_gather, memory_of(source), memory_of(target), sizes)

    def gather(
        self, running: RunningCollective, source: Flat, target: Flat | None, dst: int, counts: Sequence[int]
    ) -> None:
        sizes = [count * source.itemsize for count in counts]
        everything = None if target is None else memory_of(target)
        self._do(running, self.segment.gather, memory_of(source), everything, sizes, dst)

    def scatter(
        self, running: RunningCollective, source: Flat | None, target: Flat, src: int, counts: Sequence[int]
    ) -> None:
        sizes = [count * target.itemsize for count in counts]
        everything = None if source is None else memory_of(source)
        self._do(running, self.segment.scatter, everything, memory_of(target), sizes, src)

    def scatter_equal(self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive) -> None:
        if self.scatter_and_ask(running, parts, src, receive, asks=False):
            self.tell_all(running, bytes(1))

    def scatter_and_ask(
        self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive, *, asks: bool
    ) -> bool:
        """As `scatter_equal`. True if the root asks whether each rank could take its part on a GPU.

        Then each answers, by `tell_all`.

        Args:
            asks: On the root.
        """
        if parts is None:
            source, kind, words = None, 0, b""
        else:
            source, kind, words = memory_of(parts.flat), kind_of("scatter", parts.dtype, ""), parts.description
        fingerprint, deadline = running.fingerprint, running.deadline.at
        outcome, told, asked = self.segment.tell_parts(source, kind, words, src, asks, fingerprint, deadline)
        self._check(outcome)
        self._do(running, self.segment.take_part, source, memory_of(receive(told)))
        return asked

    def tell_all(self, running: RunningCollective, word: bytes) -> list[bytes]:
        """The words of all ranks, which have one length."""
        words = np.zeros(self.size * len(word), np.uint8)
        self.all_gather(running, np.frombuffer(word, np.uint8), words, [len(word)] * self.size)
        return [words[at : at + len(word)].tobytes() for at in range(0, words.size, len(word))]

    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        matrix = (sizes * source.itemsize).reshape(-1).tolist()
        self._do(running, self.segment.all_to_all, memory_of(source), memory_of(target), matrix)
