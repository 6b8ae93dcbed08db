"""The failure contract of collectives on a GPU, with the stand-in for the driver: who is named, and who writes when."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.gpu.fake import DriverArray, FakeDriver, install

import phalanx as px
from phalanx import _native
from phalanx.cuda.driver import CudaError
from phalanx.errors import PeerLost, Timeout
from phalanx.testing import faults, run_ranks

pytestmark = pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")

LONG = 40_000


def outcome(call: Any, x: DriverArray) -> dict[str, Any]:
    """How a call failed, and whether anything wrote to the array afterwards."""
    began = time.monotonic()
    try:
        call()
    except px.PhalanxError as error:
        seconds = time.monotonic() - began
        x.fill(7)
        time.sleep(0.7)
        peer = getattr(error, "peer", None)
        return {
            "error": type(error).__name__,
            "peer": peer,
            "seconds": seconds,
            "intact": bool((x.numpy() == 7).all()),
            "text": str(error),
        }
    return {"error": None, "text": ""}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_before_they_meet(victim: int) -> None:
    def body(group: px.Group) -> Any:
        install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == victim:
            time.sleep(0.3)  # a rank that dies at once may be lost in the first one, which the others have not left
            faults.kill_self()
        return outcome(lambda: group.all_reduce(x), x)

    for rank, found in enumerate(run_ranks(3, body, backend="mesh", may_die=[victim])):
        if rank != victim:
            assert (found["error"], found["peer"], found["intact"]) == ("PeerLost", victim, True), found


def test_the_executor_dies_in_its_kernel() -> None:
    def body(group: px.Group) -> Any:
        fake = install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 0:
            fake.on_launch = faults.kill_self
        return outcome(lambda: group.all_reduce(x), x)

    for found in run_ranks(3, body, backend="mesh", may_die=[0])[1:]:
        assert (found["error"], found["peer"], found["intact"]) == ("PeerLost", 0, True), found


def test_a_rank_that_gives_up_waits_for_the_kernel() -> None:
    """Its deadline passes while the kernel runs: it raises when the kernel has ended, and nothing is written after."""

    def body(group: px.Group) -> Any:
        fake = install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        fake.kernel_seconds = 0.8
        return outcome(lambda: group.all_reduce(x, timeout=0.3), x)

    found = run_ranks(2, body, backend="mesh")
    assert found[1]["error"] == "Timeout", found
    assert found[1]["seconds"] >= 0.7
    assert found[1]["intact"]


def test_the_kernel_fails() -> None:
    """A rank whose GPU fails says so, and the others hear it from that rank."""

    def body(group: px.Group) -> Any:
        fake = install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)

        def fail() -> None:
            raise CudaError("cuLaunchKernel", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

        if group.rank == 0:
            fake.on_launch = fail
        return outcome(lambda: group.all_reduce(x), x)

    for found in run_ranks(2, body, backend="mesh"):
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["text"], found
        assert found["intact"]


def test_different_operations() -> None:
    def body(group: px.Group) -> Any:
        install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        return outcome(lambda: group.all_reduce(x) if group.rank else group.broadcast(x, 0), x)

    for found in run_ranks(2, body, backend="mesh"):
        assert found["error"] == "Desync", found


def test_the_executor_is_stopped_before_its_kernel() -> None:
    """The others give up and use their arrays again. The kernel that is launched later writes nothing."""

    def body(group: px.Group) -> Any:
        fake = install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        if group.rank == 0:
            fake.on_launch = lambda: time.sleep(2.5)
            return outcome(lambda: group.all_reduce(x, timeout=20), x)
        began = time.monotonic()
        found = outcome(lambda: group.all_reduce(x, timeout=0.3), x)
        time.sleep(max(0.0, began + 3.5 - time.monotonic()))
        return found | {"later": bool((x.numpy() == 7).all())}

    found = run_ranks(3, body, backend="mesh")
    assert found[0]["error"] is not None
    for one in found[1:]:
        assert (one["error"], one["intact"], one["later"]) == ("Timeout", True, True), one
        assert one["seconds"] < 2.4, one


def test_the_executor_is_stopped_in_a_call_that_others_wait_for() -> None:
    """They wait for the end of a kernel that may be running, and then say whom they waited for."""

    def body(group: px.Group) -> Any:
        fake = install()
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)

        def stop() -> None:
            faults.stop_self()
            time.sleep(5)  # another thread may be the one that takes the signal, a little later

        if group.rank == 0:
            fake.on_launch = stop
        try:
            group.all_reduce(x, timeout=20 if group.rank == 0 else 0.3, async_op=True).wait()
        except px.PhalanxError as error:
            return error
        return None

    error = run_ranks(2, body, backend="mesh", may_die=[0])[1]
    assert isinstance(error, Timeout)
    assert error.missing == (0,), str(error)


def held(fake: FakeDriver) -> tuple[int, int]:
    """The memory of other processes, and the memory of the host, that the driver knows of."""
    return len(fake.opened), len(fake.registered)


def test_a_group_that_was_left_holds_nothing() -> None:
    """Also while the program still has it: nothing is left for whichever thread collects it."""

    def body(group: px.Group) -> Any:
        fake = install()
        x, part = DriverArray(np.ones(LONG, np.float32)), DriverArray(np.ones(140_000, np.float32))
        group.all_reduce(x)
        group.all_reduce(DriverArray(np.ones(8, np.float32)))  # through the memory of the host
        group.sendrecv(part, (group.rank + 1) % 3, DriverArray(np.ones(140_000, np.float32)), (group.rank - 1) % 3)
        group.barrier()
        before = held(fake)
        if group.rank == 1:
            time.sleep(0.3)
            faults.kill_self()
        with pytest.raises(PeerLost):
            group.all_reduce(x)
        rest = group.shrink()
        left = held(fake)
        rest.all_reduce(x)
        values = x.numpy()[0]
        rest.close()
        return before, left, held(fake), values

    for rank, found in enumerate(run_ranks(3, body, backend="mesh", may_die=[1])):
        if rank != 1:
            (opened, known), *later, values = found
            assert opened > 0
            assert known > 1
            assert later == [(0, 1), (0, 1)]  # copies from and to the GPU have memory of their own in each process
            assert values == 6


def test_other_threads_run_while_memory_is_given_back() -> None:
    """The driver may take a second for it, and the thread that hears of a loss must not wait for that."""

    def body(group: px.Group) -> bool:
        fake, libc = install(), ctypes.CDLL(None)
        address_of = fake.address_of
        # A function that holds no lock of Python's, and returns when another thread wants it to: the memory that it is
        # given begins with zeros, which is what a semaphore is made of.
        wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value
        fake.address_of = lambda name: wait if name == "cuIpcCloseMemHandle" else address_of(name)  # type: ignore[method-assign,return-value]
        x = DriverArray(np.zeros(LONG, np.float32))
        group.all_reduce(x)
        if group.rank != 0:
            group.barrier()
            return True
        (theirs,) = fake.opened
        closing = threading.Thread(target=group._device_engine.close)
        closing.start()
        time.sleep(0.2)
        waited = closing.is_alive()
        libc.sem_post(ctypes.c_void_p(theirs))
        closing.join(10)
        group.barrier()
        return waited and not closing.is_alive()

    assert run_ranks(2, body, backend="mesh", timeout=20) == [True, True]
