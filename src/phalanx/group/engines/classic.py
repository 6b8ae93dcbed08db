"""Collectives among ferrotorch's ranks: plain messages of the classic wire, with neither header nor fingerprint.

Most go through rank 0, as in ferrotorch's `collective` module. On the mesh, `Options(algorithm="ring")` chooses those
of its `GlooBackend` instead: a ring for `all_reduce` and a tree for `broadcast`. Both sides must choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..._native import reduce_into
from ...algorithms import chunk_bounds
from ...backends.base import LaneBackend
from ...backends.lane import Lane
from ...config.algorithms import parse_algorithms
from ...errors import ConfigError, SizeMismatch, UnsupportedOp
from ...transports.mailbox import BufferSink, PendingTransfer
from ...wire.classic.frames import BARRIER
from ...wire.frames import FrameKind
from ..data.arrays import memory_of
from ..data.reduction import Reduction
from ..outcomes import DeadlinePassed, FingerprintMismatch
from ..running_collective import RunningCollective
from .base import Engine, EngineSetup, Flat, split

__all__ = ["ClassicEngine", "start"]

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


def start(setup: EngineSetup) -> Engine:
    """The engine of a group with ferrotorch's ranks.

    Raises:
        ConfigError: As `ClassicEngine`.
    """
    return ClassicEngine(setup.lane, setup.backend)


class ClassicEngine(Engine):
    """Sends and receives as ferrotorch does, in its order.

    Args:
        lane: The group's lane, which is the backend's own stream.

    Raises:
        ConfigError: The ring was asked for on the star.
    """

    exchanges_counts = False

    def __init__(self, lane: Lane, backend: LaneBackend) -> None:
        super().__init__(lane.rank, lane.size)
        self._lane = lane
        self._barrier = backend.barrier_messages()
        self._is_star = backend.topology == "star"
        self._ring = parse_algorithms(backend.options.algorithm or "").get("all_reduce") == "ring"
        if self._ring and self._is_star:
            raise ConfigError("algorithm='ring' needs connections that the star does not have (use the classic mesh)")

    # -- messages ------------------------------------------------------------------------------------------------------

    def _move(
        self,
        running: RunningCollective,
        *,
        to: int | None = None,
        data: Flat | None = None,
        source: int | None = None,
        into: Flat | None = None,
    ) -> None:
        """Sends `data` to a rank, receives `into` from one, or does both at the same time."""
        operations: list[PendingTransfer] = []
        try:
            if to is not None and data is not None:
                operations.append(self._lane.start_send(to, FrameKind.RAW, 0, b"", [memory_of(data)], running.deadline))
            if source is not None and into is not None:
                operations.append(self._lane.post(source, 0, BufferSink(memory_of(into))))
            done = self._lane.wait(operations, running.deadline)
        finally:  # also after Ctrl-C: nothing may be written to the caller's memory later
            for operation in operations:
                self._lane.withdraw(operation)
        for operation in operations:
            if isinstance(operation.error, SizeMismatch):
                assert source is not None
                raise FingerprintMismatch(source)
            if operation.error is not None:
                raise operation.error
        if not done:
            raise DeadlinePassed([rank for rank in (source, to) if rank is not None][:1])

    def _send(self, running: RunningCollective, dst: int, data: Flat) -> None:
        if data.size:  # ferrotorch sends nothing for an array without elements
            self._move(running, to=dst, data=data)

    def _recv(self, running: RunningCollective, src: int, into: Flat) -> None:
        if into.size:
            self._move(running, source=src, into=into)

    def _refuse(self, running: RunningCollective, why: str = "") -> NoReturn:
        raise UnsupportedOp(
            f"{running.name}: {why or 'ferrotorch has no such operation'} (it has all_reduce and reduce_scatter "
            "with sum and mean, broadcast, all_gather, all_to_all and barrier, on float32 and float64)"
        )

    def _check(self, running: RunningCollective, flat: Flat, reduction: Reduction | None = None) -> None:
        if flat.dtype not in _DTYPES:
            self._refuse(running, f"{flat.dtype} does not go over ferrotorch's wire")
        if reduction is not None and reduction.name not in ("sum", "mean"):
            self._refuse(running, f"ferrotorch has no op={reduction.name!r}")

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, running: RunningCollective) -> None:
        word = np.frombuffer(BARRIER, np.uint8)
        for peer, sends in self._barrier:
            if sends:
                self._send(running, peer, word)
            else:
                self._recv(running, peer, np.empty_like(word))

    def broadcast(self, running: RunningCollective, flat: Flat, src: int) -> None:
        self._check(running, flat)
        if self._ring:
            self._broadcast_by_tree(running, flat, src)
            return
        if self._is_star and src != 0 and self.size > 2:
            self._refuse(running, "the star connects rank 0 only with the others, so only it can broadcast")
        if self.rank != src:
            self._recv(running, src, flat)
            return
        for peer in self._others(src):
            self._send(running, peer, flat)

    def _broadcast_by_tree(self, running: RunningCollective, flat: Flat, src: int) -> None:
        if flat.dtype != np.float32:
            self._refuse(running, "ferrotorch's tree takes float32 only")
        place = (self.rank - src) % self.size
        if place:
            self._recv(running, ((place - 1) // 2 + src) % self.size, flat)
        for child in (2 * place + 1, 2 * place + 2):
            if child < self.size:
                self._send(running, (child + src) % self.size, flat)

    def all_reduce(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        self._check(running, flat, reduction)
        if self._ring:
            self._all_reduce_by_ring(running, flat)
            reduction.finish(flat, self.size)
            return
        self._reduce_on_first(running, flat, reduction)
        if self.rank:
            self._recv(running, 0, flat)
            return
        for peer in self._others(0):
            self._send(running, peer, flat)

    def _reduce_on_first(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        """The reduction of all on rank 0, in the order of ranks; elsewhere `flat` stays as it is."""
        if self.rank:
            self._send(running, 0, flat)
            return
        other = np.empty_like(flat)
        for peer in self._others(0):
            self._recv(running, peer, other)
            reduce_into(flat, other, reduction.step)
        reduction.finish(flat, self.size)

    def _all_reduce_by_ring(self, running: RunningCollective, flat: Flat) -> None:
        if flat.dtype != np.float32:
            self._refuse(running, "ferrotorch's ring takes float32 only")
        if self.size == 1 or not flat.size:
            return
        rank, size = self.rank, self.size
        parts = [flat[start:stop] for start, stop in chunk_bounds(flat.size, size)]
        onward, before = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            mine = parts[(rank - step - 1) % size]
            other = np.empty_like(mine)
            self._move(running, to=onward, data=parts[(rank - step) % size], source=before, into=other)
            reduce_into(mine, other, "sum")
        for step in range(size - 1):
            sent, received = parts[(rank - step + 1) % size], parts[(rank - step) % size]
            self._move(running, to=onward, data=sent, source=before, into=received)

    def reduce_scatter(self, running: RunningCollective, source: Flat, target: Flat, reduction: Reduction) -> None:
        self._check(running, source, reduction)
        total = source.copy() if self.rank == 0 else source
        self._reduce_on_first(running, total, reduction)
        if self.rank:
            self._recv(running, 0, target)
            return
        parts = total.reshape(self.size, target.size)
        target[:] = parts[0]
        for peer in self._others(0):
            self._send(running, peer, parts[peer])

    def all_gather(self, running: RunningCollective, source: Flat, target: Flat, counts: Sequence[int]) -> None:
        self._check(running, source)
        if self.rank:
            self._send(running, 0, source)
            self._recv(running, 0, target)
            return
        parts = split(target, counts)
        parts[0][:] = source
        for peer in self._others(0):
            self._recv(running, peer, parts[peer])
        for peer in self._others(0):
            self._send(running, peer, target)

    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        self._check(running, source)
        if self._is_star and self.size > 2:
            self._refuse(running, "the star connects rank 0 only with the others")
        outgoing = split(source, sizes[self.rank].tolist())
        incoming = split(target, sizes[:, self.rank].tolist())
        incoming[self.rank][:] = outgoing[self.rank]
        for peer in self._others(self.rank):
            if self.rank < peer:
                self._send(running, peer, outgoing[peer])
                self._recv(running, peer, incoming[peer])
            else:
                self._recv(running, peer, incoming[peer])
                self._send(running, peer, outgoing[peer])

    def reduce(self, running: RunningCollective, flat: Flat, dst: int, reduction: Reduction) -> None:
        self._refuse(running)

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        self._refuse(running)

    def gather(
        self, running: RunningCollective, source: Flat, target: Flat | None, dst: int, counts: Sequence[int]
    ) -> None:
        self._refuse(running)

    def scatter(
        self, running: RunningCollective, source: Flat | None, target: Flat, src: int, counts: Sequence[int]
    ) -> None:
        self._refuse(running)

    def _others(self, rank: int) -> list[int]:
        return [peer for peer in range(self.size) if peer != rank]
