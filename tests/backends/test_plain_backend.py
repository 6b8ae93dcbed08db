"""A backend of your own needs six methods, and passes the suite with them; groups on it work, too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from phalanx import Group
from phalanx.backends import Backend, SubBackend
from phalanx.backends.plain import AdaptedBackend, as_lane_backend
from phalanx.deadline import Deadline
from phalanx.testing import conformance, open_world
from phalanx.testing.conformance import Check
from phalanx.testing.threads import run_threads
from phalanx.transports.mailbox import PendingTransfer


class Plain(Backend):
    """Only what is abstract in `Backend`; how the bytes move is somebody else's business."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    def send(self, data: Any, dst: int, *, timeout: float | None = None) -> None:
        self._inner.send(data, dst, timeout=timeout)

    def recv(self, buffer: Any, src: int, *, timeout: float | None = None) -> None:
        self._inner.recv(buffer, src, timeout=timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        self._inner.barrier(timeout=timeout)

    def close(self) -> None:
        self._inner.close()


@contextlib.contextmanager
def make(n: int) -> Iterator[list[Backend]]:
    with open_world(n, "mesh", timeout=20) as backends:
        yield [Plain(backend) for backend in backends]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("check", conformance.checks(lanes=False), ids=str)
def test_conformance(check: Check) -> None:
    conformance.run(check, make)


def test_groups_on_it_can_be_split() -> None:
    def body(backend: Backend) -> None:
        with Group(backend) as group:
            half = group.split(group.rank % 2)
            assert half is not None
            assert half.all_reduce(np.array([group.rank])).tolist() == [2 if group.rank % 2 == 0 else 4]
            group.barrier()
            half.close()

    with make(4) as backends:
        run_threads([functools.partial(body, backend) for backend in backends], timeout=30)


def test_some_of_its_ranks_are_a_backend_of_their_own() -> None:
    def body(backend: Backend) -> None:
        if backend.rank == 1:
            return
        pair = SubBackend(backend, [2, 0])
        assert pair.parent is backend
        assert (pair.rank, pair.members) == (backend.rank // 2, (0, 2))
        pair.barrier()
        with Group(pair) as both:
            assert both.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
            both.barrier()
        pair.close()

    with make(3) as backends:
        run_threads([functools.partial(body, backend) for backend in backends], timeout=30)


def test_a_callback_that_fails_does_not_end_the_sending(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RecursionError("too deep")

    with make(2) as backends:
        adapted = as_lane_backend(backends[0])
        assert isinstance(adapted, AdaptedBackend)
        lane = adapted.open_lane(bytes(16), 0, [0, 1])
        sends = [PendingTransfer(), PendingTransfer()]
        for send in sends:
            send.on_done(fail)
            adapted.send_soon(1, [b"data"], send)
        assert lane.wait(sends, Deadline(20.0))
        assert [send.error for send in sends] == [None, None]
        lane.close()
    assert "RecursionError: too deep" in caplog.text
