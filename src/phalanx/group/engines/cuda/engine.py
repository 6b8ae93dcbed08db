"""The engine of arrays that lie on a GPU, above the group's engine for the memory of the host.

Every method also takes arrays of the host, and hands them on. For the others `routing.py` has the table: ranks
with a GPU each use NCCL if it is there (`nccl.py`); ranks that share memory of the host leave the rest to the core
(cpp/phalanx/cuda); else the arrays are copied to the host for the time of a collective there. Whichever way an
operation goes, it has ended when the method returns: its result can be used on any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ...._native import dtype_code, op_code
from ....backends.base import GpuChoice
from ....backends.lane import Lane
from ....cuda.arrays import DeviceArray
from ....cuda.driver import driver
from ....cuda.host_copies import host_address, host_copies
from ....cuda.lending import Loans
from ....cuda.nccl import nccl
from ....errors import UnsupportedOp
from ...data.reduction import Reduction
from ...fast_path import AnyFastPath, FastPathMaker
from ...outcomes import DeadlinePassed
from ...running_collective import RunningCollective
from ...tracking.fingerprint import kind_of
from ..base import Engine, Flat, Parts, Receive
from ..segment import DONE, SegmentEngine
from .agreement import DeviceSharing, agree
from .communicator import Communicator
from .nccl import NcclCollectives
from .placement import meet
from .routing import Operation, Placement, Question, Way, nccl_lacks, nccl_obstacle, way_of
from .staging import Staging

if TYPE_CHECKING:
    from ...._core import DeviceCollectives

__all__ = ["DeviceEngine"]


class DeviceEngine(Engine):
    """The engine of a group that has seen an array on a GPU.

    Args:
        host: The group's engine for the memory of the host, in which the ranks meet.
        lane: The group's lane for collectives, which ends when the group breaks.
        choice: The ways that the group's backend allows.
    """

    def __init__(self, host: Engine, lane: Lane, choice: GpuChoice) -> None:
        super().__init__(host.rank, host.size)
        self.segment = host.segment
        self.exchanges_counts = host.exchanges_counts
        self._host = host
        self._staging = Staging(host.rank, host.segment)
        self._lane = lane
        self._choice = choice
        self._placement = Placement(1, False) if self.size == 1 and choice in ("auto", "ucc") else None
        self._sharing: DeviceSharing | None = None
        self._loans: Loans | None = None
        self._takes_all = False
        """True if the core takes all arrays on a GPU, also from the fast path."""
        self._asked = False
        """True once this rank, as the root of a scatter, has asked whether the others could share a GPU."""
        self._nccl: NcclCollectives | None = None
        self._closed = False

    @property
    def for_host(self) -> Engine:
        return self._host

    @property
    def loans(self) -> Loans | None:
        return self._loans if self._sharing is not None and self._sharing.executes else None

    def open_fast_path(self, maker: FastPathMaker) -> AnyFastPath | None:
        return self._host.open_fast_path(maker)

    def raise_failure(self, outcome: int, blamed: Sequence[int], interrupt: BaseException | int | None) -> NoReturn:
        self._host.raise_failure(outcome, blamed, interrupt)

    def flush(self, seconds: float) -> None:
        self._host.flush(seconds)

    def close(self) -> None:
        """Gives back what it has on the GPU. The host's engine is the group's to close. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._staging.close()
        if self._nccl is not None:
            self._nccl.close()
        if self._loans is not None:
            self._loans.close()
        if self._sharing is not None:
            if isinstance(self._host, SegmentEngine):
                self._host.use_device(None)
            self._sharing.close()

    # -- the way of an operation ---------------------------------------------------------------------------------------

    def _way(
        self, running: RunningCollective, verb: str, array: DeviceArray, reduction: Reduction | None = None
    ) -> Way:
        """The way of an operation, the same on all ranks; the first one finds out how they lie.

        Raises:
            UnsupportedOp: The backend allows NCCL only, which this group cannot use, or which does not have that. All
                ranks find it, and the group can go on.
            DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
        """
        if not self._host.exchanges_counts:  # ferrotorch's ranks, which know of no meeting
            return Way.STAGED
        if self._placement is None:
            self._placement = meet(running, self._host, array.device, self._choice)
        name = "" if reduction is None else reduction.dtype or array.dtype.name
        operation = Operation(verb, "" if reduction is None else reduction.name, name)
        if self._choice in ("nccl", "hybrid"):
            obstacle = nccl_obstacle(self._placement)
            if obstacle is not None:
                raise UnsupportedOp(f"this group's backend moves arrays on a GPU by NCCL, but {obstacle}")
        lacks = nccl_lacks(operation)
        if self._choice == "nccl" and lacks is not None:
            raise UnsupportedOp(
                f"NCCL does not have {lacks} (convert the array, or use phalanx.init() or HybridBackend, which take "
                "what NCCL lacks through the memory of the host)"
            )
        return way_of(Question("cuda", array.nbytes, self._placement, operation, self._choice))

    def _by_nccl(self, running: RunningCollective, device: int) -> NcclCollectives:
        """The collectives of NCCL; the first one starts it.

        Raises:
            DeadlinePassed, FingerprintMismatch, PhalanxError: As every engine.
        """
        if self._nccl is None:
            made = Communicator(nccl(), driver(), device, self._lane)
            made.start(running, self._host)
            self._nccl = NcclCollectives(self._host, made)
        return self._nccl

    def _in_core(
        self,
        running: RunningCollective,
        operation: Callable[[DeviceCollectives], Callable[..., int]],
        source: DeviceArray,
        target: DeviceArray | None,
        *arguments: Any,
    ) -> None:
        """Does an operation in the core, or inside the GPU for a rank that is alone.

        Args:
            operation: A method of the core.
            target: None if this rank has none, or it is the source.
            arguments: Of that method.
        """
        if self.size == 1:
            self._move(running, source, source if target is None else target)
            return
        assert isinstance(self._host, SegmentEngine), "the ranks share memory"
        self._wait_for(running, source, target)
        core = self._shared(running, self._host, source.device).collectives
        outcome = operation(core)(*arguments, running.fingerprint, running.deadline.at)
        self._check(core, outcome)

    def _wait_for(self, running: RunningCollective, *arrays: Any) -> None:
        """Waits until those of the arrays that lie on a GPU are computed.

        Raises:
            DeadlinePassed: They were not, in time.
        """
        for array in arrays:
            if isinstance(array, DeviceArray) and not array.ready.wait(running.deadline):
                raise DeadlinePassed([self.rank])

    def _check(self, core: DeviceCollectives, outcome: int) -> None:
        if outcome != DONE:
            self._host.raise_failure(outcome, core.blamed(outcome), None)

    def _shared(self, running: RunningCollective, host: SegmentEngine, device: int) -> DeviceSharing:
        """How the ranks share a GPU; the first operation there finds it out."""
        if self._sharing is None:
            self._sharing = agree(running, host, device)
            self._takes_all = self._placement is None or nccl_obstacle(self._placement) is not None
            if self._takes_all:
                host.use_device(self._sharing.collectives)
            self._loans = Loans(device)
        return self._sharing

    def _move(self, running: RunningCollective, source: DeviceArray, target: DeviceArray) -> None:
        """Any of these operations of a rank that is alone.

        Raises:
            DeadlinePassed: The GPU was not done in time.
        """
        if not host_copies(source.device).copy(source, target, running.deadline):
            raise DeadlinePassed([self.rank])

    def _how(self, flat: DeviceArray, reduction: Reduction) -> tuple[int, int, int]:
        divisor = self.size if reduction.name == "mean" else 1
        return dtype_code(reduction.dtype or flat.dtype), op_code(reduction.step), divisor

    # -- the collectives -----------------------------------------------------------------------------------------------

    def barrier(self, running: RunningCollective) -> None:
        self._host.barrier(running)

    def broadcast(self, running: RunningCollective, flat: Any, src: int) -> None:
        if not isinstance(flat, DeviceArray):
            self._host.broadcast(running, flat, src)
            return
        way = self._way(running, "broadcast", flat)
        if way is Way.NCCL:
            self._by_nccl(running, flat.device).broadcast(running, flat, src)
            return
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.broadcast, flat, None, flat.address, flat.nbytes, src)
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
        way = self._way(running, "all_reduce", flat, reduction)
        if way is Way.NCCL:
            self._by_nccl(running, flat.device).all_reduce(running, flat, reduction)
            return
        how = self._how(flat, reduction)
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.all_reduce, flat, None, flat.address, flat.nbytes, *how)
            return
        staged = self._staging.load(running, flat)
        self._host.all_reduce(running, staged.flat, reduction)
        self._staging.store(running, staged)

    def reduce(self, running: RunningCollective, flat: Any, dst: int, reduction: Reduction) -> None:
        if not isinstance(flat, DeviceArray):
            self._host.reduce(running, flat, dst, reduction)
            return
        way = self._way(running, "reduce", flat, reduction)
        if way is Way.NCCL:
            self._by_nccl(running, flat.device).reduce(running, flat, dst, reduction)
            return
        how = self._how(flat, reduction)
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.reduce, flat, None, flat.address, flat.nbytes, dst, *how)
            return
        staged = self._staging.load(running, flat)
        self._host.reduce(running, staged.flat, dst, reduction)
        if self.rank == dst:
            self._staging.store(running, staged)

    def reduce_scatter(self, running: RunningCollective, source: Any, target: Any, reduction: Reduction) -> None:
        if not isinstance(source, DeviceArray):
            self._host.reduce_scatter(running, source, target, reduction)
            return
        way = self._way(running, "reduce_scatter", source, reduction)
        if way is Way.NCCL:
            self._by_nccl(running, source.device).reduce_scatter(running, source, target, reduction)
            return
        arguments = (source.address, source.nbytes, target.address, target.nbytes, *self._how(source, reduction))
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.reduce_scatter, source, target, *arguments)
            return
        staged, part = self._staging.load(running, source), self._staging.empty(target)
        self._host.reduce_scatter(running, staged.flat, part.flat, reduction)
        self._staging.store(running, part)

    def all_gather(self, running: RunningCollective, source: Any, target: Any, counts: Sequence[int]) -> None:
        if not isinstance(source, DeviceArray):
            self._host.all_gather(running, source, target, counts)
            return
        way = self._way(running, "all_gather", source)
        if way is Way.NCCL:
            self._by_nccl(running, source.device).all_gather(running, source, target, counts)
            return
        sizes = [count * source.itemsize for count in counts]
        arguments = (source.address, source.nbytes, target.address, sizes, -1)
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.gather, source, target, *arguments)
            return
        staged, everyone = self._staging.load(running, source), self._staging.empty(target)
        self._host.all_gather(running, staged.flat, everyone.flat, counts)
        self._staging.store(running, everyone)

    def gather(self, running: RunningCollective, source: Any, target: Any, dst: int, counts: Sequence[int]) -> None:
        if not isinstance(source, DeviceArray):
            self._host.gather(running, source, target, dst, counts)
            return
        way = self._way(running, "gather", source)
        if way is Way.NCCL:
            self._by_nccl(running, source.device).gather(running, source, target, dst, counts)
            return
        sizes = [count * source.itemsize for count in counts]
        place = 0 if target is None else target.address
        arguments = (source.address, source.nbytes, place, sizes, dst)
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.gather, source, target, *arguments)
            return
        staged = self._staging.load(running, source)
        everyone = None if target is None else self._staging.empty(target)
        self._host.gather(running, staged.flat, None if everyone is None else everyone.flat, dst, counts)
        if everyone is not None:
            self._staging.store(running, everyone)

    def scatter(self, running: RunningCollective, source: Any, target: Any, src: int, counts: Sequence[int]) -> None:
        if self._sharing is not None and self._takes_all:
            core = self._sharing.collectives
            self._wait_for(running, source, target)
            sizes = [count * target.itemsize for count in counts]
            arrays = _either(source), _either(target)
            outcome = core.scatter(*arrays, sizes, src, running.fingerprint, running.deadline.at)
            self._check(core, outcome)
            return
        staged = self._staging.load(running, source) if isinstance(source, DeviceArray) else None  # kept to the end
        whole = source if staged is None else staged.flat
        if not isinstance(target, DeviceArray):
            self._host.scatter(running, whole, target, src, counts)
            return
        part = self._staging.empty(target)
        self._host.scatter(running, whole, part.flat, src, counts)
        self._staging.store(running, part)

    def scatter_equal(self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive) -> None:
        if self._sharing is not None and self._takes_all:
            self._scatter_in_core(running, self._sharing.collectives, parts, src, receive)
            return
        may_ask = self._choice in ("auto", "ucc") and isinstance(self._host, SegmentEngine)
        asks = may_ask and parts is not None and isinstance(parts.flat, DeviceArray) and not self._asked
        self._asked = self._asked or asks
        mine: list[Any] = [] if parts is None else [parts.flat]

        def received(words: bytes) -> Any:
            mine.append(receive(words))
            return mine[-1]

        asked = self._scatter_staged(running, parts, src, received, asks=asks)
        if not asked:
            return
        assert isinstance(self._host, SegmentEngine), "others are not asked"
        devices = [array.device for array in mine if isinstance(array, DeviceArray)]
        answers = self._host.tell_all(running, bytes([may_ask and len(devices) == len(mine)]))
        if bytes(1) not in answers and self._way(running, "scatter", mine[0]) in (Way.EXECUTOR, Way.BOUNCE):
            self._shared(running, self._host, devices[0])

    def _scatter_in_core(
        self, running: RunningCollective, core: DeviceCollectives, parts: Parts | None, src: int, receive: Receive
    ) -> None:
        source: Any = None if parts is None else parts.flat
        self._wait_for(running, source)
        kind, words = (0, b"") if parts is None else (kind_of("scatter", parts.dtype, ""), parts.description)
        fingerprint, deadline = running.fingerprint, running.deadline.at
        outcome, told = core.tell_parts(_either(source), kind, words, src, fingerprint, deadline)
        self._check(core, outcome)
        target = receive(told)
        self._wait_for(running, target)
        outcome = core.take_part(_either(source), _either(target), src, fingerprint, deadline)
        self._check(core, outcome)

    def _scatter_staged(
        self, running: RunningCollective, parts: Parts | None, src: int, receive: Receive, *, asks: bool
    ) -> bool:
        """Through the memory of the host. True if the root asks whether the ranks could share a GPU."""
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

        asked = False
        if isinstance(self._host, SegmentEngine):
            asked = self._host.scatter_and_ask(running, parts, src, receive_on_host, asks=asks)
        else:
            self._host.scatter_equal(running, parts, src, receive_on_host)
        for staged in targets:
            self._staging.store(running, staged)
        return asked

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        self._host.scan(running, flat, reduction, exclusive=exclusive)

    def all_to_all(self, running: RunningCollective, source: Any, target: Any, sizes: npt.NDArray[np.int64]) -> None:
        if not isinstance(source, DeviceArray):
            self._host.all_to_all(running, source, target, sizes)
            return
        way = self._way(running, "all_to_all", source)
        if way is Way.NCCL:
            self._by_nccl(running, source.device).all_to_all(running, source, target, sizes)
            return
        largest = int(max(sizes.sum(axis=0).max(), sizes.sum(axis=1).max())) * source.itemsize
        matrix = (sizes * source.itemsize).reshape(-1).tolist()
        arguments = (source.address, source.nbytes, target.address, target.nbytes, matrix, largest)
        if way is not Way.STAGED:
            self._in_core(running, lambda core: core.all_to_all, source, target, *arguments)
            return
        staged, received = self._staging.load(running, source), self._staging.empty(target)
        self._host.all_to_all(running, staged.flat, received.flat, sizes)
        self._staging.store(running, received)


def _either(array: Any) -> tuple[int, int, int]:
    """An array as the core takes those of a scatter: where it lies on a GPU, or else on the host, and its bytes."""
    if array is None:
        return 0, 0, 0
    if isinstance(array, DeviceArray):
        return array.address, 0, array.nbytes
    return 0, host_address(array), array.nbytes
