"""The engine of arrays that lie on a GPU, above the group's engine for the memory of the host.

Every method also takes arrays of the host, and hands them on. Whichever way an operation goes, it has ended when the
method returns: its result can be used on any stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ....cuda.arrays import DeviceArray
from ....cuda.host_copies import host_copies
from ...data.reduction import Reduction
from ...fast_path import AnyFastPath, FastPathMaker
from ...outcomes import DeadlinePassed
from ...running_collective import RunningCollective
from ..base import Engine, Flat, Parts, Receive
from . import pieces
from .agreement import agree
from .executor import Executor, Operation
from .routing import SHORT, Path, Placement, choose
from .staging import Staging

__all__ = ["DeviceEngine"]

logger = logging.getLogger("phalanx.group")


class DeviceEngine(Engine):
    """The engine of a group that has seen an array on a GPU.

    Args:
        host: The group's engine for the memory of the host, in which the ranks meet.
    """

    def __init__(self, host: Engine) -> None:
        super().__init__(host.rank, host.size)
        self.segment = host.segment
        self.exchanges_counts = host.exchanges_counts
        self._host = host
        self._staging = Staging(host.rank, host.segment)
        self.placement: Placement | None = None
        """Known after the first operation that is long enough to matter."""
        self._executor: Executor | None = None

    @property
    def for_host(self) -> Engine:
        return self._host

    def open_fast_path(self, maker: FastPathMaker) -> AnyFastPath | None:
        return self._host.open_fast_path(maker)

    def raise_failure(self, outcome: int, blamed: Sequence[int], interrupt: BaseException | int | None) -> NoReturn:
        self._host.raise_failure(outcome, blamed, interrupt)

    def flush(self, seconds: float) -> None:
        self._host.flush(seconds)

    def close(self) -> None:
        """Gives back what it has on the GPU. The host's engine is the group's to close."""
        self._staging.close()
        if self._executor is not None:
            self._executor.close()

    # -- the way of an operation ---------------------------------------------------------------------------------------

    def _execute(
        self,
        running: RunningCollective,
        operation: str,
        size: int,
        source: DeviceArray,
        target: DeviceArray | None,
        plan: Operation,
        reduction: Reduction | None = None,
    ) -> bool:
        """Does an operation by the executor's kernel, if that is its way; else False, on all ranks alike.

        Args:
            size: Bytes of the largest array of a rank.
        """
        if self.size == 1:
            self._move(running, source, source if target is None else target)
            return True
        if size <= SHORT:
            return False
        if self.placement is None:
            self.placement, self._executor = agree(running, self._host, source.device)
        executor = self._executor
        if executor is None:
            return False
        busy = executor.pace.busy
        if choose(operation, size, self.placement, busy=busy) is not Path.EXECUTOR:
            if busy:
                executor.pace.staged()
            return False
        return executor.run(running, source, target, plan, reduction)

    def _move(self, running: RunningCollective, source: DeviceArray, target: DeviceArray) -> None:
        """Any of these operations of a rank that is alone.

        Raises:
            DeadlinePassed: The GPU was not done in time.
        """
        if not host_copies(source.device).copy(source, target, running.deadline):
            raise DeadlinePassed([self.rank])

    # -- the collectives -----------------------------------------------------------------------------------------------

    def barrier(self, running: RunningCollective) -> None:
        self._host.barrier(running)

    def broadcast(self, running: RunningCollective, flat: Any, src: int) -> None:
        if not isinstance(flat, DeviceArray):
            self._host.broadcast(running, flat, src)
            return

        plan = Operation(
            ("broadcast", flat.size, src), lambda sources, _targets: pieces.broadcast(sources, flat.size, src)
        )
        if self._execute(running, "broadcast", flat.nbytes, flat, None, plan):
            return
        mine = self.rank == src
        staged = self._staging.load(running, flat) if mine else self._staging.empty(flat)
        self._host.broadcast(running, staged.flat, src)
        if not mine:
            self._staging.store(running, staged)

    def all_reduce(self, running: RunningCollective, flat: Any, reduction: Reduction) -> None:
        if not isinstance(flat, DeviceArray):
            self._host.all_reduce(running, flat, reduction)
            return

        plan = Operation(("all_reduce", flat.size), lambda sources, _targets: pieces.all_reduce(sources, flat.size))
        if self._execute(running, "all_reduce", flat.nbytes, flat, None, plan, reduction):
            return
        staged = self._staging.load(running, flat)
        self._host.all_reduce(running, staged.flat, reduction)
        self._staging.store(running, staged)

    def reduce(self, running: RunningCollective, flat: Any, dst: int, reduction: Reduction) -> None:
        if not isinstance(flat, DeviceArray):
            self._host.reduce(running, flat, dst, reduction)
            return

        plan = Operation(("reduce", flat.size, dst), lambda sources, _targets: pieces.reduce(sources, flat.size, dst))
        if self._execute(running, "reduce", flat.nbytes, flat, None, plan, reduction):
            return
        staged = self._staging.load(running, flat)
        self._host.reduce(running, staged.flat, dst, reduction)
        if self.rank == dst:
            self._staging.store(running, staged)

    def reduce_scatter(self, running: RunningCollective, source: Any, target: Any, reduction: Reduction) -> None:
        if not isinstance(source, DeviceArray):
            self._host.reduce_scatter(running, source, target, reduction)
            return

        plan = Operation(
            ("reduce_scatter", target.size),
            lambda sources, targets: pieces.reduce_scatter(sources, targets, target.size, source.itemsize),
        )
        if self._execute(running, "reduce_scatter", source.nbytes, source, target, plan, reduction):
            return
        staged, part = self._staging.load(running, source), self._staging.empty(target)
        self._host.reduce_scatter(running, staged.flat, part.flat, reduction)
        self._staging.store(running, part)

    def all_gather(self, running: RunningCollective, source: Any, target: Any, counts: Sequence[int]) -> None:
        if not isinstance(source, DeviceArray):
            self._host.all_gather(running, source, target, counts)
            return

        plan = Operation(
            ("all_gather", *counts),
            lambda sources, targets: pieces.all_gather(sources, targets, counts, source.itemsize),
        )
        if self._execute(running, "all_gather", target.nbytes, source, target, plan):
            return
        staged, everyone = self._staging.load(running, source), self._staging.empty(target)
        self._host.all_gather(running, staged.flat, everyone.flat, counts)
        self._staging.store(running, everyone)

    def gather(self, running: RunningCollective, source: Any, target: Any, dst: int, counts: Sequence[int]) -> None:
        if not isinstance(source, DeviceArray):
            self._host.gather(running, source, target, dst, counts)
            return

        plan = Operation(
            ("gather", dst, *counts),
            lambda sources, targets: pieces.gather(sources, targets[dst], counts, source.itemsize),
        )
        if self._execute(running, "gather", sum(counts) * source.itemsize, source, target, plan):
            return
        staged = self._staging.load(running, source)
        everyone = None if target is None else self._staging.empty(target)
        self._host.gather(running, staged.flat, None if everyone is None else everyone.flat, dst, counts)
        if everyone is not None:
            self._staging.store(running, everyone)

    def scatter(self, running: RunningCollective, source: Any, target: Any, src: int, counts: Sequence[int]) -> None:
        whole = self._staging.load(running, source).flat if isinstance(source, DeviceArray) else source
        if not isinstance(target, DeviceArray):
            self._host.scatter(running, whole, target, src, counts)
            return
        part = self._staging.empty(target)
        self._host.scatter(running, whole, part.flat, src, counts)
        self._staging.store(running, part)

    def scatter_equal(self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive) -> None:
        targets = []
        whole = None
        if parts is not None and isinstance(parts.flat, DeviceArray):
            whole = self._staging.load(running, parts.flat)
            parts = parts._replace(flat=whole.flat)

        def receive_on_host(words: bytes) -> Flat:
            target: Any = receive(words)
            if not isinstance(target, DeviceArray):
                plain: Flat = target
                return plain
            targets.append(self._staging.empty(target))
            return targets[0].flat

        self._host.scatter_equal(running, parts, src, receive_on_host)
        for staged in targets:
            self._staging.store(running, staged)

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        self._host.scan(running, flat, reduction, exclusive=exclusive)

    def all_to_all(self, running: RunningCollective, source: Any, target: Any, sizes: npt.NDArray[np.int64]) -> None:
        if not isinstance(source, DeviceArray):
            self._host.all_to_all(running, source, target, sizes)
            return

        plan = Operation(
            ("all_to_all", sizes.tobytes()),
            lambda sources, targets: pieces.all_to_all(sources, targets, sizes, source.itemsize),
        )
        largest = int(max(sizes.sum(axis=0).max(), sizes.sum(axis=1).max())) * source.itemsize
        if self._execute(running, "all_to_all", largest, source, target, plan):
            return
        staged, received = self._staging.load(running, source), self._staging.empty(target)
        self._host.all_to_all(running, staged.flat, received.flat, sizes)
        self._staging.store(running, received)
