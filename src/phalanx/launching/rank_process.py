"""The process of a rank: it reads its task, carries it out, and reports."""

from __future__ import annotations

import atexit
import faulthandler
import inspect
import math
import pickle
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..config import adopt
from ..errors import UsageError
from ..exception_text import message_of
from ..wire import codec
from . import shipping
from .failures import FAILED_AT, RankFailure, capture

__all__ = ["HEADER", "LIMITS", "START", "Task", "failure_from", "main", "read_exactly"]

HEADER = struct.Struct("<QQ")
"""Lengths of a report's head and payload."""
LIMITS = codec.Limits(max_head=1 << 40, max_payload=1 << 50, max_arrays=1 << 40, max_depth=512)
"""Between parent and child, nothing is too much."""


START = struct.Struct("<dQ")
"""When to write down what every thread is doing, on the monotonic clock; and the length of the task."""


class Task(NamedTuple):
    """The task of a rank: `body(rank, *args)`. Sent by `shipping`."""

    body: Callable[..., Any]
    args: tuple[Any, ...]
    runs_exit_handlers: bool = False
    """The process ends as a program does: it waits for its threads, and calls what `atexit` knows."""


def read_exactly(sock: socket.socket, size: int) -> bytearray:
    """Reads so many bytes.

    Raises:
        EOFError: The other side is gone.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


def main(rank: int, socket_fd: int, stacks_fd: int, environment: dict[str, str]) -> int:
    """Runs one rank; returns its exit code."""
    adopt(environment)
    shipping.fresh_main()
    np.random.seed()  # else all ranks would inherit one state
    sock = socket.socket(fileno=socket_fd)
    give_up_at, size = START.unpack(read_exactly(sock, START.size))
    data = read_exactly(sock, size)
    faulthandler.enable(stacks_fd)
    if give_up_at < math.inf:
        faulthandler.dump_traceback_later(max(0.001, give_up_at - time.monotonic()), file=stacks_fd)
    report: tuple[str, Any]
    task = None
    try:
        task = shipping.loads(data)
        report = "result", task.body(rank, *task.args)
    except BaseException as error:
        report = _failed(rank, error)
    try:
        encoded = codec.encode(report, allow_pickle=True, limits=LIMITS)
    except Exception as error:  # a result that cannot be sent is a failure as well
        encoded = codec.encode(_failed(rank, _unsendable(report[1], error)), limits=LIMITS)
    sock.sendall(HEADER.pack(len(encoded.head), encoded.payload_bytes))
    sock.sendall(encoded.head)
    for buffer in encoded.buffers:
        sock.sendall(buffer)
    faulthandler.cancel_dump_traceback_later()
    if task is not None and task.runs_exit_handlers:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python itself does at its end
        atexit._run_exitfuncs()
    return 0


def _unsendable(result: Any, error: Exception) -> UsageError:
    if inspect.iscoroutine(result):
        result.close()  # else Python warns that nobody has awaited it
        return UsageError("the function is a coroutine function: nobody awaits it (call asyncio.run inside it)")
    # The codec speaks of a place in what is sent, of which the function knows nothing.
    reason = re.sub(r"^cannot send an object of type (\S+) at \$\[1\](\S*): ", r"\1: ", message_of(error))
    return UsageError(f"what the function returned cannot be sent back ({reason})")


def _failed(rank: int, error: BaseException) -> tuple[str, Any]:
    failure = capture(rank, getattr(error, FAILED_AT, time.monotonic()), error)
    fields = failure.at, failure.summary, failure.traceback, failure.echo_of, failure.shared, failure.mild
    return "failure", (*fields, _pickled(error), _pickled_data(failure.attached))


def failure_from(rank: int, report: Any) -> RankFailure:
    """The failure that a rank has reported."""
    at, summary, traceback, echo_of, shared, mild, error, attached = report
    return RankFailure(
        rank,
        at,
        summary,
        traceback,
        _error_from(error) if error else None,
        echo_of,
        shared,
        mild=mild,
        attached=pickle.loads(attached) if attached else None,  # noqa: S301 - between parent and child
    )


def _pickled_data(value: Any) -> bytes:
    return b"" if value is None else pickle.dumps(value)


def _pickled(error: BaseException) -> bytes:
    """The pickled exception; empty if it cannot be pickled or read again, and then only its text travels."""
    try:
        data = pickle.dumps((type(error), error.args, error.__dict__))
        return data if _error_from(data) is not None else b""
    except Exception:
        return b""


def _error_from(data: bytes) -> BaseException | None:
    """The exception that a rank raised, if it could be sent.

    Not made by calling its type, whose arguments are unknown.
    """
    try:
        kind, args, state = pickle.loads(data)  # noqa: S301 - between parent and child
        error: BaseException = kind.__new__(kind)
        error.args = args
        error.__dict__.update(state)
    except Exception:
        return None
    return error
