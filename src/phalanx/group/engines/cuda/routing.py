"""Which way a collective goes: a table of where the array lies, its size, how the ranks lie, and the operation.

All ranks decide alike, because they decide by what all of them know. Whether a short or a long array of ranks that
share a GPU goes by the kernel, the core decides by the figures here, which are those of an H200, driver 580, without
MPS, float32, two ranks:

- Through the memory of the host a short array takes 21 µs, by copy engines, which need no time slice of the GPU. The
  kernel takes 16 µs if the GPU is idle, but 300 if each rank has run a kernel before, and 4,500 while they compute:
  each process has its time slices. So the kernel is tried after some operations, and after one that took long not again
  for as many short arrays as make that time up.
- From 64 KiB on the kernel is quicker by far if it may run: 271 µs for 256 MiB, of which 259 are the memory's.
- While the ranks compute, both are equal at 16 MiB.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple

from ....backends.base import GpuChoice
from ....cuda.nccl import DTYPES, OPS, version_text

__all__ = [
    "MULTI_RANK_NCCL",
    "SHORT",
    "SHORT_IF_BUSY",
    "SHORT_IF_CLOSED",
    "SHORT_IF_IDLE",
    "SLICE",
    "TABLE",
    "Gpus",
    "Operation",
    "Placement",
    "Question",
    "Way",
    "nccl_lacks",
    "nccl_obstacle",
    "way_of",
]

SHORT = 64 << 10
"""Bytes up to which an array goes through the memory of the host, unless the GPU is known to be idle."""
SHORT_IF_IDLE = 16 << 10
"""The same on a GPU that the ranks' last kernels found idle. What all ranks read and write goes by the kernel at any
length then: 4 B take two ranks 21 to 23 µs, while the copies take 25, and four ranks 18, while the copies take 29."""
SHORT_IF_BUSY = 16 << 20
"""The same while the ranks' own kernels keep the GPU busy."""
SHORT_IF_CLOSED = 2 << 20
"""The same if other processes cannot open the array. A longer one is copied to memory that they can open, inside the
GPU: two ranks take 320 µs for 1 MiB (214 through the host) and 466 for 64 MiB (10,000)."""
SLICE = 1e-3
"""Seconds that a kernel takes at least if it had to wait for the time slices of other processes."""
MULTI_RANK_NCCL = 23003
"""The first NCCL that takes several ranks on one GPU, if `NCCL_MULTI_RANK_GPU_ENABLE` is 1."""
_NCCL_VERBS = frozenset({"all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "gather", "all_to_all"})
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_CORE_VERBS = _NCCL_VERBS | {"scatter"}
"""The verbs that the core does on a GPU."""


class Way(enum.Enum):
    """How the bytes of a collective move."""

    SEGMENT = "in the shared memory of the host"
    NETWORK = "over the network"
    ALONE = "inside the GPU: the rank is alone"
    EXECUTOR = "by one kernel, which reads the arrays of all ranks"
    BOUNCE = "through the shared memory of the host, by copy engines"
    NCCL = "by NCCL"
    STAGED = "copied to the host, and then as an array there"


class Gpus(enum.Enum):
    """How the ranks of a group have their GPUs."""

    ONE = "all ranks share one GPU"
    OWN = "each rank has a GPU of its own"
    MIXED = "some ranks share a GPU, and others do not"


class Placement(NamedTuple):
    """The facts that all ranks of a group know of each other."""

    size: int
    """The number of ranks."""
    shares_memory: bool
    """True if all share memory of one host."""
    gpus: Gpus = Gpus.ONE
    opens: bool = True
    """True if the lowest rank can open the GPU memory of the others."""
    nccl: int = 0
    """The version of NCCL, as 23003; 0 if a rank has none, or they have different ones."""
    nccl_shares: bool = False
    """True if NCCL was told on all ranks to take several on one GPU."""


class Operation(NamedTuple):
    """A verb, and what it computes; empty for what is only moved."""

    verb: str
    reduction: str = ""
    dtype: str = ""


class Question(NamedTuple):
    """The facts that the way of an array depends on."""

    device: Literal["cpu", "cuda"]
    nbytes: int
    placement: Placement
    operation: Operation
    choice: GpuChoice = "auto"
    busy: bool = False
    """True while the ranks' own kernels keep the GPU busy."""


def nccl_lacks(operation: Operation) -> str | None:
    """The part of an operation that NCCL does not have; None if it has all."""
    if operation.verb not in _NCCL_VERBS:
        return operation.verb
    if operation.verb not in _REDUCING:
        return None
    if operation.reduction not in OPS:
        return f"the reduction {operation.reduction!r}"
    return None if operation.dtype in DTYPES else f"reductions of {operation.dtype}"


def nccl_obstacle(placement: Placement) -> str | None:
    """Why a group cannot use NCCL at all, with what to do; None if it can."""
    if not placement.nccl:
        return (
            "nccl4py and one version of NCCL must be there on all ranks (pip install nccl4py; `phalanx doctor` "
            "says what a host has)"
        )
    if placement.gpus is Gpus.OWN or placement.size == 1:
        return None
    if placement.nccl_shares and placement.nccl >= MULTI_RANK_NCCL:
        return None
    return (
        f"{placement.gpus.value}, which NCCL {version_text(placement.nccl)} refuses (give each rank a GPU of its own, "
        "as by torch.cuda.set_device(local_rank), or use phalanx.init(), which needs no NCCL for ranks that share one)"
    )


def _is_nccl(asked: Question) -> bool:
    return nccl_obstacle(asked.placement) is None and nccl_lacks(asked.operation) is None


def _on_host(asked: Question) -> bool:
    return asked.device == "cpu"


def _in_core(asked: Question) -> bool:
    return asked.placement.shares_memory and asked.operation.verb in _CORE_VERBS


def _by_kernel(asked: Question) -> bool:
    place, limit = asked.placement, SHORT_IF_BUSY if asked.busy else SHORT
    return _in_core(asked) and place.gpus is Gpus.ONE and place.opens and asked.nbytes > limit


TABLE: tuple[tuple[str, Callable[[Question], bool], Way], ...] = (
    ("an array of the host, in shared memory", lambda a: _on_host(a) and a.placement.shares_memory, Way.SEGMENT),
    ("another array of the host", _on_host, Way.NETWORK),
    ("NCCL is chosen and has it", lambda a: a.choice in ("nccl", "hybrid") and _is_nccl(a), Way.NCCL),
    ("NCCL is chosen and lacks it", lambda a: a.choice in ("nccl", "hybrid"), Way.STAGED),
    ("a rank that is alone", lambda a: a.placement.size == 1, Way.ALONE),
    ("a GPU each, and NCCL has it", lambda a: a.placement.gpus is Gpus.OWN and _is_nccl(a), Way.NCCL),
    ("a long array of ranks that share a GPU", _by_kernel, Way.EXECUTOR),
    ("another array of ranks that share memory", _in_core, Way.BOUNCE),
    ("all others", lambda a: True, Way.STAGED),
)
"""In the order in which they are tried: what it is for, whether it is that, and the way."""


def way_of(asked: Question) -> Way:
    """The way of an array: that of the first row that fits. `choice="nccl"` refuses what it lacks before it asks."""
    return next(way for _, fits, way in TABLE if fits(asked))
