"""Which engine moves the data of a group's collectives. The only file that knows which engines exist."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..._native import core
from ...backends.base import LaneBackend
from ...backends.lane import Lane
from ...backends.mpi.context import mpi_context
from ..fast_path import DeviceFastPath
from . import hosts, network, segment
from .base import Engine, EngineSetup, RunCollective
from .segment_setup import memory_groups

__all__ = ["choose_engine", "device_fast_path", "engine_for_devices"]

Start = Callable[[EngineSetup], Engine | None]


def choose_engine(setup: EngineSetup) -> Engine:
    """The first engine that suits a group's backend and can be set up. All members choose the same.

    Raises:
        DeadlinePassed, FingerprintMismatch, PhalanxError: As `steps.run`.
    """
    for suits, start in _ENGINES:
        engine = start(setup) if suits(setup.backend) else None
        if engine is not None:
            return engine
    raise AssertionError("the network suits every group")


def engine_for_devices(host: Engine, backend: LaneBackend, lane: Lane) -> Engine:
    """The engine of arrays on a GPU, for a group that has that engine for arrays of the host.

    Args:
        lane: The group's lane for collectives.
    """
    from .cuda.engine import DeviceEngine  # most programs have no GPU

    return DeviceEngine(host, lane, backend.gpu_choice)


def device_fast_path(backend: LaneBackend, run: RunCollective) -> DeviceFastPath | None:
    """The fast path of arrays in the memory of a GPU; None if the backend does not take them.

    Args:
        run: Runs a collective of the group; must not keep the group alive.
    """
    context = mpi_context(backend)
    if context is None or not context.mpi.takes_device_memory:
        return None
    from .mpi.device import MpiDeviceFastPath  # most worlds are not MPI's

    return MpiDeviceFastPath(backend.rank, backend.world_size, run)


def _late(module: str) -> Start:
    """The `start` of an engine that few worlds need: its module is imported when it is."""

    def start(setup: EngineSetup) -> Engine | None:
        found: Engine | None = import_module(module, __package__).start(setup)
        return found

    return start


def _enters_mpi(backend: LaneBackend) -> bool:
    context = mpi_context(backend)
    return context is not None and context.mpi.multiple


def _has_ferrotorch_ranks(backend: LaneBackend) -> bool:
    return backend.peers == "ferrotorch"


def _is_alone(backend: LaneBackend) -> bool:
    return backend.world_size == 1 and core is not None


def _shares_memory(backend: LaneBackend) -> bool:
    return 1 == len(memory_groups(backend)) < backend.world_size


def _shares_memory_inside_hosts(backend: LaneBackend) -> bool:
    return 1 < len(memory_groups(backend)) < backend.world_size


def _always(_backend: LaneBackend) -> bool:
    return True


_ENGINES: tuple[tuple[Callable[[LaneBackend], bool], Start], ...] = (
    (_enters_mpi, _late(".mpi.engine")),
    (_has_ferrotorch_ranks, _late(".classic")),
    (_is_alone, segment.start),  # it shares memory with nobody, but its calls are as quick there
    (_shares_memory, segment.start),
    (_shares_memory_inside_hosts, hosts.start),
    (_always, network.start),
)
"""In the order in which they are tried: a condition on the backend, and what starts the engine."""
