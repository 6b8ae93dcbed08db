"""GPUs: which there are, which way arrays on them go, and what makes that slower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.cuda.driver import CudaDriver, driver
from phalanx.errors import BackendUnavailable, PhalanxError
from phalanx.group.engines.cuda.routing import SHORT

from .findings import Finding, Situation, check, ok, warning

__all__ = ["gpus"]

_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MPS = Path("/tmp/nvidia-mps")  # noqa: S108 - where its daemon puts its pipes, unless told otherwise


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
    yield from _obstacles(situation, known)


def _listed(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"  # noqa: RUF001


def _ways(names: list[str]) -> str:
    """The way of a long array, for ranks that share a GPU and for those that do not."""
    shared = f"arrays above {SHORT >> 10} KiB by one kernel of the lowest rank"
    if len(names) == 1:
        return f"ranks of one host that share it: {shared}, shorter ones through the host"
    return f"ranks that share one: {shared}; ranks on several: through the memory of the host"


def _obstacles(situation: Situation, _known: CudaDriver) -> Iterator[Finding]:
    topic = "GPUs"
    for name in _ALLOCATORS:
        if "expandable_segments:true" in situation.env.get(name, "").lower().replace(" ", ""):
            yield warning(
                topic,
                f"{name} has expandable_segments: torch's memory cannot be opened by other ranks",
                "Its tensors go through the memory of the host, which is slower. Leave that option away.",
            )
    if situation.env.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS.exists():
        yield warning(
            topic,
            "MPS is in use: ranks that share a GPU share one context",
            "It makes short kernels of several ranks quicker. But a rank that faults or dies in a kernel ends all "
            "others on that GPU; without MPS they get PeerLost.",
        )
