"""The datatypes and operations of MPI, by Phalanx's names, and those that it must be taught."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...._native import reduce_into
from ....backends.mpi.library import Mpi

__all__ = ["Arithmetic", "arithmetic_of"]

_DATATYPES = {
    "bool": "C_BOOL",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
    # Not every MPI has these. They travel as what they lie in, and are combined by our own kernels.
    "float16": "UINT16_T",
    "bfloat16": "UINT16_T",
}
_OPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
_OPS_OF_BOOL = {
    "sum": "LOR",
    "prod": "LAND",
    "min": "LAND",
    "max": "LOR",
    "band": "LAND",
    "bor": "LOR",
    "bxor": "LXOR",
}


class Arithmetic:
    """MPI's datatypes and operations, by Phalanx's names."""

    def __init__(self, mpi: Mpi) -> None:
        self._module = mpi.module
        self._taught: dict[tuple[str, str], Any] = {}

    def datatype(self, dtype: np.dtype[Any] | str) -> Any:
        """MPI's datatype of the elements."""
        return getattr(self._module, _DATATYPES[_name(dtype)])

    def operation(self, dtype: np.dtype[Any] | str, step: str, *, own: bool = False) -> Any:
        """The operation that combines two arrays of this dtype.

        MPI's own `MIN` and `MAX` of floats lose a NaN on some ranks and not on others: ours let it through.

        Args:
            own: Use MPI's own operation even so.
        """
        name = _name(dtype)
        if not own and _must_be_taught(name, step):
            return self._teach(name, step)
        return getattr(self._module, (_OPS_OF_BOOL if name == "bool" else _OPS)[step])

    def _teach(self, name: str, step: str) -> Any:
        known = self._taught.get((name, step))
        if known is None:
            known = self._taught[name, step] = self._module.Op.Create(_kernel(name, step), commute=True)
        return known


@functools.cache
def arithmetic_of(mpi: Mpi) -> Arithmetic:
    """One for all groups: an MPI can be taught only a few operations."""
    return Arithmetic(mpi)


def _must_be_taught(name: str, step: str) -> bool:
    return name in ("float16", "bfloat16") or (name in ("float32", "float64") and step in ("min", "max"))


def _name(dtype: np.dtype[Any] | str) -> str:
    return dtype if isinstance(dtype, str) else dtype.name


def _kernel(name: str, step: str) -> Callable[[Any, Any, Any], None]:
    storage = np.dtype(np.uint16 if name == "bfloat16" else name)
    known = "bfloat16" if name == "bfloat16" else None

    def combine(source: Any, target: Any, _datatype: Any) -> None:
        mine: npt.NDArray[Any] = np.frombuffer(target, storage)
        reduce_into(mine, np.frombuffer(source, storage), step, dtype=known)

    return combine
