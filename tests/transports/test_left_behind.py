"""When rings are made, and what is left of them."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.transports.support import streams, warm

import phalanx as px
from phalanx.testing import faults, run_ranks

pytestmark = pytest.mark.usefixtures("native")


def _no_rings(group: px.Group) -> None:
    peer = 1 - group.rank
    x = np.zeros(2)
    for _ in range(20):
        group.send(x, peer)
        group.recv(x, peer)
    assert streams(group, peer) == ("WritingHalf", "ReadingHalf")
    assert type(group._fast_messages).__name__ != "FastMessages"


@pytest.mark.parametrize("variables", [{"PHALANX_TRANSPORT": "tcp"}, {"PHALANX_PURE": "1"}])
def test_rings_can_be_switched_off(variables: dict[str, str]) -> None:
    run_ranks(2, _no_rings, backend="mesh", env=variables)


def _many_groups(group: px.Group) -> None:
    def once() -> None:
        half = group.subgroup([0, 1])
        warm(half)
        half.close()

    def counts() -> tuple[int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("phalanx-ring"), pages

    for _ in range(20):
        once()
    group.barrier()
    fds, mapped, pages = counts()
    for _ in range(200):
        once()
    group.barrier()
    after = counts()
    assert after[0] <= fds + 2  # a channel of the last group may be about to be closed by the reactor
    assert after[1] <= mapped
    assert (after[2] - pages) * os.sysconf("SC_PAGE_SIZE") < 8 << 20


def test_closed_groups_leave_nothing() -> None:
    run_ranks(2, _many_groups, backend="mesh", timeout=120)


def _dropped_groups(group: px.Group) -> None:
    for _ in range(30):
        half = group.subgroup([0, 1])
        warm(half)
        group.barrier()
        del half
    gc.collect()
    group.barrier()
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("phalanx-ring") <= 4


def test_groups_that_are_merely_forgotten_leave_nothing() -> None:
    run_ranks(2, _dropped_groups, backend="mesh")


def _delayed(group: px.Group) -> float:
    warm(group)
    began = time.monotonic()
    if group.rank == 0:
        with faults.delay(group, 0.1):
            group.send(np.zeros(1), 1)
    else:
        group.recv(np.zeros(1), 0)
    return time.monotonic() - began


def test_a_delay_delays_quick_messages_too() -> None:
    assert run_ranks(2, _delayed, backend="mesh")[0] >= 0.1
