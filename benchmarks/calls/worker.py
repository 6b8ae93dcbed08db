"""One process of one contender: `python -m benchmarks.calls.worker LIBRARY SOCKET TIMEOUT RANK ADDRESS`.

It does what the driver says, one line of JSON at a time, as `phalanx.cli.bench.worker` does. Rank 0 calls; rank 1
answers calls in threads of its own, and the driver at once. Between two orders both are blocked in a read.

This file also runs as a script, in a Python that has neither Phalanx nor msgspec: it needs NumPy and nothing else.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import select
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["IN_FLIGHT", "Call", "Caller", "Lacks", "Server", "main", "serve", "timed"]

IN_FLIGHT = 64
"""Calls that are under way at once in the cell of that name."""

Call = Callable[[], Any]
"""One call, or one batch of them, with its arguments bound; gives what came back."""


class Lacks(Exception):
    """The contender has no such thing. The text says what it lacks."""


class Server(Protocol):
    """The answering side, on rank 1."""

    version: str

    def close(self) -> object:
        """Ends it."""


class Caller(Server, Protocol):
    """The calling side, on rank 0. Nothing is sent before the call itself."""

    def echo(self, x: bytes) -> Call:
        """Sends bytes there and back."""

    def in_flight(self, x: bytes, count: int) -> Call:
        """The same for so many calls: all are sent, and then waited for in turn. Gives a list.

        Raises:
            Lacks: Only one call can be under way.
        """

    def array(self, x: npt.NDArray[Any]) -> Call:
        """Sends an array there and back. Gives something that `np.asarray` takes."""


def timed(call: Call, iterations: int) -> float:
    """Seconds of one call, the median of so many. This is the loop that every contender is measured in."""
    clock = time.perf_counter
    times = [0.0] * iterations
    last = clock()
    for i in range(iterations):
        call()
        now = clock()
        times[i] = now - last
        last = now
    return statistics.median(times)


class _PreparedCall:
    """One cell on the side that calls."""

    def __init__(self, caller: Caller, operation: str, size: int) -> None:
        self._calls = 1
        self._expected: bytes | npt.NDArray[Any] = bytes(itertools.islice(itertools.cycle(range(1, 250)), size))
        if operation == "echo":
            self._call = caller.echo(self._expected)
        elif operation == "in_flight":
            self._calls = IN_FLIGHT
            self._call = caller.in_flight(self._expected, IN_FLIGHT)
        elif operation == "array":
            self._expected = np.arange(size // 4, dtype=np.float32)
            self._call = caller.array(self._expected)
        else:
            raise ValueError(f"there is no cell {operation!r}")

    def check(self) -> bool:
        """One call, or batch: whether all of it came back."""
        found = self._call()
        found = found if self._calls > 1 else [found]
        return len(found) == self._calls and all(map(self._is_right, found))

    def _is_right(self, found: Any) -> bool:
        if found is self._expected:
            return False  # it never left this process
        if isinstance(self._expected, bytes):
            return bool(found == self._expected)
        array = np.asarray(found)
        return array.dtype == self._expected.dtype and np.array_equal(array, self._expected)

    def run(self, iterations: int) -> float:
        """Seconds for so many calls, by the median of them."""
        batches = -(-iterations // self._calls)
        self._call()  # others had their turn: this one wakes up what sleeps
        gc.disable()  # as timeit does: a collection belongs to what a program keeps, not to these calls
        try:
            return timed(self._call, batches) / self._calls * iterations
        finally:
            gc.enable()


class _CallWorker:
    def __init__(self, side: Any, rank: int) -> None:
        self._side, self._rank = side, rank
        self._prepared: dict[str, _PreparedCall] = {}

    def handle(self, order: dict[str, Any]) -> dict[str, Any]:
        kind = order["type"]
        if self._rank != 0:
            return {}
        if kind == "prepare":
            try:
                self._prepared[order["slot"]] = _PreparedCall(self._side, order["operation"], order["count"])
            except Lacks as error:
                return {"lacks": str(error)}
            return {}
        if kind == "check":
            right = self._prepared[order["slot"]].check()
            return {} if right else {"error": "what came back is not what was sent"}
        if kind == "run":
            return {"seconds": self._prepared[order["slot"]].run(order["iterations"])}
        self._prepared.clear()
        return {}


def _end_with_the_driver(connection: socket.socket) -> None:
    """Ends this process when the driver is gone, also from inside a call that would never return."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # what it has started goes too: some of Ray's processes would stay for minutes
    os._exit(1)


def serve(path: str, rank: int, open_side: Callable[[], Server]) -> None:
    """Makes one side of the contender, and serves one driver until it says that this is the end."""
    os.chdir(os.path.dirname(path))  # a whole path may be longer than the address of a Unix socket can be
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.basename(path))
    threading.Thread(target=_end_with_the_driver, args=(connection,), name="bench-lifeline", daemon=True).start()

    def tell(answer: dict[str, Any]) -> None:
        connection.sendall(json.dumps(answer).encode() + b"\n")

    try:
        side = open_side()
        worker = _CallWorker(side, rank)
        tell({"rank": rank, "size": 2, "version": side.version})
    except Exception:
        tell({"error": traceback.format_exc()})
        sys.exit(1)
    with connection.makefile("rb") as reading:
        for line in reading:
            order = json.loads(line)
            if order["type"] == "end":
                break
            try:
                tell(worker.handle(order))
            except Exception:
                tell({"error": traceback.format_exc()})
    worker.handle({"type": "drop"})
    side.close()
    tell({})


def main(arguments: list[str]) -> None:
    """As the first lines of this file say."""
    name, path, timeout, rank, address = arguments
    prefix = f"{__package__}." if __package__ else ""  # as a script it has no package, but its folder is on the path

    def open_side() -> Server:
        module = importlib.import_module(f"{prefix}with_{name}")
        side: Server = (module.open_caller if rank == "0" else module.open_server)(address, float(timeout))
        return side

    serve(path, int(rank), open_side)


if __name__ == "__main__":
    main(sys.argv[1:])
