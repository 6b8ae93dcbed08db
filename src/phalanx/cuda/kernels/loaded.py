"""The kernels, loaded to one GPU."""

from __future__ import annotations

import functools
from pathlib import Path

from ..._native import DTYPES
from ..driver import CudaDriver

__all__ = ["kernels_of"]

PTX = Path(__file__).with_name("combine.ptx")


@functools.cache
def kernels_of(driver: CudaDriver, device: int) -> list[int]:
    """The kernel for each of the core's dtypes, on a GPU in this process. To compile them takes the driver a second.

    Raises:
        CudaError: The driver cannot compile them.
    """
    with driver.using(device):
        module = driver.load(PTX.read_bytes())
        return [driver.function(module, f"combine_{dtype}") for dtype in DTYPES]
