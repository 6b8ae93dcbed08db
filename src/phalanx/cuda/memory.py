"""New memory on a GPU that other processes can open, as an array of the library that the program uses."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from typing import Any

import numpy as np

from ..arguments import shown
from ..errors import BackendUnavailable, UsageError
from .driver import CudaError, driver

__all__ = ["empty_on_gpu"]

_DEVICE = re.compile(r"cuda(?::([0-9]{1,3}))?")


class _Allocation:
    """Memory of the driver's own, by the CUDA array interface. It is given back with the object."""

    def __init__(self, device: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._driver = driver()
        self._device = device
        with self._driver.using(device):
            self._address = self._driver.allocate(max(1, math.prod(shape) * dtype.itemsize))
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (self._address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, CudaError), self._driver.using(self._device):
            self._driver.free(self._address)


def empty_on_gpu(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Any:
    """A new tensor of torch, or array of CuPy if the program has not imported torch. Its values are arbitrary.

    Args:
        device: `"cuda"`, which is the library's current one, or `"cuda:1"`.

    Raises:
        UsageError: There is no such device, or torch has no such dtype.
        BackendUnavailable: There is no driver, or neither library.
    """
    found = _DEVICE.fullmatch(device)
    if found is None:
        raise UsageError(f"device={shown(device)} is not valid (expected 'cuda', 'cuda:0', 'cpu' or None)")
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is None and cupy is None:
        raise BackendUnavailable("an array on a GPU is one of torch or CuPy: import the one that you use first")
    count = driver().device_count
    if torch is not None:
        number = int(found[1]) if found[1] else torch.cuda.current_device()
    else:
        assert cupy is not None
        number = int(found[1]) if found[1] else cupy.cuda.runtime.getDevice()
    if number >= count:
        raise UsageError(f"device={shown(device)} is not valid (this process sees {count} GPUs)")
    is_short = dtype.name == "bfloat16"
    made = _Allocation(number, shape, np.dtype(np.int16) if is_short else dtype)
    if torch is not None:
        tensor = torch.as_tensor(made, device=f"cuda:{number}")
        return tensor.view(torch.bfloat16) if is_short else tensor
    assert cupy is not None
    with cupy.cuda.Device(number):
        return cupy.asarray(made)
