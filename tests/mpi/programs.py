"""Programs that know nothing of MPI, run on it unchanged, with PHALANX_BACKEND=mpi."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import phalanx as px

ROOT = Path(__file__).resolve().parents[2]


class OnDevice:
    """Looks like an array on a GPU, but lies in ordinary memory, which every MPI takes."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__array_interface__, "version": 3}

    def __itruediv__(self, n: int) -> OnDevice:  # noqa: PYI034 - Self needs a newer Python
        self.array /= n
        return self


def device_arrays() -> None:
    from phalanx.backends.mpi.library import load_mpi

    load_mpi().takes_device_memory = True
    with px.init() as world:
        rank, size = world.rank, world.world_size
        x = OnDevice(np.full(4, rank, np.float32))
        assert world.all_reduce(x) is x  # the first collective of the group
        assert x.array.tolist() == [size * (size - 1) / 2] * 4
        y = OnDevice(np.full((2, size), rank + 1.0))
        world.all_reduce(y, "mean")
        assert (y.array == (size + 1) / 2).all()
        out = OnDevice(np.zeros(2 * size, np.int32))
        assert world.all_gather(OnDevice(np.full(2, rank, np.int32)), out) is out
        assert out.array.tolist() == [r for r in range(size) for _ in range(2)]
        part = OnDevice(np.zeros(2, np.int32))
        world.reduce_scatter(out, out=part)
        assert part.array.tolist() == [size * rank] * 2
        world.broadcast(part, size - 1)
        assert part.array.tolist() == [size * (size - 1)] * 2
        turned = OnDevice(np.zeros(size, np.int64))
        world.all_to_all(OnDevice(np.arange(size) + 10 * rank), turned)
        assert turned.array.tolist() == [10 * r + rank for r in range(size)]
        total = OnDevice(np.ones(3))
        world.reduce(total, 0)
        assert total.array.tolist() == [size if rank == 0 else 1] * 3
        assert world.all_reduce(np.ones(2)).tolist() == [size] * 2  # plain arrays go as before
        refusals: list[tuple[Any, Any]] = [
            (px.UnsupportedArray, lambda: world.all_reduce(OnDevice(np.ones((4, 4))[:, ::2]))),
            (px.UnsupportedOp, lambda: world.all_reduce(OnDevice(np.ones(2, np.float16)))),
            # The memory is no GPU's, or there is no driver to ask.
            (
                (px.UnsupportedArray, px.BackendUnavailable),
                lambda: world.all_reduce(OnDevice(np.ones(2)), async_op=True),
            ),
            (px.UsageError, lambda: world.all_gather(OnDevice(np.ones(2)), OnDevice(np.ones(3)))),
        ]
        for kind, call in refusals:
            try:
                call()
            except kind:
                continue
            raise AssertionError("it was not refused")
        world.barrier()
    load_mpi().takes_device_memory = False


def asynchronous_collectives() -> None:
    with px.init() as world:
        n, rank = world.world_size, world.rank
        x, whole = np.full(3, rank + 1.0), np.zeros(3 * n)
        world.barrier()
        works = [world.all_reduce(x, "max", async_op=True), world.all_gather(x, whole, timeout=20, async_op=True)]
        assert works[1].wait() is whole
        assert works[0].wait() is x
        assert whole.tolist() == [n] * 3 * n
        world.all_reduce(x, "max", async_op=True)  # nobody waits
        large = world.all_reduce(np.ones(200_000), async_op=True)
        assert world.all_reduce(np.ones(1), timeout=20).tolist() == [n]
        assert large.wait().tolist() == [n] * 200_000
        # An interrupted wait leaves the collective to the group's thread.
        if rank > 0:
            world.recv(np.ones(1), 0)
        work = world.all_reduce(np.ones(2), async_op=True)
        if rank == 0:
            try:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                work.wait()
                raise AssertionError("the others have not come yet")
            except KeyboardInterrupt:
                pass
            for other in range(1, n):
                world.send(np.ones(1), other)
        assert work.wait().tolist() == [n] * 2
        world.barrier()


def short_and_long_messages() -> None:
    """Messages that the core sends and takes itself, between others that it must not overtake."""
    with px.init() as world, world.subgroup([1, 0]) as other:
        rank, peer = world.rank, 1 - world.rank
        lengths = [1, 5000, 2, 0, 300, 5000, 3] * 40
        world.barrier()
        for group, to in ((world, peer), (other, 1 - other.rank)):
            for number, length in enumerate(lengths):
                # Of tag 1 the other rank asks first: what has come before it waits in the mailbox.
                group.isend(np.full(length, rank * 1000 + number), to, tag=number % 2)
            for tag in (1, 0):
                for number in range(tag, len(lengths), 2):
                    out = np.full(lengths[number], -1)
                    assert group.recv(out, to, tag=tag, timeout=20.0) is out
                    assert (out == peer * 1000 + number).all()
        # In turns, by two threads at once, each in its group.
        failures: list[BaseException] = []

        def talk(group: px.Group) -> None:
            try:
                out, to = np.zeros(4), 1 - group.rank
                for number in range(200):
                    group.send(np.full(4, float(number)), to, timeout=20.0)
                    assert group.recv(out, to, timeout=20.0).tolist() == [number] * 4
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=talk, args=[group]) for group in (world, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        # What does not fit is dropped, what is late is not lost, and an object may come between two arrays.
        world.barrier()
        if rank == 0:
            world.send(np.ones(3), 1)
            world.send_object("between", 1)
            world.recv(np.empty(1), 1)
            world.send(np.full(2, 7.0), 1)
        else:
            with contextlib.suppress(px.SizeMismatch):
                world.recv(np.empty(2), 0)
                raise AssertionError("three numbers in the place of two")
            assert world.recv_object(0) == "between"
            with contextlib.suppress(px.Timeout):
                world.recv(np.empty(2), 0, timeout=0.02)
                raise AssertionError("nothing was sent yet")
            world.send(np.ones(1), 0)
            assert world.recv(np.empty(2), 0).tolist() == [7.0, 7.0]
        world.barrier()


def remote_calls() -> None:
    with px.init() as world, px.rpc.Agent(world) as agent:

        @agent.register
        def add(a: float, b: float) -> float:
            return a + b

        world.barrier()
        assert agent.call((world.rank + 1) % world.world_size, "add", 2.0, 3.0, timeout=10) == 5
        world.barrier()


def training() -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    with px.init() as world:
        torch.manual_seed(world.rank)
        model = px.parallel.DDP(torch.nn.Linear(8, 2), world)  # rank 0's values count
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        model.verify_replicas()


def main() -> None:
    for example in ("hello.py", "objects.py"):
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    sys.argv = ["train", "--steps", "20"]
    runpy.run_module("phalanx.cli.demo.train", run_name="__main__")
    asynchronous_collectives()
    short_and_long_messages()
    remote_calls()
    training()
    device_arrays()
    print("all of them ran", flush=True)


if __name__ == "__main__":
    main()
