"""Arrays of every library as contiguous memory, and back: NumPy's, or that of a GPU where it is.

Nothing is imported here: an array of torch or JAX can only come from a program that has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...arguments import shown
from ...errors import PhalanxError, ProtocolError, UnsupportedArray
from ...wire.dtypes import TENSOR_ITEMSIZES, count_bytes, describe_dtype, parse_dtype

__all__ = ["Adapted", "Description", "adapt", "make"]

BFLOAT16 = "bfloat16"
ON_GPU = ".cuda"
"""Follows the name of a library in the description of an array that lies on a GPU."""
_STORAGE = {BFLOAT16: np.dtype(np.uint16)} | {
    name: np.dtype(np.uint8) for name in TENSOR_ITEMSIZES if name.startswith("float8")
}
"""The dtypes that NumPy lacks, and what they lie in memory as."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The description that travels with an array: enough to make the same one on the other side."""

    dtype: str
    shape: list[int]
    library: str

    def pack(self) -> bytes:
        """The bytes of a frame's description."""
        return _encoder.encode(self)

    @classmethod
    def parse(cls, data: bytes, size: int | None) -> Description:
        """Reads a description and checks it against the size of the payload, where that is known.

        Raises:
            ProtocolError: It is malformed, or does not fit.
        """
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"malformed description of an array: {error}") from None
        if size not in (None, count_bytes(found.shape, found.numpy_dtype().itemsize)):
            raise ProtocolError(f"an array of dtype {found.dtype} and shape {found.shape} does not have {size} bytes")
        return found

    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype that NumPy can hold; those that it lacks travel as integers of their size."""
        return _STORAGE.get(self.dtype) or parse_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of such an array."""
        return count_bytes(self.shape, self.numpy_dtype().itemsize)

    def __str__(self) -> str:
        name = self.dtype if self.dtype in _STORAGE else self.numpy_dtype().name
        return f"{name}{self.shape}"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


class Adapted:
    """An array as contiguous memory: of NumPy, or a `DeviceArray` that only engines can look into.

    `finish()` gives what the caller gets back: their own array, changed in place, or where that cannot be written to, a
    new one of the same kind. `empty(shape)` makes another one on the same GPU; None if it lies on the host. `is_copy`
    says that it stands for one on a GPU.
    """

    __slots__ = ("array", "dtype", "empty", "finish", "is_copy", "library")

    def __init__(
        self,
        array: Any,
        dtype: str,
        library: str,
        finish: Callable[[], Any],
        empty: Callable[[tuple[int, ...]], Adapted] | None = None,
        is_copy: bool = False,
    ) -> None:
        self.array = array
        self.dtype = dtype
        self.library = library
        self.finish = finish
        self.empty = empty
        self.is_copy = is_copy

    @property
    def kind(self) -> str:
        """The dtype and where it lies, which all ranks of a collective have in common."""
        return self.dtype if self.empty is None else f"{self.dtype} on a GPU"

    @property
    def shape(self) -> tuple[int, ...]:
        """Its length in each dim."""
        found: tuple[int, ...] = self.array.shape
        return found

    @property
    def description(self) -> Description:
        """The description that travels with it."""
        return Description(self.dtype, list(self.array.shape), self.library)

    @property
    def bytes(self) -> memoryview:
        """Its memory."""
        return memory_of(self.array)


def memory_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, also of dtypes that have no buffer of their own."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def adapt(x: Any, *, write: bool) -> Adapted:
    """Makes contiguous memory of `x`, without a copy where that is possible.

    Anything with a buffer, DLPack or the CUDA array interface is an array.

    Args:
        write: True if the memory will be written to.

    Raises:
        UnsupportedArray: It is not an array, or one on a device that is not CUDA's or of a dtype that cannot be sent.
        BackendUnavailable: It lies on a GPU, and this machine has no driver for it.
    """
    if isinstance(x, np.ndarray):
        return _adapt_numpy(x, x, "numpy", write)
    library = type(x).__module__.partition(".")[0]
    if library == "torch" or isinstance(x, getattr(sys.modules.get("torch"), "Tensor", ())):
        return _adapt_device(x, write) if getattr(x, "is_cuda", False) else _adapt_torch(x, write)
    if library in ("jax", "jaxlib"):
        return _adapt_jax(x, write)
    if isinstance(x, np.generic):
        adapted = _adapt_numpy(np.array(x), x, "numpy", write)
        if write:  # a scalar cannot be written to: the array is a copy of it
            adapted.finish = lambda: adapted.array.view(x.dtype)[()]
        return adapted
    found = _foreign(x)
    return _adapt_device(x, write) if found is None else _adapt_numpy(found, x, "numpy", write)


