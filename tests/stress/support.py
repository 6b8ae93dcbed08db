"""What the stress tests share: worlds inside this process, and threads that must come to an end."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import phalanx as px
from phalanx.testing.worlds import open_world

LIMIT = 30.0
"""Seconds that nothing here needs: a thread that takes so long hangs."""


@contextlib.contextmanager
def groups(size: int, backend: str, *, timeout: float = 20.0) -> Iterator[list[px.Group]]:
    """The group of everybody on each rank of a world in this process."""
    with open_world(size, backend, timeout=timeout) as backends:
        yield [px.Group(one) for one in backends]


def together(*calls: Callable[[], Any], limit: float = LIMIT) -> list[Any]:
    """Runs each call in a thread of its own and returns the results; raises the first error, or if one hangs."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    end = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    hanging = [number for number, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"calls {hanging} hang"
    return results


def pattern(seed: int, size: int) -> npt.NDArray[np.uint8]:
    """Bytes that no other message has."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def any_size(rng: random.Random) -> int:
    """Sizes around everything that is treated apart: empty, less than a read-ahead, more, and more than a buffer."""
    return rng.choice([0, 1, 100, 65_535, 65_536 + 40, 300_000, 1 << 20])
