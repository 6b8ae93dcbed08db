"""A backend that nobody holds any more closes by itself: its threads end, and the peers hear of it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.backends import MeshBackend
from phalanx.backends.base import LaneBackend
from phalanx.errors import PeerLost
from phalanx.testing.worlds import _reserved_port, join, meeting_place

LIMIT = 30.0
HEARD = 3.0
"""Seconds in which a peer must hear of it; a second is promised, but the machine may be busy."""


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.02)
    return condition()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("phalanx")}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def both(make: Callable[[int], LaneBackend]) -> list[LaneBackend]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, range(2)))


@pytest.mark.parametrize("kind", ["mesh", "mesh-classic", "tcp", "hosted by rank 0"])
@pytest.mark.parametrize("dropped", [0, 1])
def test_a_backend_that_is_dropped_closes(kind: str, dropped: int) -> None:
    gc.collect()
    known, open_before = threads(), descriptors()
    if kind == "hosted by rank 0":
        with _reserved_port("127.0.0.1") as master:
            backends = both(lambda rank: MeshBackend(rank, 2, master, token="secret", timeout=LIMIT))
        hear_of(backends, dropped)
    else:
        with meeting_place(kind, 2, None) as place:
            backends = both(lambda rank: join(place, rank, LIMIT))
            hear_of(backends, dropped)
    del backends
    assert eventually(lambda: threads() <= known), threads() - known
    assert eventually(lambda: descriptors() <= open_before)


def hear_of(backends: list[LaneBackend], dropped: int) -> None:
    """Drops one of two backends while the other waits for a message, and closes the other."""
    peer = backends.pop(1 - dropped)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.recv, bytearray(1), dropped)
        assert peer.rank != dropped
        backends.clear()
        gc.collect()
        began = time.monotonic()
        error = waiting.exception(LIMIT)
    assert isinstance(error, PeerLost), error
    assert error.peer == dropped
    assert time.monotonic() - began < HEARD
    peer.close()
