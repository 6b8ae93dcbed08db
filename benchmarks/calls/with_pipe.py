"""A bare `multiprocessing.Pipe`, the yardstick: bytes go to a child process and come back, and nothing is called.

`python -m benchmarks.calls.with_pipe LIBRARY SOCKET TIMEOUT` is both ranks: it starts rank 1 as its child.
"""

from __future__ import annotations

import multiprocessing
import platform
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from .worker import Call, Lacks, serve

__all__ = ["main"]


class _Side:
    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self.version = f"Python {platform.python_version()}"
        self._pipe = pipe

    def close(self) -> None:
        """Nothing: the end of the process is the end of the pipe."""


class _Caller(_Side):
    # No wait here has a limit: to poll first would cost a third of what is measured. The driver's limit ends it.
    def echo(self, x: bytes) -> Call:
        send, recv = self._pipe.send_bytes, self._pipe.recv_bytes

        def call() -> bytes:
            send(x)
            return recv()

        return call

    def in_flight(self, x: bytes, count: int) -> Call:
        raise Lacks("a bare pipe has no calls, so none are in flight")

    def array(self, x: npt.NDArray[Any]) -> Call:
        send, recv, dtype = self._pipe.send_bytes, self._pipe.recv_bytes, x.dtype

        def call() -> npt.NDArray[Any]:
            send(x.data)
            return np.frombuffer(recv(), dtype)

        return call


class _Server(_Side):
    def __init__(self, pipe: Connection[Any, Any]) -> None:
        super().__init__(pipe)
        threading.Thread(target=self._serve, name="bench-pipe", daemon=True).start()

    def _serve(self) -> None:
        send, recv = self._pipe.send_bytes, self._pipe.recv_bytes
        try:
            while True:
                send(recv())
        except (EOFError, OSError):
            return  # the caller is gone, and so will this process be


def _be_server(path: str, ours: Connection[Any, Any], theirs: Connection[Any, Any]) -> None:
    theirs.close()  # or the pipe would never end
    serve(path, 1, lambda: _Server(ours))


def main(arguments: list[str]) -> None:
    """Both ranks."""
    _, path, _ = arguments
    ours, theirs = multiprocessing.Pipe()
    # Forked, so that the driver finds the path in its command line, as in those of all ranks. There is no thread yet.
    context = multiprocessing.get_context("fork")
    context.Process(target=_be_server, args=(path, theirs, ours), daemon=True).start()
    theirs.close()
    serve(path, 0, lambda: _Caller(ours))


if __name__ == "__main__":
    main(sys.argv[1:])
