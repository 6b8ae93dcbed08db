"""torch.distributed on CPU tensors that share the memory of NumPy arrays, by the name of one of its backends."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

import numpy.typing as npt

from .library import Call, LibraryLacks, pingpong, shift
from .operations import ROOT, Arrays

__all__ = ["TorchLibrary", "open_world"]


class TorchLibrary:
    """A world of torch.distributed."""

    def __init__(self, torch: Any, backend: str, timeout: float) -> None:
        self._torch, self.dist, self.backend = torch, torch.distributed, backend
        torch.set_num_threads(1)
        self.dist.init_process_group(backend, timeout=dt.timedelta(seconds=timeout))
        self.rank: int = self.dist.get_rank()
        self.size: int = self.dist.get_world_size()
        self.version = f"torch {torch.__version__}"
        self.barrier: Call = self.dist.barrier
        self.close = self.dist.destroy_process_group

    def call(self, operation: str, arrays: Arrays) -> Call:
        dist, root = self.dist, self.rank == ROOT
        x, out = self.tensor(arrays.x), None if arrays.out is None else self.tensor(arrays.out)
        if operation == "pingpong":
            return pingpong(self.rank, dist.send, dist.recv, x, out)
        if operation in ("isend_irecv", "sendrecv"):  # the second as the first: torch has no call for it
            after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
            return shift(partial(dist.irecv, out, before), partial(dist.isend, x, after))
        calls: dict[str, Call] = {
            "all_reduce": partial(dist.all_reduce, x),
            "reduce": partial(dist.reduce, x, ROOT),
            "broadcast": partial(dist.broadcast, x, ROOT),
            "all_gather": partial(self._either("all_gather_single", "all_gather_into_tensor"), out, x),
            "gather": partial(dist.gather, x, self.parts(out) if root else None, ROOT),
            "scatter": partial(dist.scatter, out, self.parts(x) if root else None, ROOT),
            "reduce_scatter": partial(self._either("reduce_scatter_single", "reduce_scatter_tensor"), out, x),
            "all_to_all": partial(dist.all_to_all_single, out, x),
            "barrier": dist.barrier,
        }
        return calls[operation]

    def tensor(self, array: npt.NDArray[Any]) -> Any:
        """A tensor in the array's memory.

        Raises:
            LibraryLacks: torch has no such dtype.
        """
        try:
            return self._torch.from_numpy(array)
        except TypeError:
            raise LibraryLacks(f"torch takes no NumPy array of {array.dtype}") from None

    def parts(self, tensor: Any) -> list[Any] | None:
        """One view of the tensor for each rank."""
        return None if tensor is None else list(tensor.chunk(self.size))

    def _either(self, new: str, old: str) -> Any:
        """A function that newer versions of torch have under another name; there the old one warns."""
        return getattr(self.dist, new, None) or getattr(self.dist, old)


def open_world(timeout: float, backend: str) -> TorchLibrary:
    """Joins by the variables of this process, on torch's backend of this name."""
    import torch
    import torch.distributed

    return TorchLibrary(torch, backend, timeout)
