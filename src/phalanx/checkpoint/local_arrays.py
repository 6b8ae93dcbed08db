"""Arrays of every library as memory that this rank holds of a tensor: to write it to a file, or to fill it from one."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, UnsupportedArray
from .dtypes import item_size, numpy_dtype, numpy_name, torch_dtype, torch_name
from .regions import Region, whole
from .shards import Shard
from .tensors_file import raw_dtype
from .tree import library_of

__all__ = ["Held", "HeldPart", "Target", "held", "new_target", "rows_of", "target_of"]


class HeldPart(NamedTuple):
    """A box of a tensor, and its bytes on this rank."""

    region: Region
    memory: memoryview


class Held(NamedTuple):
    """A tensor, and what this rank has of it."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[HeldPart]
    everywhere: bool
    """True if all ranks have all of it: then they share the work of writing it."""
    axes: dict[int, str] = {}  # noqa: RUF012  (a default that nobody changes)


def held(value: Any) -> Held:
    """The parts of a tensor that this rank has, and has to write.

    Raises:
        UnsupportedArray: It cannot be saved.
    """
    if isinstance(value, Shard):
        dtype, memory = _bytes_of(value.array)
        writes = bool(memory) and (value.replicas is None or value.replicas.rank == 0)
        return Held(dtype, value.shape, [HeldPart(value.region, memory)] if writes else [], False, value.axes)
    if _is_dtensor(value):
        return _held_of_dtensor(value)
    if library_of(value) == "jax" and not getattr(value, "is_fully_addressable", True):
        return _held_of_jax(value)
    dtype, memory = _bytes_of(value)
    shape = tuple(map(int, value.shape))
    return Held(dtype, shape, [HeldPart(whole(shape), memory)], True)


def rows_of(part: HeldPart, region: Region, dtype: str) -> HeldPart:
    """Some rows of a part."""
    row = item_size(dtype) * math.prod(region.shape[1:])
    first = region.offset[0] - part.region.offset[0]
    return HeldPart(region, part.memory[first * row : (first + region.shape[0]) * row])


def _bytes_of(array: Any) -> tuple[str, memoryview]:
    """The dtype of an array, and its elements one after the other."""
    if library_of(array) == "torch":
        import torch

        if _is_plain(array):  # the same as below in fewer steps, for models of thousands of small tensors
            return torch_name(array.dtype), array.detach().numpy().data.cast("B")
        if not isinstance(array, torch.Tensor) or array.layout != torch.strided or array.is_quantized:
            raise UnsupportedArray(f"a {getattr(array, 'layout', type(array).__name__)} tensor cannot be saved")
        if array.is_meta:
            raise UnsupportedArray("a tensor on the meta device has no values to save")
        dtype = torch_name(array.dtype)
        plain = array.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return dtype, plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArray("a masked array cannot be saved (save its data and its mask)")
    found = np.ascontiguousarray(np.asarray(array))
    if found.dtype.byteorder not in "=|" and not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    dtype = numpy_name(found.dtype)
    return dtype, found.reshape(-1).view(np.uint8).data if found.size else memoryview(b"")


def _is_plain(array: Any) -> bool:
    """True if the memory of a torch tensor is what NumPy sees of it."""
    import torch

    return (
        type(array) in (torch.Tensor, torch.nn.Parameter)
        and array.dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32)
        and array.device.type == "cpu"
        and array.layout == torch.strided
        and array.is_contiguous()
        and not array.is_neg()
        and array.numel() > 0
    )


# -- tensors that are spread by torch and JAX ------------------------------------------------------------------------


def _is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _region_of_dtensor(value: Any) -> Region:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Region(tuple(offset), tuple(shape))


def _held_of_dtensor(value: Any) -> Held:
    if any(placement.is_partial() for placement in value.placements):
        raise UnsupportedArray("a DTensor with partial sums cannot be saved (redistribute it first)")
    dtype, memory = _bytes_of(value.to_local())
    place = value.device_mesh.get_coordinate()
    # Of several ranks with the same part, the first writes it.
    writes = place is not None and all(
        index == 0 for index, placement in zip(place, value.placements, strict=True) if placement.is_replicate()
    )
    parts = [HeldPart(_region_of_dtensor(value), memory)] if writes else []
    return Held(dtype, tuple(value.shape), parts, False)


def _held_of_jax(value: Any) -> Held:
    parts = []
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            _, memory = _bytes_of(shard.data)
            offset = tuple(int(index.start or 0) for index in shard.index)
            parts.append(HeldPart(Region(offset, tuple(shard.data.shape)), memory))
    return Held(numpy_name(np.dtype(value.dtype)), tuple(value.shape), parts, False)


