"""Closes worlds, groups and agents, which Ctrl-C interrupts anywhere: `python -m tests.failures.close_interrupted 1`.

On one rank or two, of which the first is interrupted. A second `close` leaves nothing behind, and the other rank hears
of it at once. With another number N, every N-th place.
"""

from __future__ import annotations

import gc
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


def held() -> tuple[int, list[str]]:
    """Descriptors, and threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def settle(wanted: tuple[int, list[str]]) -> tuple[int, list[str]]:
    """What is held once that is as it was, or after a while."""
    end = time.monotonic() + 5
    while (found := held()) != wanted and time.monotonic() < end:
        time.sleep(0.005)
    return found


def worlds(step: int) -> int:
    """One after another, each interrupted a little later, until none is."""
    before, place, goes_on = None, 1, True
    while goes_on:
        world = px.init(timeout=30)
        world.all_reduce(world.empty(100))
        if world.rank == 0:
            goes_on = interrupt(world.close, place)
            world.close()
            found = held() if before is None else settle(before)
            before = before or found
            assert found == before, (place, found, before)
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
        place += step
    return place


def parts(make: Callable[[], Any], step: int) -> int:
    """Groups or agents of a world of one."""
    before, place, part = None, 1, make()
    while interrupt(part.close, place):
        part.close()
        found = held() if before is None else settle(before)
        before = before or found  # a thread keeps what its first wait takes
        assert found == before, (place, found, before)
        part, place = make(), place + step
    part.close()
    return place


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
