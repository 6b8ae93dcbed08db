"""Phalanx and Gloo on CUDA tensors, which stand for NumPy arrays. A call has ended when the GPU has done it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy.typing as npt

from .library import Call, Library, LibraryLacks
from .operations import Arrays
from .with_torch import TorchLibrary

__all__ = ["open_world"]


class _CudaLibrary:
    """A library on tensors.

    Args:
        inner: Calls the library. It gets tensors in the place of arrays.
    """

    def __init__(self, torch: Any, inner: Library) -> None:
        self._torch, self._inner = torch, inner
        self.rank, self.size = inner.rank, inner.size
        self.version = f"{inner.version}, {torch.cuda.get_device_name()}"
        self.barrier, self.close = inner.barrier, inner.close
        self._stream = torch.cuda.current_stream()
        self._tensors: dict[int, Any] = {}

    def call(self, operation: str, arrays: Arrays) -> Call:
        x, out = (None if array is None else self._on_gpu(array) for array in arrays)
        call, wait = self._inner.call(operation, Arrays(x, out)), self._stream.synchronize  # type: ignore[arg-type]

        def until_done() -> None:
            call()
            wait()

        return until_done

    def to_device(self, arrays: Arrays) -> None:
        """Copies the values of arrays to the tensors that stand for them."""
        for array in arrays:
            if array is not None:
                self._tensors[id(array)].copy_(self._torch.from_numpy(array))
        self._torch.cuda.synchronize()

    def to_host(self, arrays: Arrays) -> None:
        """The reverse."""
        for array in arrays:
            if array is not None:
                self._torch.from_numpy(array).copy_(self._tensors[id(array)])

    def _on_gpu(self, array: npt.NDArray[Any]) -> Any:
        """A new tensor that stands for an array, as long as there is one."""
        try:
            tensor = self._torch.from_numpy(array).cuda()
        except TypeError:
            raise LibraryLacks(f"torch takes no NumPy array of {array.dtype}") from None
        self._tensors[id(array)] = tensor
        weakref.finalize(array, self._tensors.pop, id(array))
        return tensor


class _TensorsOfGloo(TorchLibrary):
    """Gloo on the tensors that it is given."""

    def tensor(self, array: Any) -> Any:
        """It is one."""
        return array


def open_world(timeout: float, backend: str) -> _CudaLibrary:
    """Joins by the variables of this process. Ranks take the GPUs in turn.

    Args:
        backend: `phalanx`, or `gloo` of torch.
    """
    import torch
    import torch.distributed

    from . import with_phalanx

    inner: Any = with_phalanx.open_world(timeout) if backend == "phalanx" else _TensorsOfGloo(torch, backend, timeout)
    torch.cuda.set_device(inner.rank % torch.cuda.device_count())
    return _CudaLibrary(torch, inner)
