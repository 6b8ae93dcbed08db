"""The native core, if there is one, and the reductions every layer uses.

This is the one place that decides whether C++ or NumPy computes them.

Both give the same bits. Integers wrap; `min` and `max` let a NaN through; 16-bit floats are computed in float32 and
rounded once; complex products round every step. Where two different NaNs meet, it is open which one stays, as in NumPy.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import operating_system
from .config import pure
from .errors import ConfigError, UnsupportedArray, UnsupportedOp, UsageError
from .types import ReduceOp

if TYPE_CHECKING:
    from types import ModuleType

    from ._core import PlainArrays, TensorReader

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "DTYPES",
    "OPS",
    "available",
    "core",
    "divide_in_place",
    "dtype_code",
    "dtype_name_of_code",
    "op_code",
    "plain_arrays",
    "reduce_into",
    "tensor_reader",
    "valid_ops",
    "why_not",
    "widened",
]

# The positions are the codes of cpp/phalanx/reduce.hpp. A change of them, or of what the core takes or returns, changes
# ABI there and here.
_ABI: Final = 15
_DTYPES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_OPS: Final = ("sum", "prod", "min", "max", "band", "bor", "bxor")

DTYPES: Final = _DTYPES
"""The dtypes that can be reduced, by the core's numbers."""
OPS: Final = (*_OPS, "mean")
"""The reductions, by the numbers of the core's fast paths."""

_ARITHMETIC: Final = ("sum", "prod", "min", "max")
_BY_KIND: Final = {"b": _OPS, "i": _OPS, "u": _OPS, "f": _ARITHMETIC, "c": ("sum", "prod")}


def _load() -> tuple[ModuleType | None, str | None]:
    if not operating_system.LINUX:
        return None, "it is for Linux" if sys.platform != "linux" else "PHALANX_PORTABLE is set"
    try:
        if pure():
            return None, "PHALANX_PURE is set"
    except ConfigError as error:  # `import phalanx` must not fail: the doctor has to run, and init() says it as well
        return None, str(error)
    try:
        core = importlib.import_module("phalanx._core")
    except ImportError as error:
        return None, f"phalanx._core cannot be imported: {error}"
    if core.ABI != _ABI:
        return None, f"phalanx._core is of another build (ABI {core.ABI}, expected {_ABI}); install phalanx again"
    return core, None


core, why_not = _load()
_core = core
available: bool = core is not None


class _Kind:
    """One dtype: its name and code, its operations, and its layout in memory."""

    __slots__ = ("code", "divisible", "name", "op_codes", "ops", "storage")

    def __init__(self, name: str) -> None:
        self.name = name
        self.code = _DTYPES.index(name)
        # NumPy has no bfloat16 of its own: it lies in memory as uint16.
        self.storage: np.dtype[Any] = np.dtype("uint16" if name == "bfloat16" else name)
        kind = "f" if name == "bfloat16" else self.storage.kind
        self.ops: tuple[str, ...] = _BY_KIND[kind]
        self.op_codes = {op: _OPS.index(op) for op in self.ops}
        self.divisible = kind in "fc"


_KINDS: Final = {name: _Kind(name) for name in _DTYPES}
_BY_DTYPE: Final = {kind.storage: kind for name, kind in _KINDS.items() if name != "bfloat16"}


def valid_ops(dtype: np.dtype[Any] | str) -> tuple[str, ...]:
    """The operations that `reduce_into` has for a dtype, and `"mean"` where a sum of it can be divided.

    Args:
        dtype: A NumPy dtype, or its name; `"bfloat16"` for bfloat16 kept as uint16.

    Raises:
        UnsupportedArray: No reduction exists for this dtype.
    """
    kind = _KINDS.get(dtype) if isinstance(dtype, str) else _BY_DTYPE.get(dtype)
    if kind is None:
        kind = _named(dtype)
    return (*kind.ops, "mean") if kind.divisible else kind.ops


PLAIN: Final = "?bBhHiIlLqQefdFD"
"""The dtypes, by NumPy's letters, that the core's fast paths take, in the order of collective_calls.hpp."""


@functools.cache
def plain_arrays() -> PlainArrays:
    """Knowledge of NumPy's arrays for the core's fast paths: which dtypes they take, and how an array is laid out."""
    assert core is not None
    dtypes = [(dtype, dtype.str) for dtype in map(np.dtype, PLAIN)]
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    samples = [np.zeros(5, np.float32), np.zeros((2, 3, 4), np.int16), np.zeros((2, 3)).T, np.array(1.0), frozen]
    arrays: PlainArrays = core.PlainArrays(np.ndarray, dtypes, samples, tensor_reader, _bfloat16)
    return arrays


def _bfloat16() -> np.dtype[Any] | None:
    """The dtype of that name in ml_dtypes; None if the one that was found is another package's."""
    ml_dtypes = sys.modules.get("ml_dtypes")
    return None if ml_dtypes is None else np.dtype(ml_dtypes.bfloat16)