def adapt_on_host(x: Any, *, write: bool, read: bool = True) -> Adapted:
    """As `adapt`, in the memory of the host: an array on a GPU is copied now, and back by `finish` if it is written.

    For what does not reach an engine as it is: messages, and verbs that look at the values.

    Args:
        read: False if all of its values will be replaced, so that they need not be copied.
    """
    return to_host(adapt(x, write=write), write=write, read=read)


def to_host(adapted: Adapted, *, write: bool, read: bool = True) -> Adapted:
    """The same of an array that was adapted."""
    if adapted.empty is None:
        return adapted
    from ...cuda import host_copies  # most programs have no GPU

    device, finish = adapted.array, adapted.finish
    host, give_back = host_copies.lend(device, read=read)

    def write_back() -> Any:
        host_copies.write(device, host)
        give_back()
        return finish()

    return Adapted(host, adapted.dtype, adapted.library, write_back if write else finish, is_copy=True)


def on_gpu(array: Any) -> bool:
    """True if the memory of an adapted array lies on a GPU."""
    return not isinstance(array, np.ndarray)


def share_memory(one: Any, other: Any) -> bool:
    """True if two adapted arrays may have memory in common."""
    if on_gpu(one) or on_gpu(other):
        return on_gpu(one) and on_gpu(other) and bool(one.overlaps(other))
    return np.may_share_memory(one, other)


def address_of(array: Any) -> int:
    """Where the memory of an adapted array begins."""
    return int(array.address if on_gpu(array) else array.__array_interface__["data"][0])


def copy_values(to: Any, values: npt.NDArray[Any]) -> None:
    """Copies values of the host to an adapted array of as many elements."""
    if not on_gpu(to):
        to.reshape(-1)[:] = values.reshape(-1)
        return
    from ...cuda import host_copies

    host_copies.write(to, values)


def has_gpu_arrays() -> bool:
    """True once this process has used an array that lies on a GPU."""
    return "phalanx.cuda.arrays" in sys.modules


@cache
def _device_arrays() -> Any:
    from ...cuda import arrays  # most programs have no GPU

    return arrays


def _adapt_device(x: Any, write: bool) -> Adapted:
    return _adapted(_device_arrays().device_array(x, write=write))


def _adapted(found: Any) -> Adapted:
    library = f"{found.library}{ON_GPU}"
    return Adapted(found.array, found.dtype, library, found.finish, lambda shape: _adapted(found.empty(shape)))


def adapt_out(out: Any, *, on_host: bool = False) -> Adapted:
    """As `adapt` or `adapt_on_host`, for an argument `out`, which is there to be written to.

    Raises:
        UnsupportedArray: As `adapt`; or it is a list of arrays.
    """
    if isinstance(out, list | tuple):
        raise UnsupportedArray(
            f"out is a {type(out).__name__}, but the result is one array, with the parts of the ranks one after the "
            "other (leave out= away: the call returns it)"
        )
    return adapt_on_host(out, write=True, read=False) if on_host else adapt(out, write=True)


def _foreign(x: Any) -> npt.NDArray[Any] | None:
    """The memory of an object of any other type, by the protocols that it speaks; None if it lies on a GPU.

    Raises:
        UnsupportedArray: It speaks none, or lies on another device.
    """
    kind = type(x)
    try:
        if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
            device = int(x.__dlpack_device__()[0])
            if device == _DLPACK_CPU:
                return np.from_dlpack(x)
            if device in _DLPACK_CUDA and hasattr(kind, "__cuda_array_interface__"):
                return None
            raise UnsupportedArray(f"this {kind.__name__} lies on a device (DLPack type {device}), {_ON_DEVICE}")
        if hasattr(kind, "__cuda_array_interface__"):
            return None
        view = memoryview(x)
    except UnsupportedArray:
        raise
    except Exception as error:  # whatever a foreign type raises
        if isinstance(error, TypeError) and not hasattr(kind, "__dlpack__"):
            raise UnsupportedArray(
                f"{kind.__name__} is not an array (expected NumPy, torch, JAX, or anything with a buffer or DLPack: "
                f"{_INSTEAD.get(kind, 'send_object and its kin take plain data')})"
            ) from None
        raise UnsupportedArray(f"this {kind.__name__} cannot be read as an array: {error}") from None
    try:
        return np.asarray(view)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:  # a format that NumPy does not know
        raise UnsupportedArray(f"this {kind.__name__} of format {view.format!r} cannot be sent: {error}") from None


