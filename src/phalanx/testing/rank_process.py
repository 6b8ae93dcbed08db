"""The process of a rank: it reads its task, joins the world, calls the function, and reports."""

from __future__ import annotations

import faulthandler
import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..config import adopt
from ..group import Group
from ..wire import codec
from . import shipping
from .failures import FAILED_AT, capture, noting
from .worlds import MeetingPlace, join

__all__ = ["HEADER", "LIMITS", "START", "Task", "error_from", "main", "read_exactly"]

HEADER = struct.Struct("<QQ")
"""Lengths of a report's head and payload."""
LIMITS = codec.Limits(max_head=1 << 40, max_payload=1 << 50, max_arrays=1 << 40, max_depth=512)
"""Between parent and child, nothing is too much."""


START = struct.Struct("<dQ")
"""When to write down what every thread is doing, on the monotonic clock; and the length of the task."""


class Task(NamedTuple):
    """The task of a rank. Sent by `shipping`."""

    place: MeetingPlace
    patience: float
    """The default timeout of the group."""
    fn: Callable[..., Any]
    args: tuple[Any, ...]


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
    np.random.seed()  # else all ranks would inherit one state
    sock = socket.socket(fileno=socket_fd)
    give_up_at, size = START.unpack(read_exactly(sock, START.size))
    data = read_exactly(sock, size)
    faulthandler.enable(stacks_fd)
    faulthandler.dump_traceback_later(max(0.001, give_up_at - time.monotonic()), file=stacks_fd)
    report: tuple[str, Any]
    try:
        report = "result", _run(rank, data)
    except BaseException as error:
        report = _failed(rank, error)
    try:
        encoded = codec.encode(report, allow_pickle=True, limits=LIMITS)
    except Exception as error:  # a result that cannot be sent is a failure as well
        encoded = codec.encode(_failed(rank, error), limits=LIMITS)
    sock.sendall(HEADER.pack(len(encoded.head), encoded.payload_bytes))
    sock.sendall(encoded.head)
    for buffer in encoded.buffers:
        sock.sendall(buffer)
    faulthandler.cancel_dump_traceback_later()
    return 0


def _run(rank: int, data: bytearray) -> Any:
    task: Task = shipping.loads(data)
    with Group(join(task.place, rank, task.patience), _owns_backend=True) as group:
        return noting(task.fn, group, *task.args)


def _failed(rank: int, error: BaseException) -> tuple[str, Any]:
    failure = capture(rank, getattr(error, FAILED_AT, time.monotonic()), error)
    return "failure", (failure.at, failure.summary, failure.traceback, failure.echo_of, _pickled(error))


def _pickled(error: BaseException) -> bytes:
    """The pickled exception; empty if it cannot be pickled or read again, and then only its text travels."""
    try:
        data = pickle.dumps((type(error), error.args, error.__dict__))
        return data if error_from(data) is not None else b""
    except Exception:
        return b""


def error_from(data: bytes) -> BaseException | None:
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
