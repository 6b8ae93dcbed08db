"""NCCL itself among several ranks, on the one GPU that there is: what it moves, and how it is ended in the middle.

NCCL refuses two ranks on one GPU of one host. It tells hosts by `NCCL_HOSTID`, so each rank here says that it is on one
of its own, and they talk over the loopback network. That is slow, but the kernels, the aborts and the errors are real.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.gpu.fake import DriverArray
from tests.gpu.gpu import needs_gpu

import phalanx as px
from phalanx.cuda.driver import driver
from phalanx.cuda.nccl import nccl
from phalanx.group.engines.cuda import routing
from phalanx.testing import faults, run_ranks

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="nccl4py is not installed"),
]

LONG = 4 << 20


def apart(group: px.Group) -> Any:
    """Has Phalanx and NCCL take this rank for one with a host and a GPU of its own; the NCCL of this process."""
    os.environ.update(NCCL_HOSTID=f"host-{group.rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    known: Any = driver()
    known.device_uuid = lambda device: bytes([group.rank + 1]) * 16
    return nccl()


def ones(count: int = LONG) -> DriverArray:
    return DriverArray(np.ones(count, np.float32))


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_verb(ranks: int) -> None:
    def body(group: px.Group) -> Any:
        library = apart(group)
        rank, size = group.rank, group.world_size
        wrong: list[str] = []
        asked, send = [], library.send
        library.send = lambda *given: (asked.append("send"), send(*given))

        def check(what: str, x: DriverArray, expected: Any) -> None:
            if not np.array_equal(x.numpy(), np.broadcast_to(expected, x.shape)):
                wrong.append(what)

        for count in (3, 100_000):
            whole = np.repeat(np.arange(size, dtype=np.float32), count) + 10 * rank
            for dtype in (np.float32, np.float64, np.float16, np.int8, np.int64):
                x = DriverArray(np.full(count, rank + 1, dtype))
                group.all_reduce(x)
                check(f"all_reduce {dtype} {count}", x, size * (size + 1) // 2)
            x = DriverArray(np.full(count, rank + 1, np.float32))
            group.all_reduce(x, "max")
            check("max", x, size)
            x = DriverArray(np.full(count, rank, np.float32))
            group.broadcast(x, 1)
            check("broadcast", x, 1)
            x = DriverArray(np.full(count, rank + 1, np.float32))
            group.reduce(x, 1)
            check("reduce", x, size * (size + 1) // 2 if rank == 1 else rank + 1)
            out = DriverArray(np.zeros(count, np.float32))
            group.reduce_scatter(DriverArray(whole), "sum", out)
            check("reduce_scatter", out, size * rank + 10 * sum(range(size)))
            part, out = DriverArray(np.full(count, rank, np.float32)), DriverArray(np.zeros(count * size, np.float32))
            group.all_gather(part, out)
            check("all_gather", out, np.repeat(np.arange(size), count))
            counts = [count + r for r in range(size)]
            out = DriverArray(np.zeros(sum(counts), np.float32))
            group.all_gather(DriverArray(np.full(counts[rank], rank, np.float32)), out, counts=counts)
            check("all_gather counts", out, np.repeat(np.arange(size), counts))
            out = DriverArray(np.zeros(count * size, np.float32))
            group.gather(part, 1, out if rank == 1 else None)
            check("gather", out, np.repeat(np.arange(size), count) if rank == 1 else 0)
            out = DriverArray(np.zeros(count * size, np.float32))
            group.all_to_all(DriverArray(whole), out)
            check("all_to_all", out, np.repeat(10 * np.arange(size), count) + rank)
        group.close()
        return wrong, bool(asked)

    assert run_ranks(ranks, body, backend="mesh") == [([], True)] * ranks


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("choice", ["nccl", "hybrid"])
def test_it_refuses_one_gpu(choice: str, told: bool) -> None:
    """A version of NCCL that does not take several ranks on a GPU is not asked, and the group goes on."""

    def body(group: px.Group) -> Any:
        group.backend.gpu_choice = choice
        if nccl().version >= routing.MULTI_RANK_NCCL and told:
            return []
        found = []
        for _ in range(2):
            with pytest.raises(px.errors.UnsupportedOp) as caught:
                group.all_reduce(ones(4))
            found.append(str(caught.value))
        group.barrier()
        return found

    env = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if told else {}
    for found in run_ranks(2, body, backend="mesh", env=env):
        assert all("all ranks share one GPU, which NCCL 2." in text for text in found), found


def test_what_it_says_itself_of_one_gpu() -> None:
    """Where Phalanx takes two ranks for apart and NCCL finds out that they are not: an error that says why, no hang."""

    def body(group: px.Group) -> Any:
        nccl_ = apart(group)
        os.environ["NCCL_HOSTID"] = "one-host"
        began = time.monotonic()
        with pytest.raises(px.PhalanxError) as caught:
            group.all_reduce(ones(4), timeout=20)
        x = ones(4)
        x.fill(3)
        return nccl_.version, time.monotonic() - began, str(caught.value), float(x.numpy()[0])

    for version, seconds, text, value in run_ranks(2, body, backend="mesh"):
        if version < routing.MULTI_RANK_NCCL:
            assert "Duplicate GPU" in text, text
        assert seconds < 10
        assert value == 3


def outcome(call: Any, x: DriverArray, moment: float | None = None) -> dict[str, Any]:
    """How a call failed, how soon, and whether anything wrote to the array afterwards."""
    began = time.monotonic()
    try:
        call()
    except px.PhalanxError as error:
        seconds = time.monotonic() - (began if moment is None else moment)
        x.fill(7)
        time.sleep(0.5)
        return {
            "error": type(error).__name__,
            "peer": getattr(error, "peer", None),
            "missing": list(getattr(error, "missing", [])),
            "seconds": seconds,
            "intact": bool((x.numpy() == 7).all()),
            "text": str(error),
        }
    return {"error": None}


def works_after(group: px.Group) -> float:
    """What the survivors' new group computes, by a communicator of its own."""
    with group.shrink() as rest:
        x = ones(100_000)
        rest.all_reduce(x)
        return float(x.numpy()[-1])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_in_the_middle(victim: int) -> None:
    """The kernels of the others wait on the GPU for one that was never launched: every survivor aborts its own."""

    def body(group: px.Group) -> Any:
        library = apart(group)
        x = ones()
        group.all_reduce(x)
        if group.rank == victim:
            library.all_reduce = lambda *_: (time.sleep(0.5), faults.kill_self())
        found = outcome(lambda: group.all_reduce(x, timeout=30), x)
        return found | {"after": works_after(group)}

    for rank, one in enumerate(run_ranks(3, body, backend="mesh", may_die=[victim])):
        if rank != victim:
            assert (one["error"], one["peer"], one["intact"], one["after"]) == ("PeerLost", victim, True, 2.0), one
            assert one["seconds"] < 3, one


