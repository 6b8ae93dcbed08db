"""The type and the memory of an array as bytes, and back without trust.

A description is what `numpy.dtype.str` says (`<f4`, `|b1`, `<M8[ns]`), checked against a grammar before NumPy sees
it, or, for a structured dtype, `[itemsize, [[name, offset, description, shape], ...]]`. What cannot mean the same on
another machine is refused: object dtypes, long double, dtypes that other packages define.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.errors import BackendUnavailable, ProtocolError, UnsupportedArray

__all__ = [
    "TENSOR_ITEMSIZES",
    "bytes_of",
    "check_values",
    "count_bytes",
    "describe_dtype",
    "loaded_torch",
    "make_tensor",
    "parse_dtype",
    "tensor_bytes",
]

_SIMPLE = re.compile(
    r"\|[biu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)"
    r"|[<>][mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|[SV][0-9]{1,9}|[<>]U[0-9]{1,8}",
    re.ASCII,
)
_MAX_DIMS = 64  # NumPy's own limit
_MAX_NESTING = 8  # structured dtypes inside structured dtypes
_MAX_ITEMSIZE = 2**31 - 1

_DESCRIBED = {np.dtype(char): np.dtype(char).str for char in "?bBhHiIqQefd"}
"""The descriptions of the common dtypes: most arrays need no look at the grammar."""

TENSOR_ITEMSIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every torch dtype that is sent; known here so that a rank without torch can check them too."""


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """A description that `parse_dtype` turns into an equal dtype.

    Raises:
        UnsupportedArray: The dtype holds Python objects or has no meaning outside this process or machine.
    """
    known = _DESCRIBED.get(dtype)
    if known is not None:
        return known
    if dtype.names is None:
        text = dtype.str
        # The second test keeps out dtypes of other packages that call themselves void, such as bfloat16 of ml_dtypes.
        if _SIMPLE.fullmatch(text) and np.dtype(text) == dtype:
            return text
        reasons = {
            "O": "it holds Python objects (send_object, all_gather_object and their kin take objects)",
            "T": "its strings live outside the array",
            "f": "its layout differs between machines",
            "c": "its layout differs between machines",
        }
        reason = reasons.get(dtype.kind, "NumPy alone does not know this dtype")
        raise UnsupportedArray(f"dtype {dtype} cannot be sent as plain data: {reason}")
    if dtype.type is not np.void:
        raise UnsupportedArray(f"dtype {dtype} cannot be sent as plain data (a plain structured dtype can)")
    fields_of: Any = dtype.fields
    fields: list[list[Any]] = []
    for name in dtype.names:
        entry: Any = fields_of[name]
        if len(entry) > 2:  # the third is a title
            raise UnsupportedArray(f"field {name!r} has a title, which cannot be sent (use a dtype without titles)")
        base, shape = entry[0].subdtype or (entry[0], ())
        fields.append([name, int(entry[1]), describe_dtype(base), list(shape)])
    return [dtype.itemsize, fields]


def parse_dtype(description: Any, *, _nesting: int = 0) -> np.dtype[Any]:
    """The dtype of a description that came from another rank.

    Raises:
        ProtocolError: It is not one that `describe_dtype` could have written.
    """
    if type(description) is str:
        return _simple_dtype(description)
    if _nesting >= _MAX_NESTING:
        raise ProtocolError(f"a structured dtype is nested deeper than {_MAX_NESTING} levels")
    try:
        itemsize, fields = description
        names, formats, offsets = [], [], []
        for name, offset, inner, shape in fields:
            part = parse_dtype(inner, _nesting=_nesting + 1)
            if shape:
                count_bytes(shape, part.itemsize)
                part = np.dtype((part, tuple(shape)))
            if type(name) is not str or type(offset) is not int or not 0 <= offset <= itemsize - part.itemsize:
                raise ProtocolError(f"field {name!r} of a structured dtype does not fit into its {itemsize!r} bytes")
            names.append(name)
            formats.append(part)
            offsets.append(offset)
        if type(itemsize) is not int or not 0 <= itemsize <= _MAX_ITEMSIZE:
            raise ProtocolError(f"a structured dtype of {itemsize!r} bytes is not valid")
        layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
        structured: np.dtype[Any] = np.dtype(layout)
        return structured
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a structured dtype is malformed: {error}") from None


