"""The kernels, loaded to one GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from ..driver import CudaDriver
from .plan import THREADS, Piece, launches

__all__ = ["Kernels", "kernels_of"]

PTX = Path(__file__).with_name("combine.ptx")


class Kernels:
    """The kernels on the current GPU. The driver compiles them when they are first made there."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._module = driver.load(PTX.read_bytes())
        self._function = functools.cache(functools.partial(driver.function, self._module))

    def prepare(
        self, dtype: str, itemsize: int, pieces: Sequence[Piece], op: int, divisor: float
    ) -> list[Callable[[int], None]]:
        """The launches that carry out some pieces: functions that put them on a stream.

        Args:
            dtype: NumPy's name, or `bfloat16`.
            op: The core's number of the reduction.
            divisor: The number of ranks of a mean; 1 otherwise.
        """
        function = self._function(f"combine_{dtype}")
        return [
            self._driver.prepare_launch(function, launch.grid, THREADS, launch.parameter)
            for launch in launches(pieces, itemsize, op, divisor)
        ]


@functools.cache
def kernels_of(driver: CudaDriver, device: int) -> Kernels:
    """The kernels of a GPU in this process: to compile them takes a second. The GPU is the current one."""
    del device  # the current one
    return Kernels(driver)
