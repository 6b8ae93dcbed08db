"""The element types of a checkpoint: their names in NumPy, in torch and in a safetensors file."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..errors import UnsupportedArray

__all__ = [
    "FILE_DTYPES",
    "file_shape",
    "item_size",
    "numpy_dtype",
    "numpy_name",
    "torch_dtype",
    "torch_name",
    "width_of",
]

FILE_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",  # the format has no such type: pairs of numbers, see `file_shape`
}
"""The name in a safetensors file for each name of NumPy and torch, which are the same."""

_SIZES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Of types that NumPy itself does not have."""


@functools.cache
def item_size(name: str) -> int:
    """Bytes per element."""
    return _SIZES.get(name) or np.dtype(name).itemsize


def width_of(name: str) -> int:
    """How much a kind of numbers can hold: bool, integers, floats, complex numbers, from 0 to 3."""
    kinds = ("bool", "int", "float", "complex")
    return next(width for width, kind in enumerate(kinds) if kind in name)


def file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that the file shows: complex128 is two float64."""
    return (*shape, 2) if name == "complex128" else shape


def numpy_name(dtype: np.dtype[Any]) -> str:
    """The name of a NumPy dtype.

    Raises:
        UnsupportedArray: It has no place in a checkpoint.
    """
    name = str(dtype.name)
    if name not in FILE_DTYPES:
        raise UnsupportedArray(f"dtype {dtype} cannot be saved (expected numbers or bool)")
    return name


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name.

    Raises:
        UnsupportedArray: NumPy needs the package `ml_dtypes` for it, which is missing.
    """
    if name in _SIZES:
        try:
            import ml_dtypes
        except ImportError:
            raise UnsupportedArray(
                f"NumPy has no {name} (install ml_dtypes, or load it into torch tensors by like=)"
            ) from None
        name = getattr(ml_dtypes, name)
    found: np.dtype[Any] = np.dtype(name)
    return found


@functools.cache
def torch_name(dtype: Any) -> str:
    """The name of a torch dtype.

    Raises:
        UnsupportedArray: It has no place in a checkpoint.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in FILE_DTYPES:
        raise UnsupportedArray(f"dtype {dtype} cannot be saved (expected numbers or bool)")
    return name


def torch_dtype(name: str) -> Any:
    """The torch dtype of a name."""
    import torch

    return getattr(torch, name)