_OF_A_LIST = (
    "np.asarray makes an array of numbers, all_reduce_many takes a list of arrays, send_object, all_gather_object and "
    "their kin take lists as they are"
)
_INSTEAD = {
    list: _OF_A_LIST,
    tuple: _OF_A_LIST,
    int: "np.array makes one of a number",
    float: "np.array makes one of a number",
    dict: "send_object, all_gather_object and their kin take dicts",
    str: "send_object, all_gather_object and their kin take text",
}
_DLPACK_CPU, _DLPACK_CUDA = 1, (2, 13)
_ON_DEVICE = "which this backend cannot send (copy it to the CPU first)"


def _adapt_numpy(array: npt.NDArray[Any], original: Any, library: str, write: bool) -> Adapted:
    if type(array) is not np.ndarray:
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedArray("a masked array cannot be sent (send x.filled(value), or x.data and x.mask)")
        array = array.view(np.ndarray)  # what subclasses make of reshaping, viewing and assigning is their own
    own = array.dtype
    dtype = _dtype_name(own)
    if dtype == BFLOAT16:
        array = array.view(np.uint16)
    if not write:
        return Adapted(np.ascontiguousarray(array).reshape(array.shape), dtype, library, lambda: original)
    if not array.flags.writeable:
        copy = array.copy(order="C")
        return Adapted(copy, dtype, library, lambda: _like(original, copy.view(own)))
    if array.flags.c_contiguous:
        return Adapted(array, dtype, library, lambda: original)
    if _overlaps_itself(array):
        raise UnsupportedArray("elements of the array overlap in memory, so it cannot be written to (pass a copy)")
    copy = np.ascontiguousarray(array)

    def write_back() -> Any:
        array[...] = copy
        return original

    return Adapted(copy, dtype, library, write_back)


def _overlaps_itself(array: npt.NDArray[Any]) -> bool:
    """True if two elements share bytes, so that what is written to one shows in the other.

    An axis whose stride is less than what the shorter strides span may do so; slices and transposes never have one.
    """
    span = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < span:
            return array.size > 0
        span += stride * (length - 1)
    return False


def _like(original: Any, result: npt.NDArray[Any]) -> Any:
    """The new array that stands for one that cannot be written to, of the same kind."""
    if isinstance(original, bytes):
        return result.tobytes()
    return result.view(type(original)) if isinstance(original, np.ndarray) else result


@lru_cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    if dtype.name == BFLOAT16:  # as ml_dtypes defines it
        return BFLOAT16
    if not dtype.isnative:
        raise UnsupportedArray(
            f"dtype {dtype.str!r} is not in this machine's byte order (convert it: x.astype({dtype.name!r}))"
        )
    described = describe_dtype(dtype)
    if not isinstance(described, str):
        raise UnsupportedArray(f"dtype {dtype} is structured (send its fields one by one, or use send_object)")
    return described


