"""What ranks do together of which one may have no core, or one processor: all collectives, messages and calls."""

from __future__ import annotations

import os
import sys

import numpy as np

import phalanx as px
from phalanx import _native

SIZES = (1, 1000, 100_000, 1 << 20)
"""Numbers of eight bytes: for each of the ways that a payload may go."""


def collect(world: px.Group, size: int) -> None:
    rank, n = world.rank, world.world_size
    mine, numbers = np.full(size, float(rank)), np.arange(n, dtype=float)
    assert (world.all_reduce(mine.copy()) == numbers.sum()).all()
    assert (np.asarray(world.all_gather(mine)).reshape(n, size) == numbers[:, None]).all()
    assert (world.broadcast(mine.copy(), n - 1) == n - 1).all()
    assert (np.asarray(world.all_to_all(np.repeat(numbers, size))).reshape(n, size) == rank).all()
    world.barrier()


def pass_round(world: px.Group, size: int) -> None:
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    mine = np.full(size, float(world.rank))
    assert (world.sendrecv(mine, after, np.empty(size), before) == before).all()
    work, sent = world.irecv(np.empty(size), before, tag=3), world.isend(mine, after, tag=3)
    assert (work.wait() == before).all()
    sent.wait()


def call(world: px.Group, agent: px.rpc.Agent, size: int) -> None:
    mine = np.full(size, float(world.rank))
    for rank in range(world.world_size):
        assert (agent.call(rank, "echo", mine) == mine).all()
        assert agent.call_async(rank, "sum", [mine, mine]).result() == 2 * mine.sum()


def main() -> None:
    with px.init(timeout=40) as world:
        with px.rpc.Agent(world) as agent:
            agent.register("echo", lambda x: x)
            agent.register("sum", lambda arrays: float(np.sum(arrays)))
            world.barrier()
            for _ in range(2):  # long payloads go over lanes once these are agreed upon
                for size in SIZES:
                    collect(world, size)
                    pass_round(world, size)
                    call(world, agent, size)
            world.barrier()
        sys.stdout.write(f"{_native.available} {len(os.sched_getaffinity(0))}\n")


if __name__ == "__main__":
    if "ONE_CORE" in os.environ:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    main()
