"""Makes mistakes in a process that no launcher has started, and prints what was said: `alone.py`."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import warnings
from typing import Any

import numpy as np
from tests.mistakes.in_world import told
from tests.mistakes.mistakes import ALONE

import phalanx as px


class Listener:
    """A port that another program has taken."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"


def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def two_ranks(**different: list[Any]) -> None:
    """Two ranks that do not agree on something; raises what the second one was told."""
    master = nobody()
    common: dict[str, Any] = {"rank": [0, 1], "world_size": [2, 2], "token": ["abcdefgh"] * 2, **different}
    errors: list[BaseException | None] = [None, None]

    def join(number: int) -> None:
        arguments = {name: values[number] for name, values in common.items()}
        try:
            px.init(master=master, timeout=2, **arguments)
        except px.PhalanxError as error:
            errors[number] = error

    # As processes would: each in turn has the time to come up.
    if os.fork() == 0:
        join(0)
        os._exit(0)
    thread = threading.Thread(target=join, args=(1,))
    thread.start()
    thread.join()
    os.wait()
    if errors[1] is not None:
        raise errors[1]


def main() -> None:
    names = {"px": px, "np": np, "listener": Listener, "nobody": nobody, "two_ranks": two_ranks}
    base = dict(os.environ)
    said = {}
    for mistake in ALONE:
        os.environ.clear()
        os.environ.update(base | mistake.variables)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = told(mistake.program, names)
        said[mistake.name] = text or "\n".join(str(warning.message) for warning in caught)
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
