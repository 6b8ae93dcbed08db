"""Groups on a backend that has only the six methods: threads move its messages, and must end with the group."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound
from tests.stress.support import LIMIT, together

import phalanx as px
from phalanx.backends import Backend, SimulatedBackend


class Plain(Backend):
    """The least that a backend can be."""

    def __init__(self, inner: SimulatedBackend) -> None:
        self._inner = inner
        self.block = threading.Event()
        self.block.set()

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        self.block.wait(LIMIT)
        self._inner.send(data, dst, timeout=timeout)

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        self._inner.recv(buffer, src, timeout=timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        self._inner.barrier(timeout=timeout)

    def close(self) -> None:
        self._inner.close()


def plain_world(size: int) -> list[Plain]:
    return [Plain(inner) for inner in SimulatedBackend.create_group(size)]


def adapter_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "phalanx-adapter"]


def test_a_send_that_is_stuck_times_out() -> None:
    world = plain_world(2)
    here, there = [px.Group(one) for one in world]
    world[0].block.clear()
    with pytest.raises(px.Timeout):
        here.send(np.ones(1), 1, timeout=0.2)
    with pytest.raises(px.Timeout):
        here.isend(np.full(1, 2.0), 1, timeout=0.2).wait()
    world[0].block.set()
    here.send(np.full(1, 3.0), 1)
    # The first was already in the backend's hands; the second had not begun and was taken back.
    assert [there.recv(src=0)[0] for _ in range(2)] == [1.0, 3.0]
    together(here.close, there.close)


@pytest.mark.parametrize("end", ["close", "break"])
def test_the_threads_end_with_the_last_group(end: str) -> None:
    before = adapter_threads()
    world = plain_world(2)
    here, there = [px.Group(one) for one in world]
    together(here.barrier, there.barrier)
    if end == "break":
        here._health.fail(px.PeerLost(1, "as a test says"))
    together(here.close, there.close)
    assert adapter_threads() == before
    # And begin again with the next.
    here, there = [px.Group(one) for one in world]
    together(here.barrier, there.barrier)
    together(here.close, there.close)
    assert adapter_threads() == before


def test_a_group_made_after_the_loss_of_a_rank_hears_of_it() -> None:
    world = plain_world(2)
    first = px.Group(world[0])
    world[1].close()
    with pytest.raises(px.PeerLost):
        first.recv(src=1, timeout=10)
    later = px.Group(world[0])
    began = time.monotonic()
    with pytest.raises(px.PeerLost):
        later.recv(src=1, timeout=10)
    assert time.monotonic() - began < bound(5)
    later.close()
    first.close()


def test_a_backend_that_nobody_holds_is_collected() -> None:
    world = plain_world(1)
    group = px.Group(world[0])
    group.close()
    gone = weakref.ref(world[0])
    del world, group
    gc.collect()
    assert gone() is None


def test_closed_groups_leave_nothing_in_a_simulated_world() -> None:
    backends = SimulatedBackend.create_group(2)
    groups = [px.Group(one) for one in backends]
    lanes = len(backends[0]._world.lanes)

    def come_and_go(group: px.Group) -> None:
        for _ in range(50):
            half = group.subgroup([0, 1])
            half.sendrecv(np.ones(3), 1 - half.rank, src=1 - half.rank)
            half.barrier()
            half.close()

    together(*[lambda group=group: come_and_go(group) for group in groups])  # type: ignore[misc]
    world = backends[0]._world
    assert (len(world.lanes), world.closed, world.early) == (lanes, {}, {})
    together(*[backend.close for backend in backends])
