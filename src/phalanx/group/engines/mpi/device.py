"""Arrays in the memory of a GPU, straight into an MPI that takes them (a CUDA-aware one). No GPU library is imported.

Only synchronous calls with the group's own timeout come here: they are what training loops make. Everything else goes
through the memory of the host, as on any other backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ....errors import UnsupportedArray, UnsupportedOp, UsageError
from ...data.reduction import name_of
from ...fast_path import AnyFastPath
from ...members import as_member
from ...running_collective import RunningCollective
from ...tracking.call import CollectiveCall
from ..base import RunCollective

if TYPE_CHECKING:
    from .engine import MpiEngine

__all__ = ["MpiDeviceFastPath"]


class _Device:
    """An array in the memory of a GPU, as its interface describes it.

    Raises:
        UnsupportedArray: It cannot be handed to MPI as it is.
    """

    def __init__(self, x: Any) -> None:
        try:
            found: dict[str, Any] = x.__cuda_array_interface__
        except (AttributeError, TypeError, RuntimeError) as error:
            raise UnsupportedArray(f"this {type(x).__name__} cannot be handed to MPI: {error}") from None
        self.dtype = np.dtype(found["typestr"])
        self.shape: tuple[int, ...] = tuple(found["shape"])
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.start = int(found["data"][0])
        self.nbytes = self.size * self.dtype.itemsize
        strides = found.get("strides")
        expected = np.cumprod([self.dtype.itemsize, *reversed(self.shape[1:])])[::-1]
        if strides is not None and self.size and tuple(strides) != tuple(expected):
            raise UnsupportedArray("an array on a GPU must be contiguous to be handed to MPI (make it so first)")


def _is_on_device(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and hasattr(type(x), "__cuda_array_interface__") and _says_so(x)


def _says_so(x: Any) -> bool:
    """True if it is on a GPU now: a torch tensor has the attribute wherever it lies."""
    torch = sys.modules.get("torch")
    return bool(x.is_cuda) if torch is not None and isinstance(x, torch.Tensor) else True


def _wait_for_device(x: Any) -> None:
    """Waits until the array is computed: MPI does not know of streams."""
    library = type(x).__module__.partition(".")[0]
    if library == "torch":
        sys.modules["torch"].cuda.current_stream(x.device).synchronize()
    elif library == "cupy":
        sys.modules["cupy"].cuda.get_current_stream().synchronize()


class MpiDeviceFastPath:
    """The fast path of a group whose MPI takes arrays on a GPU; those in ordinary memory go on to `plain`.

    Args:
        rank: This rank in the group.
        size: How many ranks the group has.
        run: Must not keep the group alive.
    """

    def __init__(self, rank: int, size: int, run: RunCollective) -> None:
        self._rank = rank
        self._size = size
        self._run_collective = run
        self.plain: AnyFastPath | None = None

    @property
    def paused(self) -> int:
        """As of the fast path of plain arrays."""
        return 0 if self.plain is None else self.plain.paused

    @paused.setter
    def paused(self, count: int) -> None:
        if self.plain is not None:
            self.plain.paused = count

    def barrier(self, timeout: Any = None, later: bool = False) -> Any:
        """No array."""
        return None if self.plain is None else self.plain.barrier(timeout, later)

    def all_reduce(self, x: Any, op: Any, timeout: Any = None, later: bool = False) -> Any:
        """In place."""
        if not _is_on_device(x):
            return None if self.plain is None else self.plain.all_reduce(x, op, timeout, later)
        if timeout is not None or later:
            return None
        return self._reduce("all_reduce", "Allreduce", x, x, name_of(op), None)

    def reduce(self, x: Any, root: int, op: Any, timeout: Any = None, later: bool = False) -> Any:
        """In place on the root."""
        if not _is_on_device(x):
            return None if self.plain is None else self.plain.reduce(x, root, op, timeout, later)
        if timeout is not None or later:
            return None
        root = as_member(root, self._size)
        name = name_of(op)
        return self._reduce("reduce", "Reduce", x, x, name, root)

    def reduce_scatter(self, x: Any, op: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out`."""
        if not _is_on_device(x):
            return None if self.plain is None else self.plain.reduce_scatter(x, op, out, timeout, later)
        if timeout is not None or later:
            return None
        name = name_of(op)
        return self._reduce("reduce_scatter", "Reduce_scatter_block", x, out, name, None)

    def broadcast(self, x: Any, root: int, timeout: Any = None, later: bool = False) -> Any:
        """In place."""
        if not _is_on_device(x):
            return None if self.plain is None else self.plain.broadcast(x, root, timeout, later)
        if timeout is not None or later:
            return None
        root = as_member(root, self._size)
        device = _Device(x)

        def body(engine: MpiEngine, running: RunningCollective) -> None:
            engine.do(running, "Bcast", [x, engine.datatype(device.dtype)], root)

        self._run("broadcast", x, device, body, root=root)
        return x

    def all_gather(self, x: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out`."""
        if not _is_on_device(x):
            return None if self.plain is None else self.plain.all_gather(x, out, timeout, later)
        if timeout is not None or later:
            return None
        return self._move("all_gather", "Allgather", x, out, self._size)

    def gather(self, x: Any, root: int, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """Never of arrays on a GPU."""
        return None if self.plain is None else self.plain.gather(x, root, out, timeout, later)

    def scatter(self, x: Any, root: int, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """Never of arrays on a GPU."""
        return None if self.plain is None else self.plain.scatter(x, root, out, timeout, later)

    def all_to_all(self, x: Any, out: Any, timeout: Any = None, later: bool = False) -> Any:
        """From `x` to `out`."""
        if not _is_on_device(x):
            return None if self.plain is None else self.plain.all_to_all(x, out, timeout, later)
        if timeout is not None or later:
            return None
        return self._move("all_to_all", "Alltoall", x, out, 1)

    def _reduce(self, verb: str, function: str, x: Any, out: Any, name: str, root: int | None) -> Any:
        device, size = _Device(x), self._size
        if name == "mean" and device.dtype.kind not in "fc":
            raise UnsupportedOp(f"op='mean' is not defined for {device.dtype.name}")
        if device.dtype.name == "float16":
            raise UnsupportedOp("MPI cannot reduce float16 in the memory of a GPU (use float32)")
        gets_it = root is None or self._rank == root
        if out is not x:
            target = _Device(out)
            _check_pair(device, target, target.size * size == device.size)

        def body(engine: MpiEngine, running: RunningCollective) -> None:
            datatype = engine.datatype(device.dtype)
            operation = engine.plain_operation(device.dtype, "sum" if name == "mean" else name)
            sent = [x, datatype] if out is not x or not gets_it else engine.in_place
            received = [out, datatype] if gets_it else None
            engine.do(running, function, sent, received, operation, *(() if root is None else (root,)))

        self._run(verb, x, device, body, reduction=name, root=root)
        if gets_it and name == "mean":
            out /= size
        return out

    def _move(self, verb: str, function: str, x: Any, out: Any, factor: int) -> Any:
        device, target = _Device(x), _Device(out)
        fits = target.size == device.size * factor and target.size % self._size == 0
        _check_pair(device, target, fits)

        def body(engine: MpiEngine, running: RunningCollective) -> None:
            datatype = engine.datatype(device.dtype)
            engine.do(running, function, [x, datatype], [out, datatype])

        self._run(verb, x, device, body)
        return out

    def _run(
        self,
        verb: str,
        x: Any,
        device: _Device,
        body: Callable[[MpiEngine, RunningCollective], None],
        *,
        reduction: str = "",
        root: int | None = None,
    ) -> None:
        _wait_for_device(x)
        call = CollectiveCall(verb, device.dtype.str, device.shape, reduction, root)
        self._run_collective(call, lambda engine, running: body(cast("MpiEngine", engine.for_host), running))


def _check_pair(source: _Device, target: _Device, fits: bool) -> None:
    if source.start < target.start + target.nbytes and target.start < source.start + source.nbytes:
        raise UsageError("x and out overlap, which MPI cannot do in the memory of a GPU (pass a copy)")
    if source.dtype != target.dtype or not fits:
        raise UsageError(
            f"out is {target.dtype.name}{list(target.shape)}, which does not fit x, {source.dtype.name}"
            f"{list(source.shape)}"
        )
