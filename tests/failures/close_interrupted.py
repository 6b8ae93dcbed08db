"""Closes worlds, groups and agents, which Ctrl-C interrupts anywhere: `python -m tests.failures.close_interrupted 1`.

On one rank or two, of which the first is interrupted. A second `close` leaves nothing behind, and the other rank hears
of it at once. With another number N, every N-th place.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import phalanx as px


class Interrupted(BaseException):
    """As `KeyboardInterrupt`, and nobody else's."""


def interrupt(call: Callable[[], object], place: int) -> bool:
    """Calls something that is interrupted where it begins or leaves a function for the n-th time; False if it ended."""
    reached = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal reached
        if event in ("call", "c_return") and "/phalanx/" in frame.f_code.co_filename:
            reached += 1
            if reached == place:
                sys.setprofile(None)
                raise Interrupted

    sys.setprofile(profile)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


class Places:
    """The places where a call is interrupted, one after another, and how many descriptors are held after each."""

    def __init__(self, step: int) -> None:
        self.place = 1
        """0: the next call is not interrupted."""
        self._step = step
        self._held: float = math.inf
        self._suspect = 0
        self._kept = 0

    def check(self) -> None:
        """Goes on to the next place, if nothing is left of this one.

        What is held once more than before may be what a thread keeps from its first wait on. A call that is not
        interrupted tells: that is still there then.
        """
        gc.collect()
        found, end = descriptors(), time.monotonic() + 3
        while (found > self._held or threading.active_count() > 1) and time.monotonic() < end:
            time.sleep(0.005)
            found = descriptors()
        threads = [thread.name for thread in threading.enumerate()]
        assert threads == ["MainThread"], (self.place, threads)
        if self._suspect:
            assert found > self._held, f"descriptors were left behind: place {self._suspect}"
            self.place, self._suspect, self._held = self._suspect, 0, found
            self._kept += 1
            assert self._kept < 4, "each call leaves descriptors behind"
        elif found > self._held:
            self.place, self._suspect = 0, self.place
        else:
            self.place, self._held = self.place + self._step, found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def worlds(step: int) -> int:
    """One after another, each interrupted a little later, until none is."""
    places, goes_on = Places(step), True
    while goes_on:
        world = px.init(timeout=30)
        world.all_reduce(world.empty(100))
        if world.rank == 0:
            goes_on = interrupt(world.close, places.place) or places.place == 0
            world.close()
            places.check()
            with px.init(timeout=30) as world:  # says whether there is a next one
                world.broadcast(np.array([goes_on]), 0)
        else:
            began = time.monotonic()
            try:
                world.barrier()
            except px.PhalanxError:
                assert time.monotonic() - began < 20
            world.close()
            with px.init(timeout=30) as world:
                goes_on = bool(world.broadcast(np.zeros(1, bool), 0)[0])
    return places.place


def parts(make: Callable[[], Any], step: int) -> int:
    """Groups or agents of a world of one."""
    places, part = Places(step), make()
    while interrupt(part.close, places.place) or places.place == 0:
        part.close()
        places.check()
        part = make()
    part.close()
    return places.place


def main(step: int) -> None:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        with px.init() as world:

            def group() -> px.Group:
                made = world.split(0)
                made.all_reduce(np.ones(3))
                return made

            def agent() -> px.rpc.Agent:
                made = px.rpc.Agent(world)
                made.register("echo", lambda x: x)
                assert made.call(0, "echo", 1) == 1
                return made

            sys.stdout.write(f"{parts(group, step)} {parts(agent, step)} ")
        sys.stdout.write(f"{worlds(step)}\n")
    else:
        places = worlds(step)
        if os.environ["RANK"] == "0":
            sys.stdout.write(f"{places}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