_TENSOR_DTYPES: Final = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
]
"""The dtypes that torch and NumPy have in common, but for complex ones: tensors of those may be conjugated."""
_readers: Final[list[TensorReader]] = []
"""Empty, or with the one that was made."""


def tensor_reader() -> TensorReader | None:
    """Finds the memory of torch's tensors for the core; None where torch is not imported, or too old to tell."""
    if not _readers:
        made = _make_tensor_reader()
        if made is None:  # torch may still be imported
            return None
        _readers.append(made)
    return _readers[0]


def _make_tensor_reader() -> TensorReader | None:
    torch = sys.modules.get("torch")
    exchange = getattr(getattr(torch, "Tensor", None), "__dlpack_c_exchange_api__", None)
    if core is None or torch is None or exchange is None or not hasattr(torch, "nn"):  # it may be being imported
        return None
    rows = [(torch.bfloat16, len(PLAIN), 2, False, True, len(PLAIN))]  # which NumPy lacks
    for dtype in map(np.dtype, _TENSOR_DTYPES):
        if hasattr(torch, dtype.name):
            number = PLAIN.index(dtype.char)
            rows.append((getattr(torch, dtype.name), number, dtype.itemsize, False, dtype.kind == "f", number))
    types = [torch.Tensor, torch.nn.Parameter]
    reader: TensorReader = core.TensorReader(types, exchange, torch.Tensor.is_neg, rows)
    return reader


def dtype_code(dtype: np.dtype[Any] | str) -> int:
    """The core's number of a dtype.

    Raises:
        UnsupportedArray: No reduction exists for this dtype.
    """
    return (_BY_DTYPE.get(dtype) or _named(dtype)).code if isinstance(dtype, np.dtype) else _named(dtype).code


ON_GPU: Final = 100
"""The number that the core adds to that of a dtype if the array lies on a GPU."""


def dtype_name_of_code(code: int) -> str:
    """The name that travels with an array of the dtype that the core calls by this number, and where it lies."""
    if code >= ON_GPU:
        return f"{dtype_name_of_code(code - ON_GPU)} on a GPU"
    name = _DTYPES[code]
    return name if name == "bfloat16" else np.dtype(name).str


def op_code(op: str) -> int:
    """The core's number of a reduction that combines two arrays."""
    return _OPS.index(op)


def reduce_into(dst: Array, src: Array, op: str, *, dtype: str | None = None) -> None:
    """`dst = op(dst, src)`, element by element, in place.

    The arrays may be the same one but must not overlap otherwise. The GIL is released for large ones.

    Args:
        dst: Writable.
        src: Of the same dtype and shape.
        op: `"sum"`, `"prod"`, `"min"`, `"max"`, `"band"`, `"bor"` or `"bxor"`. A mean is a sum and `divide_in_place`.
        dtype: The name of the elements' type where the arrays cannot say it: `"bfloat16"` on uint16.

    Raises:
        UnsupportedOp: The dtype has no such operation.
        UnsupportedArray: No reduction exists for the dtype, or `dst` is read-only.
        UsageError: The dtypes or shapes differ.
    """
    kind = _BY_DTYPE.get(dst.dtype) if dtype is None else None
    if kind is None:
        kind = _named(dtype or dst.dtype)
        dst, src = _stored(dst, kind), _stored(src, kind)
    if src.dtype is not dst.dtype and src.dtype != dst.dtype:  # nearly always the same object
        raise UsageError(f"cannot reduce {src.dtype} into {dst.dtype} (expected the same dtype)")
    if src.shape != dst.shape:
        raise UsageError(f"cannot reduce shape {src.shape} into shape {dst.shape} (expected the same shape)")
    code = kind.op_codes.get(op)
    if code is None:
        op = _plain(op, kind)
        code = kind.op_codes[op]
    flags = dst.flags
    if not flags.writeable:
        raise UnsupportedArray("cannot reduce into a read-only array")
    if _core is not None and flags.c_contiguous and src.flags.c_contiguous:
        _core.reduce(dst, src, kind.code, code)
    else:
        _reduce_with_numpy(dst, src, op, kind)


def divide_in_place(x: Array, n: int, *, dtype: str | None = None) -> None:
    """`x = x / n`, element by element: what turns a sum into a mean.

    Args:
        x: Writable, of a floating or complex dtype.
        n: At least 1.
        dtype: As in `reduce_into`.

    Raises:
        UnsupportedOp: Integers and truth values have no mean in place.
        UnsupportedArray: No reduction exists for the dtype, or `x` is read-only.
        UsageError: `n` is below 1.
    """
    kind = _BY_DTYPE.get(x.dtype) if dtype is None else None
    if kind is None:
        kind = _named(dtype or x.dtype)
        x = _stored(x, kind)
    if not kind.divisible:
        valid = ", ".join(name for name in _DTYPES if _KINDS[name].divisible)
        raise UnsupportedOp(f"op 'mean' is not defined for {kind.name} (valid for: {valid})")
    if n < 1:
        raise UsageError(f"cannot divide by {n} (expected a number of ranks, 1 or more)")
    if not x.flags.writeable:
        raise UnsupportedArray("cannot divide a read-only array in place")
    if _core is not None and x.flags.c_contiguous:
        _core.divide(x, n, kind.code)
    else:
        _divide_with_numpy(x, n, kind)


