"""The functions of the CUDA driver that Phalanx calls: one small table, by ctypes, opened at first use.

`libcuda.so.1` comes with the driver, so no CUDA package is needed to install Phalanx. What a collective calls each time
is called by the core, by the addresses of the functions. Every call releases the GIL. None
of those that are made while ranks wait for each other blocks: copies and kernels are only put on a stream, and their
end is looked for (`phalanx.cuda.waiting`).

Tests put a stand-in in the place of `CudaDriver` (`use_driver`), whose memory of a GPU is shared memory of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from typing import Any, NamedTuple

from ..errors import BackendUnavailable, PhalanxError

__all__ = ["Allocation", "CudaDriver", "CudaError", "driver", "use_driver"]

_INT, _UINT, _SIZE, _POINTER, _ADDRESS = (
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_uint64,
)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuDriverGetVersion": (_POINTER,),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _INT),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuDeviceCanAccessPeer": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_POINTER,),
    "cuPointerGetAttribute": (_POINTER, _INT, _ADDRESS),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuMemcpy2DAsync_v2": (_POINTER, _POINTER),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuStreamCreateWithPriority": (_POINTER, _UINT, _INT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuStreamQuery": (_POINTER,),
    "cuStreamIsCapturing": (_POINTER, _POINTER),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    "cuEventDestroy_v2": (_POINTER,),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuModuleLoadData": (_POINTER, _POINTER),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
}
"""The driver's functions and the types of their arguments. `cuIpcOpenMemHandle` takes a struct; see below."""

HANDLE_BYTES = 64
"""Bytes of what one process gives another to open its memory."""
_NOT_READY = 600
_CAPTURES = {900, 901, 906}
"""A stream is being captured: cudaErrorStreamCaptureUnsupported, ...Invalidated and ...Implicit."""
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_PORTABLE = 1
_LAZY_PEER_ACCESS = 1
_ALREADY_REGISTERED = 712
_BUFFER_ID, _ORDINAL, _HAS_HANDLE, _RANGE_START, _RANGE_SIZE = 7, 9, 10, 11, 12  # of CUpointer_attribute
_IN_HOST, _ON_DEVICE = 1, 2
_SHORT_COPY = 64 << 10


class Allocation(NamedTuple):
    """The memory of a GPU that an address belongs to."""

    buffer: int
    """A number that no other one has in this process, also none that lies at the same address later."""
    base: int
    size: int
    exports: bool
    """True if other processes can open it by `export`."""


