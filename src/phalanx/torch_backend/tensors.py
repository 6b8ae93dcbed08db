"""Tensors as flat, contiguous memory that a `Group` takes, without a copy where that is possible.

`Tensor.numpy()` would do for most, but it takes from the tensor's storage that it can be resized, for good, which FSDP
needs. So the memory is looked at by its address, and the array keeps the tensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedArray

__all__ = [
    "OTHER_DTYPES",
    "PLAIN_DTYPES",
    "STRIDED",
    "TensorMemory",
    "as_tensor",
    "check_sendable",
    "fill",
    "in_place",
    "is_sparse",
    "memory_at",
    "owned",
    "plain",
    "source",
]

STRIDED = torch.strided
_BYTE = ctypes.c_char


def _named(*names: str) -> dict[Any, tuple[Any, int]]:
    """The dtypes of these names, as far as this torch has them: how NumPy calls them, and bytes per element."""
    found = {}
    for entry in names:
        name, _, stand_in = entry.partition("=")
        if hasattr(torch, name):
            dtype = np.dtype(stand_in or name)
            found[getattr(torch, name)] = (dtype, dtype.itemsize)
    return found


PLAIN_DTYPES = _named(
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
)
"""The dtypes that are the same in NumPy."""
OTHER_DTYPES = _named(
    "complex64",
    "complex128",
    "bfloat16=uint16",
    "complex32=uint32",
    "float8_e4m3fn=uint8",
    "float8_e4m3fnuz=uint8",
    "float8_e5m2=uint8",
    "float8_e5m2fnuz=uint8",
    "float8_e8m0fnu=uint8",
    "float4_e2m1fn_x2=uint8",
)
"""Those that are not, or may be conjugated on the way; moved as what has the same size."""
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_STAND_INS = {dtype: _SIGNED[size] for dtype, (stand_in, size) in OTHER_DTYPES.items() if stand_in.kind == "u"}
"""The dtypes that torch itself can turn into an array instead."""


class TensorMemory:
    """Contiguous memory that stands for a tensor: its own, or a copy that `restore` writes back."""

    __slots__ = ("_copy", "_tensor", "array")

    def __init__(self, array: Any, tensor: Any, copy: Any = None) -> None:
        self.array = array
        self._tensor = tensor
        self._copy = copy

    def restore(self) -> None:
        """Brings the tensor up to date."""
        if self._copy is not None:
            self._tensor.detach().copy_(self._copy)


def plain(tensor: Any) -> Any:
    """The tensor's own memory as a flat NumPy array if it is as simple as most are, else None."""
    known = PLAIN_DTYPES.get(tensor.dtype)
    if (
        known is None
        or not tensor.is_cpu
        or tensor.layout is not STRIDED
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return None
    return _at(tensor, *known)


def source(tensor: Any, *, reducing: bool = False) -> Any:
    """Memory to read a tensor from: its own if it is contiguous, else a copy.

    Args:
        reducing: Whether the values matter, and not only their bytes.

    Returns:
        A NumPy array, or a tensor of a dtype that `Group` must be told of (bfloat16).

    Raises:
        UnsupportedArray: It is on a device, sparse or quantized, or its values cannot be reduced.
    """
    array = plain(tensor)
    return in_place(tensor, reducing=reducing).array if array is None else array


def in_place(tensor: Any, *, reducing: bool = False) -> TensorMemory:
    """Memory to read a tensor from and to write it to.

    Raises:
        UnsupportedArray: As `source`.
    """
    array = plain(tensor)
    if array is not None:
        return TensorMemory(array, tensor)
    check_sendable(tensor)
    detached = tensor.detach()
    if detached.is_contiguous() and not detached.is_conj() and not detached.is_neg():
        return TensorMemory(_by_address(detached, reducing), detached)
    copy = torch.empty(detached.shape, dtype=detached.dtype, device="cpu")
    copy.copy_(detached)
    return TensorMemory(owned(copy, reducing), detached, copy)


def as_tensor(array: Any) -> Any:
    """A tensor on the memory of what `source` or `joined` gave."""
    return torch.as_tensor(array, device="cpu")  # wherever the program wants its own


def is_sparse(tensor: Any) -> bool:
    """Whether it is a sparse tensor in coordinate format."""
    return tensor.layout is torch.sparse_coo


def check_sendable(tensor: Any) -> None:
    """Refuses a tensor whose memory cannot be sent.

    Raises:
        UnsupportedArray: It is on a device, sparse or quantized.
    """
    if not tensor.is_cpu:
        raise UnsupportedArray(
            f"a tensor on {tensor.device} cannot be sent here, where tensors of the CPU are expected (pass all tensors "
            "of a call on one device)"
        )
    if tensor.layout is not STRIDED:
        raise UnsupportedArray(f"a tensor of layout {tensor.layout} cannot be sent (only all_reduce takes it)")
    if tensor.dtype not in PLAIN_DTYPES and tensor.dtype not in OTHER_DTYPES:
        raise UnsupportedArray(f"a tensor of {tensor.dtype} cannot be sent")


def _at(tensor: Any, dtype: Any, size: int) -> Any:
    """An array of elements of this size where a contiguous tensor has its own.

    Raises:
        UnsupportedArray: It has none, as a tensor that stands for another.
    """
    address, length = tensor.data_ptr(), tensor.numel() * size
    if not address and length:
        raise UnsupportedArray(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory to send")
    return memory_at(address, length, dtype, tensor)


def memory_at(address: int, size: int, dtype: Any, owner: Any) -> Any:
    """An array on these bytes, which keeps their owner alive."""
    memory: Any = (_BYTE * size).from_address(address)
    memory.owner = owner  # an operation may outlive what the caller holds
    return np.ndarray((size // dtype.itemsize,), dtype, memory)


def _by_address(tensor: Any, reducing: bool) -> Any:
    """The memory of a contiguous tensor of the user's."""
    dtype, size = PLAIN_DTYPES.get(tensor.dtype) or OTHER_DTYPES[tensor.dtype]
    array = _at(tensor, dtype, size)
    if not reducing or tensor.dtype not in _STAND_INS:
        return array
    _check_values(tensor)
    # A tensor of its own on the same memory: `Group` may do with its storage what it likes.
    if not array.size:
        return torch.empty(0, dtype=torch.bfloat16, device="cpu")
    return torch.frombuffer(array, dtype=torch.bfloat16)


def owned(tensor: Any, reducing: bool) -> Any:
    """The memory of a contiguous tensor that no other reference holds; the array keeps it alive."""
    flat = tensor.reshape(-1)
    if tensor.dtype not in _STAND_INS:
        return flat.numpy()
    if reducing:
        _check_values(tensor)
        return flat
    return flat.view(_STAND_INS[tensor.dtype]).numpy().view(OTHER_DTYPES[tensor.dtype][0])


def _check_values(tensor: Any) -> None:
    if tensor.dtype != torch.bfloat16:
        raise UnsupportedArray(f"a tensor of {tensor.dtype} cannot be reduced (convert it to float32 or bfloat16)")


def fill(tensor: Any, values: Any) -> None:
    """Copies flat values to a tensor."""
    memory = in_place(tensor)
    memory.array[:] = values
    memory.restore()
