"""torch.distributed on CPU tensors that share the memory of NumPy arrays: on Gloo, or on Phalanx's plug-in."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .library import Call, Unsupported, pingpong
from .operations import ROOT, Arrays

__all__ = ["open_world"]


class _Torch:
    def __init__(self, torch: Any, backend: str, timeout: float) -> None:
        self._torch, self._dist, self._backend = torch, torch.distributed, backend
        torch.set_num_threads(1)
        self._dist.init_process_group(backend, timeout=dt.timedelta(seconds=timeout))
        self.rank: int = self._dist.get_rank()
        self.size: int = self._dist.get_world_size()
        self.version = f"torch {torch.__version__}"
        self.barrier: Call = self._dist.barrier
        self.close = self._dist.destroy_process_group

    def empty(self, count: int, dtype: np.dtype[Any], in_segment: bool) -> npt.NDArray[Any]:
        return np.empty(count, dtype)

    def call(self, operation: str, arrays: Arrays) -> Call:
        dist, root = self._dist, self.rank == ROOT
        x, out = self._tensor(arrays.x), None if arrays.out is None else self._tensor(arrays.out)
        if operation == "pingpong":
            return pingpong(self.rank, dist.send, dist.recv, x, out)
        calls: dict[str, Call] = {
            "all_reduce": partial(dist.all_reduce, x),
            "reduce": partial(dist.reduce, x, ROOT),
            "broadcast": partial(dist.broadcast, x, ROOT),
            "all_gather": partial(self._either("all_gather_single", "all_gather_into_tensor"), out, x),
            "gather": partial(dist.gather, x, self._parts(out) if root else None, ROOT),
            "scatter": partial(dist.scatter, out, self._parts(x) if root else None, ROOT),
            "reduce_scatter": partial(self._either("reduce_scatter_single", "reduce_scatter_tensor"), out, x),
            "all_to_all": partial(dist.all_to_all_single, out, x),
            "barrier": dist.barrier,
        }
        return calls[operation] if operation in calls else self._on_lists(operation, x, out)

    def _on_lists(self, operation: str, x: Any, out: Any) -> Call:
        """An operation on tensors that lie apart, as those of most programs do. The first call is the one that is
        checked, and fills them from `x` and `out` from them.
        """
        if operation == "all_to_all_list" and self._backend == "gloo" and not hasattr(self._dist, "all_gather_single"):
            raise Unsupported("Gloo has no all_to_all on lists before torch 2.13")
        dist, (x_parts, out_parts) = self._dist, ([part.clone() for part in self._parts(t) or ()] for t in (x, out))
        calls: dict[str, Call] = {
            "all_gather_list": partial(dist.all_gather, out_parts, x),
            "reduce_scatter_list": partial(dist.reduce_scatter, out, x_parts),
            "all_to_all_list": partial(dist.all_to_all, out_parts, x_parts),
        }
        call, is_checked = calls[operation], False

        def checked_once() -> None:
            nonlocal is_checked
            if is_checked:
                call()
                return
            is_checked = True
            for copy, part in zip(x_parts, self._parts(x) or (), strict=True):
                copy.copy_(part)
            call()
            if operation != "reduce_scatter_list":
                for copy, part in zip(out_parts, self._parts(out) or (), strict=True):
                    part.copy_(copy)

        return checked_once

    def _tensor(self, array: npt.NDArray[Any]) -> Any:
        try:
            return self._torch.from_numpy(array)
        except TypeError:
            raise Unsupported(f"torch takes no NumPy array of {array.dtype}") from None

    def _parts(self, tensor: Any) -> list[Any] | None:
        return None if tensor is None else list(tensor.chunk(self.size))

    def _either(self, new: str, old: str) -> Any:
        """A function that newer versions of torch have under another name; there the old one warns."""
        return getattr(self._dist, new, None) or getattr(self._dist, old)


def open_world(timeout: float, backend: str) -> _Torch:
    """Joins by the variables of this process, on torch's backend of this name."""
    import torch
    import torch.distributed

    return _Torch(torch, backend, timeout)
