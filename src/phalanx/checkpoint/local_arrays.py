"""Arrays of every library as memory that this rank holds of a tensor: to write it to a file, or to fill it from one."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, UnsupportedArray
from .dtypes import item_size, numpy_dtype, numpy_name, torch_dtype, torch_name, width_of
from .regions import Region, whole
from .shards import Shard
from .tensors_file import raw_dtype
from .tree import library_of

__all__ = ["Held", "HeldPart", "Target", "bytes_of_many", "held", "new_target", "parts_of", "rows_of", "target_of"]

_SMALL = 64 << 10
"""Bytes up to which a tensor is copied together with others, rather than written from where it lies."""


class HeldPart(NamedTuple):
    """A box of a tensor, and its bytes on this rank."""

    region: Region
    memory: memoryview


class Held(NamedTuple):
    """A tensor of which this rank has something. Its memory is not looked at yet: `parts_of` does that."""

    value: Any
    """The array, or the part of one, of any library."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    size: int
    """Its bytes."""
    everywhere: bool
    """True if all ranks have all of it: then they share the work of writing it."""
    axes: Mapping[int, str]


def held(value: Any) -> Held:
    """The tensor that a value is, or is a part of.

    Raises:
        UnsupportedArray: It cannot be saved.
    """
    if _is_plain(value):  # the same as below in fewer steps, for models of thousands of small tensors
        dtype = _torch_dtype_of(value.dtype, value.layout, value.is_meta)
        return Held(value, dtype, tuple(value.shape), value.nbytes, True, {})
    array, everywhere, axes = value, True, {}
    if isinstance(value, Shard):
        array, everywhere, axes = value.array, False, value.axes
    elif _is_dtensor(value):
        everywhere = False
        if any(placement.is_partial() for placement in value.placements):
            raise UnsupportedArray("a DTensor with partial sums cannot be saved (redistribute it first)")
    elif _is_spread_by_jax(value):
        everywhere = False
    dtype, shape = _dtype_of(array), tuple(value.shape)
    return Held(value, dtype, shape, math.prod(shape) * item_size(dtype), everywhere, axes)


def parts_of(tensor: Held) -> list[HeldPart]:
    """The parts of a tensor that this rank has, and that no other rank writes."""
    value = tensor.value
    if tensor.everywhere:
        return [HeldPart(whole(tensor.shape), bytes_of(value))]
    if isinstance(value, Shard):
        memory = bytes_of(value.array)
        writes = bool(memory) and (value.replicas is None or value.replicas.rank == 0)
        return [HeldPart(value.region, memory)] if writes else []
    return _parts_of_dtensor(value) if _is_dtensor(value) else _parts_of_jax(value)


def rows_of(part: HeldPart, region: Region, dtype: str) -> HeldPart:
    """Some rows of a part."""
    row = item_size(dtype) * math.prod(region.shape[1:])
    first = region.offset[0] - part.region.offset[0]
    return HeldPart(region, part.memory[first * row : (first + region.shape[0]) * row])


def _dtype_of(array: Any) -> str:
    if library_of(array) == "torch":
        layout = getattr(array, "layout", type(array).__name__)  # a module may have dtype and shape, too
        return _torch_dtype_of(array.dtype, layout, getattr(array, "is_meta", False))
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArray("a masked array cannot be saved (save its data and its mask)")
    try:
        return numpy_name(np.dtype(array.dtype))
    except TypeError:  # keys of random numbers in JAX
        raise UnsupportedArray(f"dtype {array.dtype} cannot be saved (expected numbers or bool)") from None


@functools.cache
def _torch_dtype_of(dtype: Any, layout: Any, is_meta: bool) -> str:
    if str(layout) != "torch.strided":
        raise UnsupportedArray(f"a {layout} tensor cannot be saved")
    if is_meta:
        raise UnsupportedArray("a tensor on the meta device has no values to save")
    return torch_name(dtype)


def bytes_of(array: Any) -> memoryview:
    """The elements of an array, one after the other. Nothing is copied that lies in order already."""
    if library_of(array) == "torch":
        import torch

        plain = array.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else memoryview(b"")
    found = np.ascontiguousarray(np.asarray(array))
    if not found.dtype.isnative:
        found = found.astype(found.dtype.newbyteorder("="))
    return found.reshape(-1).view(np.uint8).data if found.size else memoryview(b"")


def bytes_of_many(tensors: Sequence[Held]) -> list[memoryview]:
    """The elements of each tensor, all of which this rank has.

    Small ones of torch are copied one behind the other by a single call: to look at each takes longer.
    """
    packed: dict[str, list[Any]] = {}
    for tensor in tensors:
        if _may_be_packed(tensor):
            packed.setdefault(tensor.dtype, []).append(tensor.value)
    memories = {dtype: _packed(values) for dtype, values in packed.items()}
    ends = dict.fromkeys(memories, 0)
    found = []
    for tensor in tensors:
        if _may_be_packed(tensor):
            begin = ends[tensor.dtype]
            ends[tensor.dtype] = begin + tensor.size
            found.append(memories[tensor.dtype][begin : begin + tensor.size])
        else:
            found.append(bytes_of(tensor.value))
    return found


def _may_be_packed(tensor: Held) -> bool:
    return tensor.size <= _SMALL and _is_plain(tensor.value) and tensor.value.is_cpu


def _is_plain(value: Any) -> bool:
    """True for torch's own tensors, but not for classes derived from them, which may have memory of another kind."""
    kind: Any = type(value)
    return _is_plain_type(kind)


@functools.cache
def _is_plain_type(kind: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and kind in (torch.Tensor, torch.nn.Parameter)


def _packed(tensors: list[Any]) -> memoryview:
    import torch

    with torch.no_grad():
        return bytes_of(torch._utils._flatten_dense_tensors(tensors))


# -- tensors that are spread by torch and JAX ------------------------------------------------------------------------


def _is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _region_of_dtensor(value: Any) -> Region:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return Region(tuple(offset), tuple(shape))


def _parts_of_dtensor(value: Any) -> list[HeldPart]:
    place = value.device_mesh.get_coordinate()
    # Of several ranks with the same part, the first writes it.
    writes = place is not None and all(
        index == 0 for index, placement in zip(place, value.placements, strict=True) if placement.is_replicate()
    )
    return [HeldPart(_region_of_dtensor(value), bytes_of(value.to_local()))] if writes else []


def _is_spread_by_jax(value: Any) -> bool:
    return library_of(value) == "jax" and not getattr(value, "is_fully_addressable", True)


def _parts_of_jax(value: Any) -> list[HeldPart]:
    parts = []
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(int(index.start or 0) for index in shard.index)
            parts.append(HeldPart(Region(offset, tuple(shard.data.shape)), bytes_of(shard.data)))
    return parts


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
        CheckpointError: It does not have the shape that was saved, or would lose more than digits.
        UnsupportedArray: It cannot be filled.
    """
    expected = tuple(like.shape)
    if expected != shape:
        raise CheckpointError(f"{name!r} was saved with shape {shape}, like has {expected}", tensor=name)
    mine = _dtype_of(like.array if isinstance(like, Shard) else like)
    if width_of(mine) < width_of(dtype):
        raise CheckpointError(f"{name!r} was saved as {dtype}, which {mine} of like cannot hold", tensor=name)
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
