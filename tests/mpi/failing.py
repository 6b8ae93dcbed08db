"""A job in which the last rank fails in some way: `python -m tests.mpi.failing HOW FOLDER`.

The others write what they see to files, because a launcher may end them before anybody has read what they print.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import phalanx as px


def fail(world: px.Group, how: str) -> None:
    if how == "raises":
        raise ValueError("these data are no good")
    if how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "calls another operation":
        world.all_reduce(np.ones(5, np.float32))
    if how == "comes late":
        time.sleep(60)
    if how == "forks":
        fork(world)
    if how == "had another world":  # which is no failure
        world.all_reduce(np.ones(4, np.float32))


def fork(world: px.Group) -> None:
    """A child that calls what its parent will call, or waits for what its parent has called."""
    other = (world.rank + 1) % world.world_size
    work = world.irecv(np.zeros(1), other)
    child = os.fork()
    if child == 0:
        x = np.full(4, 100.0, np.float32)
        for call in (
            lambda: world.all_reduce(x),
            lambda: world.broadcast(x, world.rank),
            world.barrier,
            lambda: world.send(x, other),
            lambda: world.isend(x, other),
            lambda: world.irecv(x, other),
            work.wait,
        ):
            try:
                call()
                os._exit(1)
            except px.Closed:
                continue
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child took part"
    assert world.all_reduce(np.ones(4, np.float32)).tolist() == [world.world_size] * 4
    assert work.wait() == 7


def main(how: str, folder: Path) -> None:
    if how == "had another world":
        px.init(rank=0, world_size=1).close()
    world = px.init("mpi", timeout=20)
    x = np.ones(4, np.float32)
    world.all_reduce(x)
    last = world.world_size - 1
    began = folder / "began"
    try:
        if world.rank == last:
            time.sleep(0.3)
            began.write_text(repr(time.time()))
            fail(world, how)
        else:
            x[:] = 1
            if how == "is killed with a message for it":
                world.send(np.ones(100_000), last)
            if how == "is killed with a message from it":
                world.recv(np.ones(100_000), last)
            if how == "is killed with a receive from it":
                world.irecv(np.ones(1), last).wait()
            if how == "is killed with a receive from it that no thread waits for":
                work = world.irecv(np.ones(1), last)
                while not work.done():
                    time.sleep(0.001)
                work.result()
            world.all_reduce(x, timeout=1 if how == "comes late" else 20)
            assert how != "forks" or x.tolist() == [world.world_size] * 4, x
            if how == "forks":
                world.isend(np.full(1, 7.0), last)
    except px.PhalanxError as error:
        seen = {"error": type(error).__name__, "text": str(error), "after": time.time() - float(began.read_text())}
        (folder / f"rank{world.rank}.part").write_text(json.dumps(seen))
        (folder / f"rank{world.rank}.part").rename(folder / f"rank{world.rank}.json")
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