class CudaError(PhalanxError):
    """A function of the CUDA driver failed."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"CUDA: {function} failed with {name or code}")
        self.code = code


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *((f"src_{name}", kind) for name, kind in (("x", _SIZE), ("y", _SIZE), ("type", _UINT))),
        *((f"src_{name}", kind) for name, kind in (("host", _POINTER), ("device", _ADDRESS), ("array", _POINTER))),
        ("src_pitch", _SIZE),
        *((f"dst_{name}", kind) for name, kind in (("x", _SIZE), ("y", _SIZE), ("type", _UINT))),
        *((f"dst_{name}", kind) for name, kind in (("host", _POINTER), ("device", _ADDRESS), ("array", _POINTER))),
        *((name, _SIZE) for name in ("dst_pitch", "width", "height")),
    ]


class _Using(contextlib.AbstractContextManager[None]):
    """A context that is the thread's current one for a while. It nearly always is already."""

    __slots__ = ("_context", "_library", "_pushed")

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        current = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(current))
        if current.value != self._context:
            code = self._library.cuCtxPushCurrent_v2(self._context)
            if code:
                raise CudaError("cuCtxPushCurrent", code, "")
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class CudaDriver:
    """The driver of this machine's GPUs.

    Raises:
        BackendUnavailable: There is none, or no GPU.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            for name, arguments in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = arguments
            self._open = self._library.cuIpcOpenMemHandle_v2
            self._open.argtypes = (_POINTER, _Handle, _UINT)
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"the CUDA driver of this machine cannot be used: {error}") from None
        try:
            self._call("cuInit", 0)
        except CudaError as error:
            raise BackendUnavailable(f"the CUDA driver finds no GPU that it can use: {error}") from None
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> None:
        raise self.error_of(name, code)

    def error_of(self, name: str, code: int) -> CudaError:
        """The exception for a function that has returned this code."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return CudaError(name, code, (text.value or b"").decode())

    def address_of(self, name: str) -> int:
        """Where a function of the driver is, for the core."""
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def _made(self, kind: Any, name: str, *arguments: Any) -> Any:
        """The value that a function hands over in its first argument."""
        made = kind()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value

    # -- devices -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest CUDA that it knows, as 13000."""
        return int(self._made(_INT, "cuDriverGetVersion"))

    @property
    def device_count(self) -> int:
        """The GPUs that this process may use."""
        return int(self._made(_INT, "cuDeviceGetCount"))

    def device_name(self, device: int) -> str:
        """The name of the GPU."""
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, len(name), self._made(_INT, "cuDeviceGet", device))
        return name.value.decode()

    def device_uuid(self, device: int) -> bytes:
        """16 bytes that tell this GPU from all others; processes may count them differently."""
        uuid = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", uuid, self._made(_INT, "cuDeviceGet", device))
        return uuid.raw

    def reaches(self, device: int, other: int) -> bool:
        """True if a GPU can use the memory of another directly."""
        handles = (self._made(_INT, "cuDeviceGet", number) for number in (device, other))
        return bool(self._made(_INT, "cuDeviceCanAccessPeer", *handles))

    def using(self, device: int) -> contextlib.AbstractContextManager[None]:
        """Makes a GPU the current one of this thread."""
        return _Using(self._library, self.context(device))

    def context(self, device: int) -> int:
        """The context of a GPU that all libraries share."""
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                handle = self._made(_INT, "cuDeviceGet", device)
                context = self._contexts[device] = self._made(_POINTER, "cuDevicePrimaryCtxRetain", handle)
        return int(context)

    # -- memory --------------------------------------------------------------------------------------------------------

    def device_at(self, address: int) -> int:
        """The GPU that an address belongs to.

        Raises:
            CudaError: It is not the address of memory that the driver knows.
        """
        return int(self._made(_INT, "cuPointerGetAttribute", _ORDINAL, address))

    def allocation(self, address: int) -> Allocation:
        """The memory that an address belongs to.

        Raises:
            CudaError: It is not the address of memory that the driver knows.
        """
        wanted = ((_ADDRESS, _BUFFER_ID), (_ADDRESS, _RANGE_START), (_SIZE, _RANGE_SIZE), (_INT, _HAS_HANDLE))
        buffer, base, size, exports = (
            self._made(kind, "cuPointerGetAttribute", attribute, address) for kind, attribute in wanted
        )
        return Allocation(buffer, base or 0, size, bool(exports))

    def allocate(self, size: int) -> int:
        """The address of new memory on the current GPU."""
        return int(self._made(_ADDRESS, "cuMemAlloc_v2", size))

    def free(self, address: int) -> None:
        """Gives it back."""
        self._call("cuMemFree_v2", address)

    def register(self, address: int, size: int) -> bool:
        """Lets the GPU copy from and to this memory of the host by itself; False if it cannot."""
        code = self._library.cuMemHostRegister_v2(address, size, _PORTABLE)
        return code in (0, _ALREADY_REGISTERED)

    def unregister(self, address: int) -> None:
        """Takes that back."""
        self._library.cuMemHostUnregister(address)

    def copy_to_host(self, host: int, address: int, size: int, stream: int) -> None:
        """Puts a copy on a stream."""
        self._call("cuMemcpyDtoHAsync_v2", host, address, size, stream)

    def copy_to_device(self, address: int, host: int, size: int, stream: int) -> None:
        """Puts a copy on a stream.

        A short one goes in two rows: plain ones are done by the multiprocessors, for which they would have to wait
        while another process computes. Those in rows are done by a copy engine.
        """
        if size > _SHORT_COPY or size % 2:
            self._call("cuMemcpyHtoDAsync_v2", address, host, size, stream)
            return
        row = size // 2
        copy = _Copy2D(src_type=_IN_HOST, src_host=host, src_pitch=row, width=row, height=2)
        copy.dst_type, copy.dst_device, copy.dst_pitch = _ON_DEVICE, address, row
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)

    def copy(self, to: int, address: int, size: int, stream: int) -> None:
        """Puts a copy inside the GPU on a stream."""
        self._call("cuMemcpyDtoDAsync_v2", to, address, size, stream)

    # -- streams and events --------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """A stream of the current GPU that does not wait for its default stream."""
        return int(self._made(_POINTER, "cuStreamCreateWithPriority", _NON_BLOCKING, -1))

    def end_stream(self, stream: int) -> None:
        """Gives it back."""
        self._call("cuStreamDestroy_v2", stream)

    def is_capturing(self, stream: int) -> bool:
        """True if what is put on the stream is recorded for a CUDA graph, and not done."""
        status = _INT()
        code = self._library.cuStreamIsCapturing(stream, ctypes.byref(status))
        if code and code not in _CAPTURES:
            self._fail("cuStreamIsCapturing", code)
        return bool(code or status.value)

    def is_idle(self, stream: int) -> bool:
        """True if a stream has done all that was put on it.

        Raises:
            CudaError: Something of it has failed, perhaps a kernel of the program's.
        """
        code = self._library.cuStreamQuery(stream)
        if code and code != _NOT_READY:
            self._fail("cuStreamQuery", code)
        return not code

    def new_event(self) -> int:
        """A mark that can be put on a stream."""
        return int(self._made(_POINTER, "cuEventCreate", _DISABLE_TIMING))

    def end_event(self, event: int) -> None:
        """Gives it back."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Puts a mark on a stream."""
        self._call("cuEventRecord", event, stream)

    def is_done(self, event: int) -> bool:
        """True once the stream has come to the mark.

        Raises:
            CudaError: Something before it has failed, perhaps a kernel of the program's.
        """
        code = self._library.cuEventQuery(event)
        if code and code != _NOT_READY:
            self._fail("cuEventQuery", code)
        return not code

    # -- memory of other processes -------------------------------------------------------------------------------------

    def export(self, base: int) -> bytes:
        """The handle by which another process opens the memory that begins there."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._call("cuIpcGetMemHandle", handle, base)
        return handle.raw

    def open(self, handle: bytes) -> int:
        """The address here of another process's memory.

        Raises:
            CudaError: It cannot be opened; its process may have ended.
        """
        given, address = _Handle(), _ADDRESS()
        ctypes.memmove(ctypes.addressof(given), handle, HANDLE_BYTES)
        code = self._open(ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        if code:
            self._fail("cuIpcOpenMemHandle", code)
        return address.value

    def close(self, address: int) -> None:
        """Closes what `open` has opened."""
        self._call("cuIpcCloseMemHandle", address)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def load(self, ptx: bytes) -> int:
        """Compiles a module for the current GPU."""
        return int(self._made(_POINTER, "cuModuleLoadData", ptx + b"\0"))

    def function(self, module: int, name: str) -> int:
        """A kernel of a module."""
        return int(self._made(_POINTER, "cuModuleGetFunction", module, name.encode()))


_stand_in: list[Any] = []


@functools.cache
def _real() -> CudaDriver:
    return CudaDriver()


def driver() -> CudaDriver:
    """The driver of this process; the first call opens it.

    Raises:
        BackendUnavailable: There is none, or no GPU.
    """
    return _stand_in[-1] if _stand_in else _real()


def use_driver(stand_in: Any) -> None:
    """Puts another one in its place, for tests; None takes that back."""
    _stand_in[:] = [] if stand_in is None else [stand_in]
