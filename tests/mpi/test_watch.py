"""Who is stuck inside MPI, where nobody can be woken, ends with a word. Without any MPI."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from phalanx.group.engines.mpi import watchdog


class Engine:
    """What the watch looks at."""

    def __init__(self, *, broken: bool, longest: float = 60.0) -> None:
        self.closed = False
        self.inside = 7
        self.is_broken = broken
        self.longest = longest
        self.given_up = threading.Event()

    def give_up(self, seconds: float) -> None:
        self.given_up.set()


def watched(engine: Any) -> Engine:
    watchdog.watch(engine)
    found: Engine = engine
    return found


@pytest.mark.parametrize(("broken", "longest"), [(True, 60.0), (False, 0.2)])
def test_a_call_that_cannot_end_is_given_up(broken: bool, longest: float) -> None:
    engine = watched(Engine(broken=broken, longest=longest))
    assert engine.given_up.wait(10)
    engine.closed = True


def test_calls_that_end_are_left_alone() -> None:
    still_in_time, busy = watched(Engine(broken=False)), watched(Engine(broken=True))
    end = time.monotonic() + 2
    while time.monotonic() < end:
        busy.inside += 1  # another call each time
        time.sleep(0.05)
    assert not still_in_time.given_up.is_set()
    assert not busy.given_up.is_set()
    still_in_time.closed = busy.closed = True


def test_its_thread_ends_with_the_last_engine() -> None:
    engine = watched(Engine(broken=False))
    engine.closed = True
    end = time.monotonic() + 10
    while any(thread.name == "phalanx-mpi-watch" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.05)
