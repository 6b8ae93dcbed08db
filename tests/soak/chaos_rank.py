"""One rank of a chaos world: random operations, the same on all ranks, until something ends them.

Runs in a process that was forked from a zygote. What it sees, it tells the parent in datagrams of JSON; times are
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

import phalanx as px

STEPS = 1_000_000
LARGEST = 1 << 20
"""Elements of the largest array: with float32 it does not fit the kernel's buffers, so that ranks block in sends."""


class Teller:
    """Speaks to the parent."""

    def __init__(self, address: str, number: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(address)
        self._number = number

    def __call__(self, event: str, **fields: Any) -> None:
        text = json.dumps({"event": event, "rank": self._number, "at": time.monotonic(), **fields})
        self._socket.send(text.encode())


def run(config: dict[str, Any]) -> None:
    """The life of one rank.

    Args:
        config: `rank`, `variables` (the environment), `address` (of the parent's socket), `seed` (the same on all
            ranks), `join_timeout`, `timeout` (of collectives) and `message_timeout`.
    """
    os.environ.update(config["variables"])
    tell = Teller(config["address"], config["rank"])
    before = _open_files()
    tell("started", pid=os.getpid())
    try:
        world = px.init(timeout=config["join_timeout"])
    except px.PhalanxError as error:
        tell("failed", **_describe(error), **_left(before))
        return
    tell("joined", listening=_listening())
    try:
        _work(world, config)
    except px.PhalanxError as error:
        tell("raised", **_describe(error))
    except BaseException as error:
        tell("raised", type=type(error).__name__, text=str(error), peer=None, missing=[])
        raise
    again = time.monotonic()
    try:
        world.barrier(timeout=5.0)
    except px.PhalanxError as error:
        tell("again", took=time.monotonic() - again, **_describe(error))
    else:
        tell("again", took=time.monotonic() - again, type="", text="the group went on", peer=None, missing=[])
    began = time.monotonic()
    world.close()
    took = time.monotonic() - began
    del world
    tell("closed", took=took, **_left(before))


def _work(world: px.Group, config: dict[str, Any]) -> None:
    shared = random.Random(config["seed"])
    mine = random.Random(f"{config['seed']}/{world.rank}")
    half = world.subgroup([r for r in range(world.world_size) if r % 2 == world.rank % 2])
    collective: float | None = config["timeout"]
    message: float = config["message_timeout"]
    only_world = False
    for number in range(1, STEPS):
        step = shared.choice(STEPS_OF_WORK)
        size = int(LARGEST ** shared.random())
        root = shared.randrange(world.world_size)
        if step == "barrier":
            world.barrier(timeout=collective)
        elif step == "broadcast":
            data = world.broadcast(np.full(size, world.rank, np.float32), root, timeout=collective)
            assert data[0] == data[-1] == root
        elif step == "all_reduce":
            data = world.all_reduce(np.ones(size, np.float32), timeout=collective)
            assert data[0] == data[-1] == world.world_size
        elif step in COLLECTIVES:
            COLLECTIVES[step](world, size, root, collective)
        elif step == "half":
            try:
                if not only_world:
                    data = half.all_reduce(np.ones(size, np.float32), timeout=collective)
                    assert data[0] == half.world_size
            except (px.ChannelClosed, px.Timeout):
                # The lost rank may not be in this half; but another member gave up, or waits for it in the world.
                only_world = True
        elif step in MESSAGES:
            shift = 1 + shared.randrange(world.world_size - 1)
            try:
                if not only_world:
                    MESSAGES[step](world, size, root, shift, number, message)
            except px.Timeout:
                # It names the rank that this one waits for, which may itself wait for the stopped one. A message that
                # timed out does not break the group; the next collective does.
                only_world = True
        elif step == "asynchronous":
            works = [world.all_reduce(np.ones(size // 4 + 1), async_op=True, timeout=collective) for _ in range(3)]
            for work in works:
                work.wait()
        elif step == "compute":
            time.sleep(mine.random() * 0.02)


STEPS_OF_WORK = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "half",
    "ring",
    "ring",
    "gather",
    "objects",
    "asynchronous",
    "compute",
)


def _reduce(world: px.Group, size: int, root: int, timeout: float | None) -> None:
    data = world.reduce(np.ones(size), root, timeout=timeout)
    assert data[0] == data[-1] == (world.world_size if world.rank == root else 1)


def _reduce_scatter(world: px.Group, size: int, _root: int, timeout: float | None) -> None:
    out = np.empty(size // 4 + 1, np.int32)
    world.reduce_scatter(np.ones(world.world_size * out.size, np.int32), out=out, timeout=timeout)
    assert out[0] == out[-1] == world.world_size


def _all_gather(world: px.Group, size: int, _root: int, timeout: float | None) -> None:
    x = np.full(size // 4 + 1, world.rank, np.float32)
    out = np.empty(world.world_size * x.size, np.float32)
    world.all_gather(x, out, timeout=timeout)
    assert (out.reshape(world.world_size, -1)[:, -1] == np.arange(world.world_size)).all()


def _all_to_all(world: px.Group, size: int, _root: int, timeout: float | None) -> None:
    x = np.full(world.world_size * (size // 4 + 1), world.rank, np.float32)
    out = np.empty_like(x)
    world.all_to_all(x, out, timeout=timeout)
    assert (out.reshape(world.world_size, -1)[:, -1] == np.arange(world.world_size)).all()


COLLECTIVES = {
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def _ring(world: px.Group, size: int, _root: int, shift: int, _number: int, timeout: float) -> None:
    to, source = (world.rank + shift) % world.world_size, (world.rank - shift) % world.world_size
    sending = world.isend(np.full(size, world.rank, np.int32), to, timeout=timeout)
    data = world.recv(src=source, timeout=timeout)
    assert data[0] == data[-1] == source
    sending.wait()


def _gather(world: px.Group, size: int, root: int, _shift: int, number: int, timeout: float) -> None:
    # The tag is the step's number: a fast rank may already be at the next one.
    if world.rank != root:
        world.send(np.full(size, world.rank, np.int16), root, tag=number, timeout=timeout)
        return
    seen = set()
    for _ in range(world.world_size - 1):
        received = world.recv(tag=number, timeout=timeout)
        assert received.data[0] == received.src
        seen.add(received.src)
    assert len(seen) == world.world_size - 1


def _objects(world: px.Group, size: int, root: int, _shift: int, number: int, timeout: float) -> None:
    if world.rank != root:
        data = {"from": world.rank, "data": b"x" * min(size, 1000)}
        world.send_object(data, root, tag=number, timeout=timeout)
        return
    for _ in range(world.world_size - 1):
        world.recv_object(tag=number, timeout=timeout)


MESSAGES = {"ring": _ring, "gather": _gather, "objects": _objects}


def _describe(error: px.PhalanxError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "peer": error.peer,
        "missing": list(getattr(error, "missing", ())),
    }


# -- what is left ------------------------------------------------------------------------------------------------------


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(found)


def _left(before: list[str]) -> dict[str, Any]:
    gc.collect()
    # A thread that has been joined may take a moment more to leave the kernel's list.
    end = time.monotonic() + 1.0
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
        time.sleep(0.001)
    files = list(_open_files())
    for name in before:
        if name in files:
            files.remove(name)
    # The wakers of the main thread stay for the next world: one, and two for waits inside another.
    wakers = [name for name in files if "eventfd" in name]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": [name for name in files if name not in wakers] + wakers[3:],
    }


def _listening() -> list[str]:
    """The inodes of this process's listening sockets, to look for when it has ended."""
    mine = set(_open_files())
    return [inode for inode in listening_inodes() if f"socket:[{inode}]" in mine]


def listening_inodes() -> set[str]:
    """The inodes of all listening TCP sockets of this machine."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add(words[9])
    return found
