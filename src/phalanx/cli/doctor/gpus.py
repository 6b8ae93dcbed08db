"""GPUs: which there are, which way arrays on them go, and what makes that slower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from phalanx.cuda.driver import CudaDriver, CudaError, driver
from phalanx.errors import BackendUnavailable, PhalanxError
from phalanx.group.engines.cuda.placement import nccl_version
from phalanx.group.engines.cuda.routing import SHORT, Gpus, Operation, Placement, Question, Way, way_of

from .findings import Finding, Situation, check, ok, warning

__all__ = ["gpus"]

_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MPS = Path("/tmp/nvidia-mps")  # noqa: S108 - where its daemon puts its pipes, unless told otherwise
_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"))
_LONG = 1 << 20
"""Bytes of an array that stands for the long ones."""


@check("GPUs")
def gpus(situation: Situation) -> Iterator[Finding]:
    """The driver, the GPUs, and which way the arrays of ranks on this host go."""
    topic = "GPUs"
    try:
        known = driver()
        names = [known.device_name(number) for number in range(known.device_count)]
    except BackendUnavailable as error:
        yield ok(topic, f"arrays on a GPU cannot be sent from here: {error} (nothing else needs one)")
        return
    except PhalanxError as error:
        yield warning(topic, str(error), "Reboot, or install the driver again: nvidia-smi should list the GPUs.")
        return
    yield ok(topic, f"{_listed(names)}, CUDA {known.version // 1000}.{known.version % 1000 // 10}; {_ways(names)}")
    yield from _obstacles(situation)
    yield from _memory(known, len(names))


def _listed(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"  # noqa: RUF001


def _ways(names: list[str]) -> str:
    """The way of a long array, for ranks that share a GPU and for those that do not, as the table says."""
    version = nccl_version() if len(names) > 1 else 0
    placed = {
        "ranks that share one": Placement(2, shares_memory=True, gpus=Gpus.ONE, nccl=version),
        "ranks of this host with one each": Placement(2, shares_memory=True, gpus=Gpus.OWN, nccl=version),
    }
    if len(names) < 2:
        del placed["ranks of this host with one each"]
    told = []
    for who, placement in placed.items():
        way = way_of(Question("cuda", _LONG, placement, Operation("all_reduce", "sum", "float32")))
        limit = f"up to {SHORT >> 10} KiB through the memory of the host, unless the GPU is idle"
        shorter = f" ({limit})" if way is Way.EXECUTOR else ""
        told.append(f"{who}: {way.value}{shorter}")
    return "; ".join(told)


def _obstacles(situation: Situation) -> Iterator[Finding]:
    topic = "GPUs"
    for name in _ALLOCATORS:
        if "expandable_segments:true" in situation.env.get(name, "").lower().replace(" ", ""):
            yield warning(
                topic,
                f"{name} has expandable_segments: torch's memory cannot be opened by other ranks",
                "Its tensors are copied inside the GPU before and after an operation; short ones and messages go "
                "through the memory of the host, which is slower. Leave that option away.",
            )
    if situation.env.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS.exists():
        yield warning(
            topic,
            "MPS is in use: ranks that share a GPU share one context",
            "It makes short kernels of several ranks quicker. But a rank that faults or dies in a kernel ends all "
            "others on that GPU; without MPS they get PeerLost.",
        )
    if any(path.exists() for path in _CONTAINER):
        yield ok(
            topic,
            "this is a container: ranks in it share GPUs as usual, but with ranks in other containers of this host "
            "only if all were started with --ipc=host and --pid=host",
        )


def _memory(known: CudaDriver, count: int) -> Iterator[Finding]:
    """Whether processes can open each other's memory on a GPU, and GPUs each other's."""
    topic = "GPUs"
    if not _exports(known):
        yield warning(
            topic,
            "memory of the GPU cannot be given to other processes (CUDA IPC)",
            "Arrays of ranks that share it go through the memory of the host, which is slower. Some virtual machines "
            "and containers forbid it; start containers with --ipc=host.",
        )
    apart = [pair for pair in combinations(range(count), 2) if not known.reaches(*pair)]
    if apart:
        shown = ", ".join(f"{one} and {other}" for one, other in apart[:4]) + (", …" if len(apart) > 4 else "")
        yield ok(topic, f"no peer access between GPUs {shown}: NCCL moves their arrays through the memory of the host")


def _exports(known: CudaDriver) -> bool:
    with contextlib.suppress(CudaError), known.using(0):
        address = known.allocate(64)
        try:
            known.export(address)
        finally:
            known.free(address)
        return True
    return False