@functools.lru_cache(maxsize=256)
def _simple_dtype(text: str) -> np.dtype[Any]:
    if not _SIMPLE.fullmatch(text):
        raise ProtocolError(f"dtype {text[:40]!r} is not supported")
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"dtype {text!r} is not valid: {error}") from None
    if dtype.itemsize > _MAX_ITEMSIZE:
        raise ProtocolError(f"dtype {text!r} is larger than {_MAX_ITEMSIZE} bytes")
    return dtype


def count_bytes(shape: Sequence[int], itemsize: int) -> int:
    """The number of bytes of an array of this shape.

    Raises:
        ProtocolError: Too many dimensions, one that is no size, or more bytes than an address can hold.
    """
    if len(shape) > _MAX_DIMS:
        raise ProtocolError(f"an array of {len(shape)} dimensions is not valid (at most {_MAX_DIMS})")
    extent = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ProtocolError(f"array dimension {size!r} is not valid (expected a whole number, 0 or more)")
        # NumPy counts empty dimensions as one when it looks for an overflow; so must this. Stopping at once also
        # keeps the product from growing over 64 dimensions.
        extent *= size or 1
        if extent * (itemsize or 1) >= 2**62:
            raise ProtocolError("the shape of an array overflows")
    return math.prod(shape) * itemsize


def bytes_of(array: npt.NDArray[Any]) -> tuple[memoryview, bool]:
    """The memory of an array and whether it is in Fortran order; copied only if it is in neither order."""
    flags = array.flags
    if flags.c_contiguous and array.size and array.ndim and array.dtype in _DESCRIBED:
        return array.data.cast("B"), False
    fortran = flags.f_contiguous and not flags.c_contiguous
    if not fortran:
        array = np.ascontiguousarray(array)
    return array.reshape(-1, order="F" if fortran else "C").view(np.uint8).data, fortran


def check_values(array: npt.NDArray[Any]) -> None:
    """Refuses bytes that NumPy takes for impossible: truth values beside 0 and 1, and characters beyond Unicode.

    NumPy and torch count truth values by adding bytes: indexing by a mask with a 2 in it can leave the array's memory.

    Raises:
        ProtocolError: There is one.
    """
    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            check_values(array[name])
    elif dtype.kind == "b" and array.size:
        if int(array.view(np.uint8).max()) > 1:
            raise ProtocolError("an array of bool holds bytes that are neither 0 nor 1")
    elif dtype.kind == "U" and array.size and dtype.itemsize:
        characters = np.ascontiguousarray(array).reshape(-1).view(np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if int(characters.max()) > sys.maxunicode:
            raise ProtocolError("an array of str holds a character that does not exist")


# -- torch -----------------------------------------------------------------------------------------------------------


def loaded_torch() -> Any:
    """The torch module if this process has imported it: without it, nothing here can be a tensor."""
    return sys.modules.get("torch")


def tensor_bytes(tensor: Any) -> tuple[memoryview, str]:
    """The memory of a CPU tensor in C order, copied only if it is not contiguous, and the name of its dtype.

    Raises:
        UnsupportedArray: The tensor is not a plain one in the memory of the CPU.
    """
    torch = loaded_torch()
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu":
        raise UnsupportedArray(f"a tensor on {tensor.device} cannot be sent as plain data (send tensor.cpu())")
    if tensor.layout is not torch.strided or name not in TENSOR_ITEMSIZES:
        raise UnsupportedArray(f"a tensor of dtype {name} and layout {tensor.layout} cannot be sent as plain data")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() <= 1:  # contiguous whatever its strides are, but it cannot be viewed as bytes with all of them
        plain = plain.clone(memory_format=torch.contiguous_format).as_strided((plain.numel(),), (1,))
    return plain.reshape(-1).view(torch.uint8).numpy().data, name


def make_tensor(raw: npt.NDArray[np.uint8], name: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """A tensor in the given memory; without torch, a NumPy array if NumPy has such a dtype.

    Raises:
        BackendUnavailable: torch is not installed here, and NumPy has no such dtype.
        ProtocolError: See `check_values`.
    """
    if name == "bool":
        check_values(raw.view(np.bool_))
    torch = loaded_torch()
    if torch is None:
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            if name.startswith(("bfloat", "float8")):
                raise BackendUnavailable(f"a {name} tensor came, which needs torch here: pip install torch") from None
            return raw.view(np.dtype(name)).reshape(shape)
    dtype = getattr(torch, name, None)
    if dtype is None:
        raise BackendUnavailable(f"a {name} tensor came, which torch {torch.__version__} does not know: upgrade torch")
    # An empty array has strides of 0, which torch does not take for a view.
    if len(raw):
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    return tensor.requires_grad_() if requires_grad else tensor
