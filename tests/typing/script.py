"""A user's script, as type checkers see it. Lines that end in `# error` must be errors, all others must not.

It is not run: `test_checkers.py` gives it to mypy and to pyright.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import phalanx as px

Floats = npt.NDArray[np.float32]


@dataclass
class Config:
    rate: float


def reductions(world: px.Group, x: Floats, flag: bool) -> None:
    assert_type(world.all_reduce(x), Floats)
    assert_type(world.all_reduce(x, op="mean", timeout=5), Floats)
    assert_type(world.all_reduce(x, px.ReduceOp.MAX), Floats)
    assert_type(world.all_reduce(x, async_op=True), px.Work[Floats])
    assert_type(world.all_reduce(x, async_op=True).wait(timeout=5), Floats)
    assert_type(world.all_reduce(np.float32(1)), np.float32)
    assert_type(world.all_reduce(bytearray(4), "bor"), bytearray)
    maybe = world.all_reduce(x, async_op=flag)
    assert_type(maybe.wait() if isinstance(maybe, px.Work) else maybe, Floats)
    assert_type(world.all_reduce_many([x, x]), list[Floats])
    assert_type(world.reduce(x, 0), Floats)
    assert_type(world.reduce_scatter(x), Floats)
    assert_type(world.reduce_scatter(x, out=x), Floats)
    assert_type(world.reduce_scatter(x, "max", bytearray(4)), bytearray)
    assert_type(world.scan(x, "prod"), Floats)
    assert_type(world.exscan(x, async_op=True), px.Work[Floats])
    values, _ranks = world.argmin(x)
    assert_type(values, Floats)
    world.all_reduce([1, 2, 3])  # error
    world.all_reduce(3.0)  # error
    world.all_reduce(x, op="avg")  # error
    world.all_reduce(x, "sum", 5)  # error
    world.all_reduce(x).wait()  # error
    world.all_reduce(x, async_op=True).shape  # error
    world.reduce(x)  # error
    world.scan(x, "median")  # error
    world.argmax("text")  # error


def gathers(world: px.Group, x: Floats) -> None:
    assert_type(world.barrier(), None)
    assert_type(world.barrier(async_op=True), px.Work[None])
    assert_type(world.broadcast(x, src=0), Floats)
    assert_type(world.all_gather(x), Floats)
    assert_type(world.all_gather(x, counts="auto"), Floats)
    assert_type(world.all_gather(x, counts=[1, 2], async_op=True), px.Work[Floats])
    assert_type(world.all_gather(bytearray(4), x), Floats)
    assert_type(world.gather(x, 0), Floats | None)
    assert_type(world.scatter(x if world.rank == 0 else None, 0), Floats)
    assert_type(world.scatter(None, 0, x), Floats)
    assert_type(world.scatter(x, 0, counts="auto", async_op=True), px.Work[Floats])
    assert_type(world.all_to_all(x, send_counts=[1, 2]), Floats)
    world.all_gather(x, counts="any")  # error
    world.all_gather(x, counts=3)  # error
    world.gather(x)  # error
    world.gather(x, 0).sum()  # error
    world.scatter([x, x], 0)  # error
    world.broadcast(x, root=0)  # error


def messages(world: px.Group, x: Floats) -> None:
    assert_type(world.send(x, 1), None)
    assert_type(world.isend(x, 1), px.Work[None])
    assert_type(world.recv(x, 1), Floats)
    assert_type(world.recv(), px.Received)
    assert_type(world.recv(src=1), Any)
    assert_type(world.irecv(x, 1), px.Work[Floats])
    assert_type(world.irecv(), px.Work[px.Received])
    assert_type(world.sendrecv(x, 1, x, 1), Floats)
    world.send([1], 1)  # error
    world.recv(x, 1).src  # error


def objects(world: px.Group, config: Config) -> None:
    assert_type(world.broadcast_object(config, 0), Any)
    assert_type(world.broadcast_object(config, 0, type=Config), Config)
    assert_type(world.broadcast_object(config, 0, type=Config, async_op=True), px.Work[Config])
    assert_type(world.all_gather_object(config), list[Any])
    assert_type(world.all_gather_object(config, type=Config), list[Config])
    assert_type(world.gather_object(config, 0, type=Config), list[Config] | None)
    assert_type(world.scatter_object([config], 0, type=Config), Config)
    assert_type(world.recv_object(1, type=list[Config]), list[Config])
    assert_type(world.recv_object(), px.Received)
    world.broadcast_object(config, 0, type=Config).speed  # error
    world.scatter_object(3, 0)  # error


async def later(world: px.Group, x: Floats) -> None:
    work = world.all_reduce(x, async_op=True)
    assert_type(await work, Floats)
    work.add_done_callback(lambda done: done.result().shape)
    work.add_done_callback(lambda done: done.result().nothing)  # error
    world.all_reduce(x, async_op=True).wait("5")  # error
