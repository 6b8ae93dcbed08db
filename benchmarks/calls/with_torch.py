"""torch.distributed.rpc, over TensorPipe with whatever it chooses between two processes of one machine."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy.typing as npt

from phalanx.operating_system import die_with_parent

from .worker import Call

__all__ = ["echo", "open_caller", "open_server"]

_NAMES = ("caller", "server")


def echo(x: Any) -> Any:
    """The function that is called. Its name travels, so it is a function of this module."""
    return x


class _Torch:
    def __init__(self, rank: int, address: str, timeout: float) -> None:
        import torch
        from torch.distributed import rpc

        # Most of the time this process is stopped, and would not see that the driver is gone. The kernel does.
        die_with_parent()
        torch.set_num_threads(1)
        # They meet in a file of the folder that they start in: a store of torch's listens on every interface.
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/store", rpc_timeout=timeout)
        rpc.init_rpc(_NAMES[rank], rank=rank, world_size=2, rpc_backend_options=options)
        self.version = f"torch {torch.__version__}"
        self._rpc, self._from_numpy = rpc, torch.from_numpy

    def echo(self, x: bytes) -> Call:
        return partial(self._rpc.rpc_sync, _NAMES[1], echo, args=(x,))

    def in_flight(self, x: bytes, count: int) -> Call:
        rpc_async = self._rpc.rpc_async

        def call() -> list[bytes]:
            futures = [rpc_async(_NAMES[1], echo, args=(x,)) for _ in range(count)]
            return [future.wait() for future in futures]

        return call

    def array(self, x: npt.NDArray[Any]) -> Call:
        return partial(self._rpc.rpc_sync, _NAMES[1], echo, args=(self._from_numpy(x),))

    def close(self) -> None:
        self._rpc.shutdown(timeout=5)


def open_caller(address: str, timeout: float) -> _Torch:
    """The side that calls."""
    return _Torch(0, address, timeout)


def open_server(address: str, timeout: float) -> _Torch:
    """The side that answers, in threads of torch's."""
    return _Torch(1, address, timeout)
