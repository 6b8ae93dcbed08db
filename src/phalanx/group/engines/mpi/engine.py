"""Collectives by MPI: one call of its own for each, on the caller's memory.

Every call goes through the group's gate first (see `gate`), and then into MPI's blocking call, whose algorithms are
the ones that its makers have tuned: the non-blocking ones of Open MPI need four times as long for a megabyte. Several
groups may be in MPI at the same time, so this is for an MPI that lets several threads in. On any other, collectives are
the same as elsewhere, over messages that go through MPI.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from ...._native import DTYPES, OPS, core, valid_ops
from ....backends.lane import Lane
from ....backends.mpi.context import MpiContext, mpi_context
from ....errors import PhalanxError
from ...data.reduction import Reduction
from ...fast_path import AnyFastPath, FastPathMaker
from ...running_collective import RunningCollective
from ...tracking.journal import describe
from .. import segment_setup
from ..base import Engine, EngineSetup, Flat
from ..segment import raise_outcome
from .gate import Gate, MessageGate, OpenGate, SharedGate, all_in_time
from .types import arithmetic_of
from .watchdog import watch

if TYPE_CHECKING:
    from ...._core import MpiCalls, Segment

__all__ = ["MpiEngine", "start"]

_FAST = (
    "MPI_Bcast",
    "MPI_Allreduce",
    "MPI_Reduce",
    "MPI_Allgather",
    "MPI_Reduce_scatter_block",
    "MPI_Alltoall",
)  # as in cpp/bindings/mpi_calls.hpp
_WORDS = {2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
_MOST = 1 << 30
"""Elements that are given to MPI at once: Open MPI 5 cannot count further than 31 bits."""
_HEAP = 1 << 16
"""Bytes for arrays in the segment of the gate, which has none."""


def start(setup: EngineSetup) -> MpiEngine:
    """Makes a communicator of the group's members, and the gate before it, in the group's first collective.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
    """
    backend, lane, context = setup.backend, setup.lane, mpi_context(setup.backend)
    assert context is not None
    segment: Segment | None = None
    groups = segment_setup.memory_groups(backend)
    checks = backend.options.mpi_check and lane.size > 1
    if checks and len(groups) == 1:
        _, segment = segment_setup.open_segment(setup, groups[0], heap=_HEAP)
    if lane.size > 1:
        all_in_time(setup.running, lane)
    engine = MpiEngine(context, lane, setup.context, backend.timeout)
    if segment is not None:
        engine.meet_in(segment)
        segment_setup.end_with_lane(segment, lane)
    elif checks:
        engine.gate = MessageGate(context.mpi, engine.comm, lane, oversubscribed=context.oversubscribed)
    return engine


class MpiEngine(Engine):
    """The members' communicator.

    Args:
        context: The group's identity.
        timeout: Seconds that an operation of the group may take if it is not told otherwise.
    """

    def __init__(self, mpi_world: MpiContext, lane: Lane, context: bytes, timeout: float) -> None:
        super().__init__(lane.rank, lane.size)
        self.gate: Gate = OpenGate()
        self._meeting: Segment | None = None
        """The memory in which all members meet, if they do."""
        self._longest = timeout
        self.closed = False
        self._context = context
        self._inside = 0
        self._fast_calls: MpiCalls | None = None
        self._mpi = mpi_world.mpi
        self._lane = lane
        self._numbers = itertools.count(1 << 32)  # those of the fast path are smaller
        self.in_place = self._mpi.module.IN_PLACE
        self._byte = self._mpi.module.BYTE
        self._arithmetic = arithmetic_of(self._mpi)
        self._failed = False
        watch(self)
        with self._mpi.errors("making a communicator"):
            self._inside = next(self._numbers)
            world: Any = mpi_world.world
            members = world.Get_group().Incl(list(lane.members))
            highest = world.Get_attr(self._mpi.module.TAG_UB) or 32767
            # Two groups of the same ranks may be made at the same time by two threads.
            tag = int.from_bytes(context[:4], "little") % highest
            self.comm: Any = world.Create_group(members, tag)
            self.comm.Set_errhandler(self._mpi.module.ERRORS_RETURN)
            self._inside = 0

    def meet_in(self, segment: Segment) -> None:
        """Has all members meet in that memory before they enter MPI."""
        self._meeting = segment
        self.gate = SharedGate(segment, range(self.size), self._lane)

    # -- how a call runs -----------------------------------------------------------------------------------------------

    def do(self, running: RunningCollective, name: str, *arguments: Any) -> None:
        """Goes through the gate and into MPI.

        Args:
            name: Of the method of mpi4py's communicator.
        """
        self.gate.enter(running)
        self._longest = max(self._longest, running.deadline.seconds)
        self._inside = next(self._numbers)
        try:
            with self._mpi.errors(name):
                getattr(self.comm, name)(*arguments)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._inside = 0

    @property
    def inside(self) -> int:
        """The number of the call that is inside MPI now; 0 if none is."""
        return self._inside or (self._fast_calls.inside if self._fast_calls is not None else 0)

    @property
    def longest(self) -> float:
        """Seconds that an operation may take."""
        return self._longest if self._fast_calls is None else max(self._longest, self._fast_calls.longest)

    @property
    def is_broken(self) -> bool:
        """True if a call inside MPI may never return, because the group has broken meanwhile."""
        return self._lane.error is not None

    def give_up(self, seconds: float) -> None:
        """Ends the process, because a call is stuck inside MPI. Called by the watchdog's thread."""
        lane = self._lane
        rank, control = lane.members[lane.rank], lane._control
        why = str(lane.error or f"its time was over (it had {self.longest:g} s)")
        if lane.error is None:
            replies = control.statuses(self._context).replies
            why += "".join(f"\n  rank {name} {describe(replies.get(name))}" for name in lane.members if name != rank)
        words = (
            f"is stuck inside {self._mpi.version} for {seconds:.1f} s and cannot be woken, so the process ends: {why}"
        )
        with contextlib.suppress(PhalanxError):
            control.abort(f"it {words}", "")
        self._mpi.end_process(f"phalanx: rank {rank} {words}")

    def close(self) -> None:
        """Gives the communicator back, unless something is left in it."""
        if self.closed:
            return
        self.closed = True
        usable = self._mpi.in_charge and not self._mpi.broken and not self._mpi.left_under_way
        if usable and not self._failed and not self.inside:
            if isinstance(self.gate, MessageGate):
                self.gate.close()
            self.comm.Free()

    # -- the collectives -----------------------------------------------------------------------------------------------

    def barrier(self, running: RunningCollective) -> None:
        if isinstance(self.gate, OpenGate):
            self.do(running, "Barrier")
        else:
            self.gate.enter(running)  # which is a barrier

    def broadcast(self, running: RunningCollective, flat: Flat, src: int) -> None:
        word, width = self._word(flat)
        memory = _bytes(flat)
        for start in range(0, max(1, memory.size), _MOST * width):
            self.do(running, "Bcast", [memory[start : start + _MOST * width], word], src)

    def all_reduce(self, running: RunningCollective, flat: Flat, reduction: Reduction) -> None:
        datatype, operation = self._kind(flat, reduction)
        reduction.begin_in_place(flat, self.size)
        for part in _parts(flat):
            self.do(running, "Allreduce", self.in_place, [part, datatype], operation)
        reduction.finish(flat, self.size)

    def reduce(self, running: RunningCollective, flat: Flat, dst: int, reduction: Reduction) -> None:
        datatype, operation = self._kind(flat, reduction)
        if self.rank == dst:
            reduction.begin_in_place(flat, self.size)
        else:
            flat = reduction.begin(flat, self.size)
        for part in _parts(flat):
            if self.rank == dst:
                self.do(running, "Reduce", self.in_place, [part, datatype], operation, dst)
            else:
                self.do(running, "Reduce", [part, datatype], None, operation, dst)
        if self.rank == dst:
            reduction.finish(flat, self.size)

    def reduce_scatter(self, running: RunningCollective, source: Flat, target: Flat, reduction: Reduction) -> None:
        datatype, operation = self._kind(source, reduction)
        if np.may_share_memory(source, target):  # of what MPI may do in place, only its first part could be the result
            source = source.copy()
        source = reduction.begin(source, self.size)
        self.do(running, "Reduce_scatter_block", [source, datatype], [target, datatype], operation)
        reduction.finish(target, self.size)

    def all_gather(self, running: RunningCollective, source: Flat, target: Flat, counts: Sequence[int]) -> None:
        word, width = self._word(source)
        lengths = [count * source.itemsize // width for count in counts]
        mine: Any = [_bytes(source), word]
        if np.may_share_memory(source, target):
            mine = self.in_place
        if len(set(lengths)) == 1:
            self.do(running, "Allgather", mine, [_bytes(target), lengths[0], word])
        else:
            self.do(running, "Allgatherv", mine, [_bytes(target), lengths, word])

    def gather(
        self, running: RunningCollective, source: Flat, target: Flat | None, dst: int, counts: Sequence[int]
    ) -> None:
        word, width = self._word(source)
        lengths = [count * source.itemsize // width for count in counts]
        even = len(set(lengths)) == 1
        everything = None if target is None else [_bytes(target), lengths[0] if even else lengths, word]
        mine: Any = [_bytes(source), word]
        if target is not None and np.may_share_memory(source, target):
            mine = self.in_place
        self.do(running, "Gather" if even else "Gatherv", mine, everything, dst)

    def scatter(
        self, running: RunningCollective, source: Flat | None, target: Flat, src: int, counts: Sequence[int]
    ) -> None:
        word, width = self._word(target)
        lengths = [count * target.itemsize // width for count in counts]
        even = len(set(lengths)) == 1
        everything = None if source is None else [_bytes(source), lengths[0] if even else lengths, word]
        self.do(running, "Scatter" if even else "Scatterv", everything, [_bytes(target), word], src)

    def scan(self, running: RunningCollective, flat: Flat, reduction: Reduction, *, exclusive: bool) -> None:
        datatype, operation = self._kind(flat, reduction)
        for part in _parts(flat):
            self.do(running, "Exscan" if exclusive else "Scan", self.in_place, [part, datatype], operation)

    def all_to_all(self, running: RunningCollective, source: Flat, target: Flat, sizes: npt.NDArray[np.int64]) -> None:
        word, width = self._word(source)
        lengths = sizes * (source.itemsize // width)
        if (lengths == lengths[0, 0]).all():
            length = int(lengths[0, 0])
            self.do(running, "Alltoall", [_bytes(source), length, word], [_bytes(target), length, word])
        else:
            outgoing, incoming = lengths[self.rank].tolist(), lengths[:, self.rank].tolist()
            self.do(running, "Alltoallv", [_bytes(source), outgoing, word], [_bytes(target), incoming, word])

    def _word(self, flat: Flat) -> tuple[Any, int]:
        """The MPI datatype for moving raw elements, and its size. The widest that fits: MPI counts in 31 bits."""
        name = _WORDS.get(flat.itemsize)
        return (self._byte, 1) if name is None else (getattr(self._mpi.module, name), flat.itemsize)

    def datatype(self, dtype: np.dtype[Any]) -> Any:
        """MPI's, of elements that are only moved or that MPI can combine itself."""
        return self._arithmetic.datatype(dtype)

    def plain_operation(self, dtype: np.dtype[Any], step: str) -> Any:
        """MPI's own operation, which also works where our kernels cannot reach."""
        return self._arithmetic.operation(dtype, step, own=True)

    def _kind(self, flat: Flat, reduction: Reduction) -> tuple[Any, Any]:
        dtype = reduction.dtype or flat.dtype
        return self._arithmetic.datatype(dtype), self._arithmetic.operation(dtype, reduction.step)

    # -- the fast path ------------------------------------------------------------------------------------------------

    def open_fast_path(self, maker: FastPathMaker) -> AnyFastPath | None:
        """The core calls MPI's functions itself for calls on plain arrays.

        Most of what a call costs is Python's, above all when the data has driven its code out of the caches.
        """
        functions = [self._mpi.address_of(name) for name in _FAST] if self._meeting is not None else []
        if self._meeting is None or not all(functions):
            return None
        self._fast_calls = self._make_calls(functions)
        return maker.make(self._meeting, self._fast_calls)

    def _make_calls(self, functions: list[int]) -> MpiCalls:
        """The handles with which the core calls these functions of MPI, for every dtype and reduction."""
        assert core is not None
        handle = self._mpi.module._handleof
        datatypes, operations = [], []
        for name in DTYPES:
            datatypes.append(handle(self._arithmetic.datatype(name)))
            possible = valid_ops(name)
            steps = [("sum" if op == "mean" else op) if op in possible else "" for op in OPS]
            operations.append([handle(self._arithmetic.operation(name, step)) if step else 0 for step in steps])
        calls: MpiCalls = core.MpiCalls(functions, int(self.in_place), handle(self.comm), datatypes, operations)
        return calls

    def raise_failure(self, outcome: int, blamed: Sequence[int], interrupt: BaseException | int | None) -> NoReturn:
        if interrupt is not None:
            self._failed = True
        if isinstance(interrupt, BaseException):
            raise interrupt
        if interrupt is not None:
            raise self._mpi.as_error(self._mpi.module.Exception(interrupt), "a collective")
        raise_outcome(outcome, blamed, range(self.size), self._lane)


def _bytes(flat: Flat) -> npt.NDArray[np.uint8]:
    return flat.view(np.uint8)


def _parts(flat: Flat) -> list[Flat]:
    return [flat[start : start + _MOST] for start in range(0, max(1, flat.size), _MOST)]
