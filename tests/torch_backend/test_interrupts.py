"""Handlers of signals that raise while a program waits for a message: that wait ends, and the message does not."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import together
from tests.torch_backend.test_fast_calls import WAYS, meet, pytestmark

from phalanx.torch_backend import opened_late

__all__ = ["pytestmark"]

AFTER = 0.15
"""Seconds until the alarm."""
LATE = 0.5
"""Seconds after which the other rank comes."""


class Alarm(Exception):
    pass


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Alarm):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@WAYS
@pytest.mark.parametrize(("source", "after"), [(1, 0.0005), (1, AFTER), (None, AFTER)])
def test_a_receive_goes_on(env: dict[str, str], source: int | None, after: float) -> None:
    def body(rank: int) -> list[float] | None:
        meet()
        if rank == 1:
            time.sleep(LATE)
            for value in (1.0, 2.0):
                dist.send(torch.full((3,), value), 0)
            return None
        first, second = torch.zeros(3), torch.zeros(3)
        work = dist.irecv(first, source)
        began = time.monotonic()
        with alarm(after):
            work.wait()
        assert time.monotonic() - began < LATE
        assert work.exception() is None
        assert not work.is_completed()
        dist.recv(second, source)
        work.wait()
        return [first[0].item(), second[0].item()]

    assert together(2, body, env=env)[0] == [1.0, 2.0]


@WAYS
def test_a_send_goes_on(env: dict[str, str]) -> None:
    def body(rank: int) -> float | None:
        meet()
        x = torch.ones(4 << 20)
        if rank == 1:
            time.sleep(LATE)
            dist.recv(x.zero_(), 0)
            return float(x.sum().item())
        work = dist.isend(x, 1)
        with alarm(AFTER):
            work.wait()
        work.wait()
        return None

    assert together(2, body, env=env)[1] == 4 << 20


@WAYS
def test_what_recv_waits_for_is_taken_back(env: dict[str, str]) -> None:
    def body(rank: int) -> list[float] | None:
        meet()
        if rank == 1:
            time.sleep(LATE)
            dist.send(torch.ones(3), 0)
            return None
        x, y = torch.zeros(3), torch.zeros(3)
        with alarm(AFTER):
            dist.recv(x, 1)
        dist.recv(y, 1)
        return [x[0].item(), y[0].item()]

    assert together(2, body, env=env)[0] == [0.0, 1.0]


def test_a_handler_may_open_a_handle_while_another_one_is_opened() -> None:
    def body(rank: int) -> None:
        meet()
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        with opened_late._opening:
            future = work.get_future()
        future.wait()
        assert x.tolist() == [2.0] * 3

    together(2, body)


UNWAITED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("phalanx", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
tensors = [torch.ones(1000) for _ in range(20)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
if dist.get_rank() == 0:
    for work in works:
        work.wait()
    assert all(tensor.sum() == 2000 for tensor in tensors)
"""


def test_a_program_that_ends_does_what_it_has_begun(tmp_path: Any) -> None:
    command = [sys.executable, "-c", UNWAITED, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        words = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], words