def widened(x: Array, dtype: str) -> Array:
    """An array of short floats as float32, with which NumPy can compute.

    Args:
        dtype: `"float16"`, or `"bfloat16"` on uint16.
    """
    return _WIDEN[dtype](x)


# -- what the fast path leaves to others -----------------------------------------------------------------------------


def _named(dtype: np.dtype[Any] | str) -> _Kind:
    """The kind of a dtype that is given by name, or is not one of NumPy's own."""
    name = dtype if isinstance(dtype, str) else dtype.name if dtype.isnative else dtype.str
    kind = _KINDS.get(name)
    if kind is None:
        raise UnsupportedArray(f"no reduction exists for dtype {name} (valid: {', '.join(_DTYPES)})")
    return kind


def _stored(x: Array, kind: _Kind) -> Array:
    """The array as its kind lies in memory: bfloat16 of any package as uint16."""
    if x.dtype == kind.storage:
        return x
    if x.dtype.name != kind.name or x.dtype.itemsize != kind.storage.itemsize:
        raise UsageError(f"an array of {x.dtype} does not hold {kind.name} (expected {kind.storage})")
    return x.view(kind.storage)


def _plain(op: str, kind: _Kind) -> str:
    """The name of an operation that may come as a `ReduceOp`."""
    if isinstance(op, ReduceOp) and op.value in kind.op_codes:
        return op.value
    shown = op.value if isinstance(op, ReduceOp) else op
    if shown == "mean" and kind.divisible:
        raise UnsupportedOp("op 'mean' is a sum, then divide_in_place")
    raise UnsupportedOp(f"op {shown!r} is not defined for {kind.name} (valid: {', '.join(kind.ops)})")


# -- NumPy -----------------------------------------------------------------------------------------------------------

_UFUNCS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_BLOCK: Final = 1 << 16  # elements that are widened at a time: bounds the temporary memory


def _reduce_with_numpy(dst: Array, src: Array, op: str, kind: _Kind) -> None:
    ufunc = _UFUNCS[op]
    if not kind.divisible:  # integers and truth values never warn
        ufunc(dst, src, out=dst)
        return
    with np.errstate(all="ignore"):  # the core does not warn either
        if kind.name in _WIDEN:
            _blockwise(lambda a, b: _short_float(kind, ufunc, a, b), dst, src)
        elif op == "prod" and dst.dtype.kind == "c":
            _blockwise(_complex_product, dst, src)
        else:
            ufunc(dst, src, out=dst)


def _divide_with_numpy(x: Array, n: int, kind: _Kind) -> None:
    with np.errstate(all="ignore"):
        if kind.name in _WIDEN:
            _blockwise(lambda a: _short_float(kind, np.divide, a, np.float32(n)), x)
        elif x.dtype.kind == "c":  # the two parts alone: a complex division would round more often
            np.divide(x.real, x.real.dtype.type(n), out=x.real)
            np.divide(x.imag, x.imag.dtype.type(n), out=x.imag)
        else:
            np.divide(x, x.dtype.type(n), out=x)


def _blockwise(compute: Callable[..., Array], dst: Array, *others: Array) -> None:
    """`dst = compute(dst, *others)` in blocks, whatever the strides."""
    if not dst.flags.c_contiguous:
        dst[...] = compute(dst, *others)
        return
    flat, rest = dst.reshape(-1), [other.reshape(-1) for other in others]
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        flat[part] = compute(flat[part], *(other[part] for other in rest))


def _complex_product(a: Array, b: Array) -> Array:
    # Written out, because NumPy's own product is fused on some processors and not on others.
    product = np.empty_like(a)
    np.subtract(a.real * b.real, a.imag * b.imag, out=product.real)
    np.add(a.real * b.imag, a.imag * b.real, out=product.imag)
    return product


def _short_float(kind: _Kind, ufunc: np.ufunc, a: Array, b: Any) -> Array:
    widen = _WIDEN[kind.name]
    result: Array = ufunc(widen(a), widen(b) if isinstance(b, np.ndarray) else b)
    return result.astype(np.float16) if kind.name == "float16" else _narrow_bfloat16(result)


def _widen_float16(x: Array) -> Array:
    return x.astype(np.float32)


def _widen_bfloat16(x: Array) -> Array:
    bits: Array = x.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _narrow_bfloat16(x: Array) -> Array:
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    short: Array = np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return short


_WIDEN: Final = {"float16": _widen_float16, "bfloat16": _widen_bfloat16}
