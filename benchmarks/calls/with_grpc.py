"""gRPC with plain bytes: a generic handler, no protoc. An array goes as its bytes and is an array again on arrival."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .worker import IN_FLIGHT, Call

__all__ = ["open_caller", "open_server"]

_METHOD = ("bench.Echo", "Echo")
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # a proxy of the user's is not for loopback
    ("grpc.so_reuseport", 0),
]


def _version(grpc: Any) -> str:
    return f"grpcio {grpc.__version__}"


class _Caller:
    def __init__(self, address: str, timeout: float) -> None:
        import grpc

        self.version = _version(grpc)
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        grpc.channel_ready_future(self._channel).result(timeout)
        self._echo = self._channel.unary_unary("/" + "/".join(_METHOD))
        self._timeout = timeout

    def echo(self, x: bytes) -> Call:
        return partial(self._echo, x, timeout=self._timeout)

    def in_flight(self, x: bytes, count: int) -> Call:
        send, timeout = self._echo.future, self._timeout

        def call() -> list[Any]:
            futures = [send(x, timeout=timeout) for _ in range(count)]
            return [future.result() for future in futures]

        return call

    def array(self, x: npt.NDArray[Any]) -> Call:
        echo, timeout, dtype = self._echo, self._timeout, x.dtype

        def call() -> npt.NDArray[Any]:
            return np.frombuffer(echo(x.tobytes(), timeout=timeout), dtype)

        return call

    def close(self) -> None:
        self._channel.close()


class _Server:
    def __init__(self, address: str, timeout: float) -> None:
        import grpc

        def echo(request: bytes, context: Any) -> bytes:
            return request

        self.version = _version(grpc)
        service, method = _METHOD
        handlers = {method: grpc.unary_unary_rpc_method_handler(echo)}
        # Fewer threads than calls in flight, as its own examples do: more only take turns at the GIL.
        self._server = grpc.server(ThreadPoolExecutor(4), options=_OPTIONS, maximum_concurrent_rpcs=4 * IN_FLIGHT)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        if not self._server.add_insecure_port(address):
            raise OSError(f"gRPC cannot listen at {address}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(1).wait(2)


def open_caller(address: str, timeout: float) -> _Caller:
    """The side that calls."""
    return _Caller(address, timeout)


def open_server(address: str, timeout: float) -> _Server:
    """The side that answers, in a few threads."""
    return _Server(address, timeout)