def dtype_of(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype of which arrays can be sent.

    Raises:
        UnsupportedArray: It is not a dtype, or its arrays cannot be sent.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except Exception:  # NumPy raises several
        raise UnsupportedArray(f"dtype={shown(dtype)} is not valid (expected a dtype of NumPy)") from None
    _dtype_name(found)
    return found


def _adapt_torch(x: Any, write: bool) -> Adapted:
    torch = sys.modules["torch"]
    if not isinstance(x, torch.Tensor):
        raise UnsupportedArray(f"{type(x).__name__} is not an array (expected a torch.Tensor)")
    if x.is_meta:
        raise UnsupportedArray(
            'a tensor on the meta device has no values to send (torch.empty_like(x, device="cpu") makes one that has)'
        )
    if x.device.type != "cpu":
        raise UnsupportedArray(f"a tensor on {x.device} cannot be sent (move it with .cpu())")
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        raise UnsupportedArray("a sparse, nested or quantized tensor cannot be sent (make it dense first)")
    try:
        plain = x.detach().resolve_conj().resolve_neg()
        bfloat16 = plain.dtype == torch.bfloat16
        array = plain.view(torch.int16).numpy().view(np.uint16) if bfloat16 else plain.numpy()
    except Exception as error:  # a dtype that NumPy has not, or a tensor that has no memory
        raise UnsupportedArray(f"a tensor of {x.dtype} cannot be sent: {error}") from None
    adapted = _adapt_numpy(array, x, "torch", write)
    if bfloat16:
        adapted.dtype = BFLOAT16
    if write and (x.is_conj() or x.is_neg()):  # then `plain` is a copy
        finish = adapted.finish

        def write_back() -> Any:
            finish()
            x.detach().copy_(plain)
            return x

        adapted.finish = write_back
    return adapted


def _adapt_jax(x: Any, write: bool) -> Adapted:
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", ())
    if isinstance(x, tracer):
        raise UnsupportedArray(
            f"this {type(x).__name__} of JAX has no value yet: a collective cannot be inside of a function that JAX "
            "traces for jit, grad or vmap (call it outside, on what the function returns, or by "
            "jax.experimental.io_callback)"
        )
    try:
        places = {device.platform for device in x.devices()}
        if places & {"cuda", "gpu"} and len(x.devices()) == 1:
            return _adapt_device(x, write)
        array = np.asarray(x) if places == {"cpu"} else None
    except PhalanxError:
        raise
    except Exception as error:  # not an array, a value that is being traced, or an array that was deleted
        words = str(error).split("\n", 1)[0]
        raise UnsupportedArray(f"this {type(x).__name__} of JAX cannot be sent: {words}") from None
    if array is None:
        raise UnsupportedArray(
            "a JAX array on a device that is not CUDA's, or on several, cannot be sent (jax.device_get it first)"
        )
    adapted = _adapt_numpy(array, array, "jax", write)
    if write:
        copy, dtype = adapted.array, array.dtype
        adapted.finish = lambda: sys.modules["jax"].numpy.asarray(copy.view(dtype))
    else:
        adapted.finish = lambda: x
    return adapted


def make(description: Description, array: npt.NDArray[Any]) -> Any:
    """The array that a message described, of the sender's library where this rank can have it."""
    library, on_device, _ = description.library.partition(ON_GPU)
    if on_device:
        made = _device_arrays().make_on_device(library, array, description.dtype) if library in sys.modules else None
        if made is not None:
            return made
        description = Description(description.dtype, description.shape, library)
    if description.library == "torch":
        return _make_torch(description, array)
    if description.library == "jax" and "jax" in sys.modules:
        return sys.modules["jax"].numpy.asarray(_named(description, array))
    return _named(description, array)


def empty_on_gpu(description: Description) -> Adapted | None:
    """Memory for such an array on a GPU, if it lay on one; None if this rank cannot have it there."""
    library, on_device, _ = description.library.partition(ON_GPU)
    if not on_device or library not in sys.modules:
        return None
    found = _device_arrays().empty_on_device(library, tuple(description.shape), description.dtype)
    return None if found is None else _adapted(found)


def _make_torch(description: Description, array: npt.NDArray[Any]) -> Any:
    try:
        import torch
    except ImportError:
        return _named(description, array)
    if description.dtype in _STORAGE:
        bits = array.view(np.int16) if array.itemsize == 2 else array
        return torch.from_numpy(bits).view(getattr(torch, description.dtype))
    return torch.from_numpy(array)


def _named(description: Description, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if description.dtype not in _STORAGE:
        return array
    try:
        import ml_dtypes
    except ImportError:
        raise UnsupportedArray(
            f"received a {description.dtype} array, which NumPy lacks (pip install ml_dtypes, or pass out=)"
        ) from None
    return array.view(getattr(ml_dtypes, description.dtype))


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Memory for an array that is about to arrive."""
    return np.empty(tuple(shape), dtype)
