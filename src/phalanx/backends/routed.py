"""The mesh with a fixed choice of how arrays on a GPU move. `phalanx.init()` chooses by itself, for each operation.

Arrays of the host, objects, messages and everything that ranks agree on go as on the mesh, whichever it is.
"""

from __future__ import annotations

from typing import Literal

from ..config import Options, detect, options_of, timeouts
from ..cuda.driver import CudaError, driver
from ..cuda.nccl import nccl
from ..errors import BackendUnavailable
from ..types import Address
from .base import GpuChoice
from .mesh.backend import MeshBackend
from .mesh.world import MeshWorld

__all__ = ["HybridBackend", "NcclBackend", "UccBackend"]


class UccBackend(MeshBackend):
    """All ways of arrays on a GPU, chosen for each operation by where the array lies, as `phalanx.init()` does.

    Without a GPU it is the mesh.

    Args:
        rank: This rank; what is not given is found in the launcher's variables, as by `phalanx.init`.
        world_size: How many there are.
        master: `"host:port"` where rank 0 can be met.
        token: The job's secret.
        auth: `"none"` runs without a token.
        timeout: Seconds for forming the world, and the default of every operation.
        options: Everything else.

    Raises:
        ConfigError: The job is described in a way that cannot work.
        RendezvousError: The world did not form.
    """

    gpu_choice: GpuChoice = "ucc"

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        master: str | Address | None = None,
        token: str | bytes | None = None,
        auth: Literal["token", "none"] = "token",
        timeout: float | None = None,
        options: Options | None = None,
    ) -> None:
        self._check_software()
        launch = detect(rank=rank, world_size=world_size, master=master, token=token)
        resolved, times = options_of(options).resolve(), timeouts(timeout)
        self._start(MeshWorld(launch, auth=auth, timeout=times.meeting, options=resolved), times)

    def _check_software(self) -> None:
        """Refuses to start without what every array on a GPU would need."""


class HybridBackend(UccBackend):
    """NCCL for arrays on a GPU, and the memory of the host for what NCCL lacks. Each rank needs a GPU of its own.

    Args:
        As for `UccBackend`.

    Raises:
        BackendUnavailable: There is no GPU, no nccl4py or no NCCL; says what to install.
        ConfigError, RendezvousError: As `UccBackend`.
    """

    gpu_choice: GpuChoice = "hybrid"

    def _check_software(self) -> None:
        name = type(self).__name__
        instead = "phalanx.init() needs neither a GPU nor NCCL"
        try:
            count = driver().device_count
        except (BackendUnavailable, CudaError) as error:
            raise BackendUnavailable(f"{name} moves arrays on NVIDIA GPUs, but {error} ({instead})") from None
        if not count:
            raise BackendUnavailable(
                f"{name} moves arrays on NVIDIA GPUs, but this process sees none (is CUDA_VISIBLE_DEVICES empty?); "
                f"{instead}"
            )
        try:
            nccl()
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{name} moves arrays by NCCL, but {error}; {instead}") from None


class NcclBackend(HybridBackend):
    """NCCL for arrays on a GPU, and nothing else: what NCCL lacks is refused. Each rank needs a GPU of its own.

    `scatter`, `scan`, `argmin`, `argmax` and messages are no collectives of NCCL and go through the memory of the host.

    Args:
        As for `UccBackend`.

    Raises:
        BackendUnavailable: There is no GPU, no nccl4py or no NCCL; says what to install.
        ConfigError, RendezvousError: As `UccBackend`.
    """

    gpu_choice: GpuChoice = "nccl"
