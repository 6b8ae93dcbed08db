"""What the scripts of these tests import: words to the test that started them, and errors in a form that it can check.

Each event is one line of JSON on standard output. Its time is CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import phalanx as px

__all__ = [
    "descriptors",
    "expect",
    "hear",
    "init",
    "np",
    "open_files",
    "os",
    "px",
    "say",
    "sys",
    "tell_error",
    "threading",
    "threads",
    "time",
]


def say(event: str, **fields: Any) -> None:
    """Tells the test something."""
    line = json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n"
    os.write(1, line.encode())


def hear() -> str:
    """Waits for a line from the test; "" if it has ended."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode().rstrip("\n")


def init(timeout: float = 30.0, **arguments: Any) -> px.Group:
    """Joins the world that the test's variables describe."""
    world = px.init(timeout=timeout, **arguments)
    say("joined", rank=world.rank, pid=os.getpid())
    return world


def tell_error(event: str, error: BaseException, began: float | None = None) -> None:
    """Tells the test what was raised."""
    say(
        event,
        type=type(error).__name__,
        kinds=[kind.__name__ for kind in type(error).__mro__],
        text=str(error),
        took=time.monotonic() - began if began is not None else None,
        **{
            name: getattr(error, name, None)
            for name in (
                "rank",
                "peer",
                "operation",
                "missing",
                "arrived",
                "reason",
                "remote_traceback",
                "mine",
                "theirs",
            )
        },
    )


def expect(call: Callable[[], Any], event: str = "raised") -> None:
    """Makes a call that should raise, and tells the test what came of it."""
    began = time.monotonic()
    try:
        result = call()
    except BaseException as error:
        tell_error(event, error, began)
    else:
        say(event, type="", kinds=[], text=f"returned {result!r}", took=time.monotonic() - began)


def open_files() -> list[str]:
    """What is open in this process, without the descriptor that looks."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def descriptors() -> list[str]:
    """The kinds of what is open in this process."""
    return sorted(name.split("[", 1)[0] if name.startswith(("socket", "pipe")) else name for name in open_files())


def threads(expected: int | None = None) -> int:
    """How many threads the kernel counts in this process. One that was joined may take a moment to leave its list."""
    end = time.monotonic() + 2.0
    while expected is not None and len(os.listdir("/proc/self/task")) > expected and time.monotonic() < end:
        time.sleep(0.005)
    return len(os.listdir("/proc/self/task"))
