"""The functions of NCCL that Phalanx calls: one small table, through nccl4py, imported at first use.

nccl4py's low-level module takes addresses, streams and counts as integers, and releases the GIL. All communicators are
non-blocking: a function may return before its work is done, and `state` tells how far NCCL is.

Tests put a stand-in in the place of `Nccl` (`use_nccl`), which moves the bytes between processes without a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ..errors import BackendUnavailable, PhalanxError

__all__ = ["DTYPES", "ID_BYTES", "IN_PROGRESS", "OPS", "Nccl", "NcclError", "nccl", "use_nccl", "version_text"]

ID_BYTES = 128
"""Bytes of the identity by which the ranks of a communicator find each other."""
SUCCESS, IN_PROGRESS = 0, 7
"""Of `ncclResult_t`; all others are errors."""
DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
"""The dtypes that NCCL computes with, as `ncclDataType_t`."""
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4}
"""Its reductions, as `ncclRedOp_t`."""
BYTES = DTYPES["uint8"]
"""The dtype of what is only moved."""

_NO_PACKAGE = "nccl4py is not installed (pip install nccl4py)"
_NO_LIBRARY = (
    "nccl4py does not find NCCL itself, libnccl.so.2 (it comes with torch for CUDA; else pip install nvidia-nccl-cu12 "
    "or nvidia-nccl-cu13, as the driver's CUDA is)"
)


class NcclError(PhalanxError):
    """A function of NCCL failed, or NCCL found out later that an operation has."""


class Nccl:
    """The NCCL of this process.

    Raises:
        BackendUnavailable: nccl4py or NCCL is missing; says what to install.
    """

    def __init__(self) -> None:
        try:
            self._module: Any = importlib.import_module("nccl.bindings.nccl")
        except ImportError as error:
            missing = (error.name or "").partition(".")[0] == "nccl"
            raise BackendUnavailable(_NO_PACKAGE if missing else f"nccl4py cannot be imported: {error}") from None
        try:
            self.version = int(self._module.get_version())
            """As 23003 for 2.30.3."""
        except Exception as error:  # of cuda.pathfinder, which looks for the library
            raise BackendUnavailable(f"{_NO_LIBRARY}: {' '.join(str(error).split())}") from None

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._module, name)(*arguments)
        except self._module.NCCLError as error:
            raise NcclError(f"NCCL: {name} failed with {error}") from None

    # -- communicators -------------------------------------------------------------------------------------------------

    def new_id(self) -> bytes:
        """The identity of a new communicator. The rank that asks serves the others until they have met."""
        return bytes(self._call("get_unique_id"))

    def start(self, size: int, rank: int, identity: bytes) -> Any:
        """This rank's part of a communicator, on the current GPU. `state` tells when all ranks have met."""
        config = self._module.Config()
        config.blocking = 0
        return self._call("comm_init_rank_scalable", size, rank, 1, bytearray(identity), config.ptr)

    def state(self, comm: Any) -> int:
        """`SUCCESS`, `IN_PROGRESS`, or the code of an error."""
        return int(self._call("comm_get_async_error", comm))

    def error_of(self, comm: Any, code: int) -> NcclError:
        """The exception for a state."""
        text, more = self._call("get_error_string", code), self._call("get_last_error", comm)
        return NcclError(f"NCCL: {text}{f' ({more})' if more else ''}")

    def abort(self, comm: Any) -> None:
        """Ends a communicator and what runs on it. Needs no other rank."""
        self._call("comm_abort", comm)

    def finalize(self, comm: Any) -> None:
        """Begins the end of a communicator, in which all ranks take part."""
        self._call("comm_finalize", comm)

    def destroy(self, comm: Any) -> None:
        """Gives back one that is finalized."""
        self._call("comm_destroy", comm)

    # -- operations: each is put on a stream ---------------------------------------------------------------------------

    def group_start(self) -> None:
        """Operations of this thread are held back until `group_end`, and then begin together."""
        self._call("group_start")

    def group_end(self) -> None:
        """See `group_start`."""
        self._call("group_end")

    def all_reduce(self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """The reduction of all `source`, to `target` on everyone."""
        self._call("all_reduce", source, target, count, dtype, op, comm, stream)

    def reduce(
        self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """The same to `target` of one rank."""
        self._call("reduce", source, target, count, dtype, op, root, comm, stream)

    def reduce_scatter(self, comm: Any, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        """The r-th `count` elements of the reduction to `target` of rank r."""
        self._call("reduce_scatter", source, target, count, dtype, op, comm, stream)

    def broadcast(self, comm: Any, source: int, target: int, count: int, root: int, stream: int) -> None:
        """`count` bytes of one rank to `target` on everyone."""
        self._call("broadcast", source, target, count, BYTES, root, comm, stream)

    def all_gather(self, comm: Any, source: int, target: int, count: int, stream: int) -> None:
        """`count` bytes of each rank, one after another, to `target` on everyone."""
        self._call("all_gather", source, target, count, BYTES, comm, stream)

    def send(self, comm: Any, source: int, count: int, peer: int, stream: int) -> None:
        """`count` bytes to a rank that receives them."""
        self._call("send", source, count, BYTES, peer, comm, stream)

    def recv(self, comm: Any, target: int, count: int, peer: int, stream: int) -> None:
        """`count` bytes from a rank that sends them."""
        self._call("recv", target, count, BYTES, peer, comm, stream)


def version_text(version: int) -> str:
    """A version as it is written: 2.30.3 for 23003."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


_stand_in: list[Callable[[], Any]] = []


@functools.cache
def _real() -> Nccl:
    return Nccl()


def nccl() -> Nccl:
    """The NCCL of this process; the first call imports it.

    Raises:
        BackendUnavailable: nccl4py or NCCL is missing; says what to install.
    """
    found: Nccl = _stand_in[-1]() if _stand_in else _real()
    return found


def use_nccl(stand_in: Callable[[], Any] | None) -> None:
    """Puts another one in its place, for tests: a function that returns it or raises. None takes that back."""
    _stand_in[:] = [] if stand_in is None else [stand_in]