def test_a_rank_is_killed_while_it_runs() -> None:
    def body(group: px.Group) -> Any:
        apart(group)
        x = ones()
        group.all_reduce(x, "max")
        at = np.array([time.monotonic() + 0.3])
        group.broadcast(at, 0)
        moment = float(at[0])
        if group.rank == 1:
            threading.Timer(moment - time.monotonic(), faults.kill_self).start()

        def loop() -> None:
            while True:
                group.all_reduce(x, "max")

        found = outcome(loop, x, moment)
        return found | {"after": works_after(group)}

    found = run_ranks(3, body, backend="mesh", may_die=[1])
    for one in (found[0], found[2]):
        assert (one["error"], one["peer"], one["intact"], one["after"]) == ("PeerLost", 1, True, 2.0), one
        assert one["seconds"] < 3, one


@pytest.mark.parametrize("how", ["late", "stopped"])
def test_the_deadline(how: str) -> None:
    """A rank that comes too late, or is stopped: the kernels of the others are ended at the deadline."""

    def body(group: px.Group) -> Any:
        library = apart(group)
        x = ones()
        group.all_reduce(x)
        if group.rank == 1:
            pause = (lambda *_: time.sleep(8)) if how == "late" else (lambda *_: faults.stop_self(8))
            library.all_reduce = pause
        return outcome(lambda: group.all_reduce(x, timeout=1.0), x)

    for one in (found := run_ranks(3, body, backend="mesh", may_die=[1] if how == "stopped" else []))[::2]:
        assert (one["error"], one["intact"]) == ("Timeout", True), found
        assert 0.9 < one["seconds"] < 5, one
