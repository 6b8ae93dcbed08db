"""Arrays in the memory of a GPU as their address, without a copy: torch, CuPy, JAX, and whatever has the CUDA array
interface.

Nothing is imported here: an array of torch can only come from a program that has imported it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedArray
from .driver import CudaError, driver
from .waiting import Mark, mark

__all__ = ["DeviceArray", "OnDevice", "device_array", "empty_on_device", "lies_on_gpu", "make_on_device"]

_STORAGE: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(np.uint16)}
"""How elements that NumPy does not know lie in memory."""
_DLPACK_GPUS = (2, 13)
"""CUDA's memory, and what CUDA manages."""


class DeviceArray:
    """A contiguous array in the memory of a GPU.

    It has what the verbs ask of a NumPy array, and no values: only an engine knows how to come by those.

    Args:
        dtype: How an element lies in memory.
        ready: A mark on the stream on which it is computed, behind all that the program has put there.
        owner: Keeps the memory.
        clone: Makes a copy of the owner, on the GPU.
    """

    __slots__ = ("_clone", "address", "device", "dtype", "nbytes", "owner", "ready", "shape", "size")

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        ready: Mark,
        owner: Any,
        clone: Callable[[], DeviceArray] | None = None,
    ) -> None:
        self.address = address
        self.shape = shape
        self.size = math.prod(shape)
        """The number of elements."""
        self.dtype = dtype
        self.nbytes = self.size * dtype.itemsize
        self.device = device
        self.ready = ready
        self.owner = owner
        self._clone = clone

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def reshape(self, shape: int) -> DeviceArray:
        """All elements in one dim; nothing else is asked for."""
        assert shape == -1
        return self if len(self.shape) == 1 else self._part(0, (self.size,))

    def part(self, start: int, count: int) -> DeviceArray:
        """Some elements of one that has one dim."""
        return self._part(start * self.dtype.itemsize, (count,))

    def copy(self) -> DeviceArray:
        """Another one with the same values, on the GPU."""
        assert self._clone is not None, "parts are not copied"
        return self._clone()

    def overlaps(self, other: DeviceArray) -> bool:
        """True if they share memory."""
        mine, others = self.nbytes, other.nbytes
        return bool(mine and others) and self.address < other.address + others and other.address < self.address + mine

    def _part(self, offset: int, shape: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(self.address + offset, shape, self.dtype, self.device, self.ready, self.owner)


class OnDevice(NamedTuple):
    """An array of a program's, as the verbs use it."""

    array: DeviceArray
    dtype: str
    """As it is called in a description."""
    library: str
    finish: Callable[[], Any]
    """Gives what the caller gets back: their own array, changed in place, or a new one of the same kind."""
    empty: Callable[[tuple[int, ...]], OnDevice]
    """Makes a new array of another shape, which is alike otherwise."""


def lies_on_gpu(x: Any) -> bool:
    """True if an object is an array in the memory of a GPU that CUDA knows."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return bool(x.is_cuda) and getattr(torch.version, "hip", None) is None
    kind = type(x)
    library = kind.__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):
        devices = getattr(x, "devices", None)
        try:
            found = [] if devices is None else list(devices())
        except Exception:  # one that was deleted, or is being traced: it is refused elsewhere
            return False
        return len(found) == 1 and found[0].platform in ("cuda", "gpu")
    if library == "numpy":
        return False
    if hasattr(kind, "__cuda_array_interface__"):
        return True
    if not hasattr(kind, "__dlpack_device__"):
        return False
    try:
        return int(x.__dlpack_device__()[0]) in _DLPACK_GPUS
    except Exception:
        return False


def device_array(x: Any, *, write: bool) -> OnDevice:
    """The memory of an array on a GPU. One that is not contiguous is copied there, and back by `finish`.

    Args:
        write: True if the memory will be written to.

    Raises:
        UnsupportedArray: It cannot be read, or not be written to, or its dtype is not known.
        UsageError: Its stream is being captured for a CUDA graph.
    """
    torch = sys.modules.get("torch")
    library = type(x).__module__.partition(".")[0]
    if torch is not None and isinstance(x, torch.Tensor):
        found = _of_torch(torch, x, write)
    elif library in ("jax", "jaxlib"):
        found = _of_jax(x, write)
    elif library == "cupy":
        found = _of_cupy(sys.modules["cupy"], x, write)
    else:
        found = _of_interface(x, write)
    return found


def make_on_device(library: str, host: Any, dtype: str) -> Any:
    """A new array of a library on its current GPU, with these values of the host; None if it cannot be made here.

    Args:
        host: A NumPy array.
        dtype: As it is called in a description.
    """
    module = sys.modules.get(library)
    if module is None:
        return None
    try:
        if library == "torch":
            bits = module.from_numpy(host.view(f"i{host.itemsize}") if dtype in _TORCH_ONLY else host)
            return (bits.view(getattr(module, dtype)) if dtype in _TORCH_ONLY else bits).to("cuda")
        if library == "cupy" and dtype not in _TORCH_ONLY:
            return module.asarray(host)
        return None
    except (RuntimeError, AssertionError, ValueError, TypeError):  # a build without CUDA, or no GPU
        return None


def empty_on_device(library: str, shape: tuple[int, ...], dtype: str) -> OnDevice | None:
    """The same without values, as the verbs use it."""
    module = sys.modules.get(library)
    if module is None or (library, dtype in _TORCH_ONLY) not in (("torch", False), ("torch", True), ("cupy", False)):
        return None
    try:
        name = dtype if dtype in _TORCH_ONLY else np.dtype(dtype).name
        made = module.empty(shape, dtype=getattr(module, name), **({"device": "cuda"} if library == "torch" else {}))
    except (RuntimeError, AssertionError, AttributeError):  # as above, or no such dtype
        return None
    return device_array(made, write=True)


_TORCH_ONLY = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)


# -- torch -------------------------------------------------------------------------------------------------------------


def _of_torch(torch: Any, x: Any, write: bool) -> OnDevice:
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        raise UnsupportedArray("a sparse, nested or quantized tensor cannot be sent (make it dense first)")
    dtype, storage = _torch_dtype(x.dtype)
    plain = x.detach()
    is_view = plain.is_conj() or plain.is_neg()
    stream = torch._C._cuda_getCurrentRawStream(plain.get_device())
    if plain.is_contiguous() and not is_view:
        return _torch_memory(torch, plain, dtype, storage, stream, lambda: x)
    if write and any(step == 0 and length > 1 for step, length in zip(plain.stride(), plain.shape, strict=True)):
        raise UnsupportedArray("elements of the array overlap in memory, so it cannot be written to (pass a copy)")
    copy = plain.resolve_conj().resolve_neg().contiguous()

    def write_back() -> Any:
        own = _own_torch_stream(torch, plain.device)  # the program's may have got more to do meanwhile
        with torch.cuda.stream(own):
            plain.copy_(copy)
        own.synchronize()
        return x

    return _torch_memory(torch, copy, dtype, storage, stream, write_back if write else lambda: x)


def _torch_memory(
    torch: Any, tensor: Any, dtype: str, storage: np.dtype[Any], stream: int, finish: Callable[[], Any]
) -> OnDevice:
    def clone() -> DeviceArray:
        with _torch_stream(torch, tensor, stream):
            return _torch_memory(torch, tensor.clone(), dtype, storage, stream, finish).array

    def empty(shape: tuple[int, ...]) -> OnDevice:
        with _torch_stream(torch, tensor, stream):
            made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        return _torch_memory(torch, made, dtype, storage, stream, lambda: made)

    address, shape = tensor.data_ptr(), tuple(tensor.shape)
    if not address and tensor.numel():
        raise UnsupportedArray(f"a {type(tensor).__name__} of shape {shape} has no memory to send")
    device = tensor.get_device()
    array = DeviceArray(address, shape, storage, device, mark(device, stream), tensor, clone)
    return OnDevice(array, dtype, "torch", finish, empty)


def _torch_stream(torch: Any, tensor: Any, stream: int) -> Any:
    """Makes a stream the current one of this thread, for a while."""
    device = tensor.device
    found = torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
    return torch.cuda.stream(found)


@functools.cache
def _own_torch_stream(torch: Any, device: Any) -> Any:
    return torch.cuda.Stream(device)


@functools.cache
def _torch_dtype(dtype: Any) -> tuple[str, np.dtype[Any]]:
    """The name of a dtype in a description, and how it lies in memory."""
    name = str(dtype).removeprefix("torch.")
    if name in _TORCH_ONLY and name != "bfloat16":
        return name, np.dtype(np.uint8)
    if name in _STORAGE:
        return name, _STORAGE[name]
    try:
        known = np.dtype(name)
    except TypeError:
        raise UnsupportedArray(f"a tensor of {dtype} cannot be sent") from None
    return known.str, known


# -- CuPy --------------------------------------------------------------------------------------------------------------


def _of_cupy(cupy: Any, x: Any, write: bool) -> OnDevice:
    if not isinstance(x, cupy.ndarray):
        raise UnsupportedArray(f"a {type(x).__name__} of CuPy cannot be sent (send its arrays)")
    plain = x if x.flags.c_contiguous else cupy.ascontiguousarray(x)

    def write_back() -> Any:
        x[...] = plain
        cupy.cuda.get_current_stream().synchronize()  # perhaps that of another thread than the program's
        return x

    return _cupy_memory(cupy, plain, (lambda: x) if plain is x or not write else write_back)


def _cupy_memory(cupy: Any, array: Any, finish: Callable[[], Any]) -> OnDevice:
    def empty(shape: tuple[int, ...]) -> OnDevice:
        with array.device:
            made = cupy.empty(shape, array.dtype)
        return _cupy_memory(cupy, made, lambda: made)

    dtype, storage = _numpy_dtype(array.dtype)
    stream = cupy.cuda.get_current_stream(array.device.id).ptr
    clone: Callable[[], DeviceArray] = lambda: _cupy_memory(cupy, array.copy(), finish).array  # noqa: E731
    device = array.device.id
    memory = DeviceArray(array.data.ptr, array.shape, storage, device, mark(device, stream), array, clone)
    return OnDevice(memory, dtype, "cupy", finish, empty)


# -- JAX ---------------------------------------------------------------------------------------------------------------


def _of_jax(x: Any, write: bool) -> OnDevice:
    jax = sys.modules["jax"]
    tracer = getattr(getattr(jax, "core", None), "Tracer", ())
    if isinstance(x, tracer):
        raise UnsupportedArray(
            f"this {type(x).__name__} of JAX has no value yet (call it outside of jit, grad or vmap)"
        )
    # An array of JAX never changes: the result is written to a copy that the program has not seen.
    mine = jax.numpy.array(x, copy=True) if write else x
    return _jax_memory(jax, mine, (lambda: mine) if write else (lambda: x))


def _jax_memory(jax: Any, array: Any, finish: Callable[[], Any]) -> OnDevice:
    def empty(shape: tuple[int, ...]) -> OnDevice:
        made = jax.device_put(jax.numpy.zeros(shape, array.dtype), device)
        return _jax_memory(jax, made, lambda: made)

    array.block_until_ready()  # JAX has streams of its own, on which this is then done
    (device,) = array.devices()
    dtype, storage = _numpy_dtype(np.dtype(array.dtype))
    ordinal = int(getattr(device, "local_hardware_id", None) or 0)
    clone: Callable[[], DeviceArray] = lambda: _jax_memory(jax, jax.numpy.array(array, copy=True), finish).array  # noqa: E731
    address = array.unsafe_buffer_pointer()
    return OnDevice(
        DeviceArray(address, tuple(array.shape), storage, ordinal, mark(ordinal, 0), array, clone),
        dtype,
        "jax",
        finish,
        empty,
    )


def _numpy_dtype(dtype: np.dtype[Any]) -> tuple[str, np.dtype[Any]]:
    name = dtype.name
    if name in _STORAGE:  # as ml_dtypes defines it
        return name, _STORAGE[name]
    if name in _TORCH_ONLY:
        return name, np.dtype(np.uint8)
    if dtype.kind not in "biufc" or dtype.itemsize > 16:
        raise UnsupportedArray(f"an array of dtype {dtype} on a GPU cannot be sent")
    return dtype.str, dtype


# -- all others --------------------------------------------------------------------------------------------------------


def _of_interface(x: Any, write: bool) -> OnDevice:
    try:
        found: dict[str, Any] = x.__cuda_array_interface__
        address, read_only = found["data"]
        shape, own = tuple(int(length) for length in found["shape"]), np.dtype(found["typestr"])
        strides, stream = found.get("strides"), found.get("stream")
        if found.get("mask") is not None:
            raise UnsupportedArray("a masked array cannot be sent")
    except UnsupportedArray:
        raise
    except Exception as error:  # whatever a foreign type raises
        raise UnsupportedArray(
            f"this {type(x).__name__} lies on a GPU and cannot be read by the CUDA array interface: {error}"
        ) from None
    dtype, storage = _numpy_dtype(own)
    if strides is not None and tuple(strides) != _packed(shape, own.itemsize) and 0 not in shape:
        raise UnsupportedArray("an array on a GPU must be contiguous to be sent (make it so first)")

    def clone() -> DeviceArray:
        raise UnsupportedArray(f"x and out overlap, and a {type(x).__name__} cannot be copied here (pass a copy)")

    def empty(_shape: tuple[int, ...]) -> OnDevice:
        raise UnsupportedArray(f"a new {type(x).__name__} cannot be made here (pass out=)")

    try:
        device = driver().device_at(int(address)) if address else 0
    except CudaError:
        raise UnsupportedArray(f"this {type(x).__name__} says that it lies on a GPU, but its memory does not") from None
    array = DeviceArray(int(address or 0), shape, storage, device, mark(device, int(stream or 0)), x, clone)

    def finish() -> Any:
        return x

    if read_only and write:
        raise UnsupportedArray(f"this {type(x).__name__} on a GPU cannot be written to (pass a copy)")
    return OnDevice(array, dtype, "other", finish, empty)


def _packed(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