# -- loading ---------------------------------------------------------------------------------------------------------


class Target:
    """A place for a box of a tensor.

    Args:
        region: The box.
        dtype: Of the checkpoint.
        memory: Where the elements go, as raw numbers of their size, in the shape of the box.
        finish: Gives the caller's array, or a new one, once the memory is filled.
    """

    def __init__(
        self, region: Region, dtype: str, memory: npt.NDArray[Any] | None, finish: Callable[[npt.NDArray[Any]], Any]
    ) -> None:
        self.region = region
        self.memory = np.empty(region.shape, raw_dtype(dtype)) if memory is None else memory
        self._finish = finish

    def part(self, region: Region) -> npt.NDArray[Any]:
        """The memory of a box inside this one."""
        place: Any = (*region.slices_in(self.region), ...)  # a view, even if there are no dims
        found: npt.NDArray[Any] = self.memory[place]
        return found

    def finish(self) -> Any:
        """The array."""
        return self._finish(self.memory)

    def then(self, change: Callable[[Any], Any]) -> Target:
        """The same place; its array is given to `change` first, whose result the program gets."""
        return Target(self.region, "", self.memory, lambda memory: change(self._finish(memory)))


def new_target(dtype: str, library: str, region: Region) -> Target:
    """A new array of the library that was saved; of NumPy, if that library is not installed."""
    if library == "torch" and importlib.util.find_spec("torch") is not None:
        import torch

        return _torch_target(torch.empty(region.shape, dtype=torch_dtype(dtype)), dtype, region)
    wanted = numpy_dtype(dtype)
    if library == "jax" and importlib.util.find_spec("jax") is not None:
        import jax.numpy

        return Target(region, dtype, None, lambda memory: jax.numpy.asarray(memory.view(wanted)))
    return Target(region, dtype, None, lambda memory: memory.view(wanted))


def target_of(like: Any, dtype: str, shape: tuple[int, ...], name: str) -> Target:
    """The program's own array, which is changed in place where it can be.

    Raises:
        CheckpointError: It does not have the shape that was saved.
        UnsupportedArray: It cannot be filled.
    """
    expected = tuple(like.shape)
    if expected != shape:
        raise CheckpointError(f"{name!r} was saved with shape {shape}, like has {expected}", tensor=name)
    if isinstance(like, Shard):
        local = like.array if like.shape or not like.region.size else like.array.reshape(-1)
        region = like.region if like.shape else Region((0,), tuple(local.shape))
        return _array_target(local, dtype, region).then(
            lambda array: Shard(array, like.shape, like.offset, axes=like.axes, replicas=like.replicas)
        )
    if _is_dtensor(like):
        return _torch_target(like.to_local(), dtype, _region_of_dtensor(like)).then(lambda _local: like)
    return _array_target(like, dtype, whole(shape))


def _array_target(like: Any, dtype: str, region: Region) -> Target:
    library = library_of(like)
    if library == "torch":
        return _torch_target(like, dtype, region)
    if library == "jax":
        import jax

        return Target(
            region,
            dtype,
            None,
            lambda memory: jax.device_put(memory.view(numpy_dtype(dtype)).astype(like.dtype), like.sharding),
        )
    return _numpy_target(like, dtype, region)


def _numpy_target(like: Any, dtype: str, region: Region) -> Target:
    array = np.asarray(like)
    in_place = isinstance(like, np.ndarray) and array.flags.writeable
    if in_place and array.flags.c_contiguous and array.dtype.isnative and array.dtype.name == dtype:
        raw = array.reshape(-1).view(raw_dtype(dtype)).reshape(region.shape)
        return Target(region, dtype, raw, lambda _memory: like)

    def finish(memory: npt.NDArray[Any]) -> Any:
        found = memory.view(numpy_dtype(dtype))
        if not in_place:
            return found.astype(array.dtype)[()]
        like[...] = found
        return like

    return Target(region, dtype, None, finish)


def _torch_target(tensor: Any, dtype: str, region: Region) -> Target:
    import torch

    plain = tensor.detach()
    raw = raw_dtype(dtype)
    if torch_name(tensor.dtype) == dtype and plain.is_contiguous() and plain.device.type == "cpu" and plain.numel():
        memory = plain.view(-1).view(torch.uint8).numpy().view(raw).reshape(region.shape)
        return Target(region, dtype, memory, lambda _memory: tensor)

    def finish(memory: npt.NDArray[Any]) -> Any:
        if plain.numel():
            flat = torch.from_numpy(memory.reshape(-1).view(np.uint8)).view(torch_dtype(dtype))
            plain.copy_(flat.reshape(region.shape))
        return tensor

    return Target(region, dtype, None, finish)
