"""pyzmq: DEALER and ROUTER over loopback TCP. No call has a name or a number: less than any remote call needs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from .worker import Call

__all__ = ["open_caller", "open_server"]


class _Side:
    def __init__(self, timeout: float) -> None:
        import zmq

        self._zmq: Any = zmq
        self._milliseconds = int(timeout * 1000)
        self._context = self._zmq.Context()
        self.version = f"pyzmq {self._zmq.__version__}, libzmq {self._zmq.zmq_version()}"

    def _socket(self, kind: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.LINGER, 0)
        made.setsockopt(self._zmq.SNDTIMEO, self._milliseconds)
        return made


class _Caller(_Side):
    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(timeout)
        self._dealer = self._socket(self._zmq.DEALER)
        self._dealer.setsockopt(self._zmq.RCVTIMEO, self._milliseconds)
        self._dealer.connect(f"tcp://{address}")

    def echo(self, x: bytes) -> Call:
        send, recv = self._dealer.send, self._dealer.recv

        def call() -> Any:
            send(x)
            return recv()

        return call

    def in_flight(self, x: bytes, count: int) -> Call:
        send, recv = self._dealer.send, self._dealer.recv

        def call() -> list[Any]:
            for _ in range(count):
                send(x)
            return [recv() for _ in range(count)]

        return call

    def array(self, x: npt.NDArray[Any]) -> Call:
        send, recv, dtype = self._dealer.send, self._dealer.recv, x.dtype

        def call() -> npt.NDArray[Any]:
            send(x, copy=False)
            return np.frombuffer(recv(copy=False).buffer, dtype)

        return call

    def close(self) -> None:
        self._context.destroy(linger=0)


class _Server(_Side):
    def __init__(self, address: str, timeout: float) -> None:
        super().__init__(timeout)
        self._router = self._socket(self._zmq.ROUTER)
        self._router.bind(f"tcp://{address}")
        self._thread = threading.Thread(target=self._serve, name="bench-zmq", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        receive, send = self._router.recv_multipart, self._router.send_multipart
        try:
            while True:
                send(receive(copy=False), copy=False)
        except self._zmq.ContextTerminated:
            self._router.close()

    def close(self) -> None:
        self._context.term()
        self._thread.join(1)


def open_caller(address: str, timeout: float) -> _Caller:
    """The side that calls."""
    return _Caller(address, timeout)


def open_server(address: str, timeout: float) -> _Server:
    """The side that answers, in one thread."""
    return _Server(address, timeout)
