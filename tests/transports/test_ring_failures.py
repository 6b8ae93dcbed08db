"""Failures of ranks that talk through rings: noticed as over TCP."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound
from tests.transports.support import warm

import phalanx as px
from phalanx.testing import faults, run_ranks
from phalanx.transports.ring import SIZE
from phalanx.transports.shared_memory import make_memory, open_memory

pytestmark = pytest.mark.usefixtures("native")

CONTRACT = 1.5
"""Seconds within which a loss is noticed; the contract says one, and the machine may be busy."""


def _killed(group: px.Group, who: str, size: int) -> Any:
    warm(group)
    x = np.zeros(size, np.uint8)
    victim = group.rank == 0
    if victim:
        threading.Timer(0.3, faults.kill_self).start()
    began = time.monotonic()
    try:
        if who == "sender":
            while True:
                group.send(x, 1) if victim else group.recv(x, 0)
        if victim:
            for _ in range(3):
                group.recv(x, 1)
            time.sleep(60)
        while True:
            group.send(x, 0)
    except px.PeerLost as error:
        return error.peer, time.monotonic() - began


@pytest.mark.parametrize("size", [8, 1000, 16 << 20])
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_killed_rank_is_noticed(who: str, size: int) -> None:
    _, (peer, seconds) = run_ranks(2, _killed, who, size, backend="mesh", may_die=[0])
    assert peer == 0
    assert seconds < bound(0.3 + CONTRACT)


def _stopped(group: px.Group, size: int) -> Any:
    warm(group)
    if group.rank == 0:
        faults.stop_self()
    x = np.zeros(size, np.uint8)
    began = time.monotonic()
    try:
        if size == 1:
            group.recv(x, 0)
        while True:
            group.send(x, 0)
    except px.Timeout as error:
        return str(error), time.monotonic() - began


@pytest.mark.parametrize("size", [1, 16 << 20])
def test_a_stopped_rank_times_out(size: int) -> None:
    _, (words, seconds) = run_ranks(2, _stopped, size, backend="mesh", timeout=4, may_die=[0])
    assert 1.9 < seconds < bound(3.5)  # half of what all of it may take
    assert "not done within 2 s; waiting for: 0" in words
    assert ("a part of the message was on its way" in words) == (size > 1)


def _goodbye(group: px.Group, full: bool) -> None:
    half = group.subgroup([0, 1])
    warm(half)
    last = np.arange((SIZE - 200) // 8 if full else 3)
    if group.rank == 0:
        half.send(last, 1)
        half.close()
        group.barrier()
        return
    time.sleep(0.3)
    out = np.zeros_like(last)
    half.recv(out, 0)
    assert (out == last).all()
    for _ in range(2):
        with pytest.raises(px.ChannelClosed, match="it has closed this group"):
            half.recv(out, 0)
    with pytest.raises(px.ChannelClosed, match="it has closed this group"):
        half.send(out, 0)
    half.close()
    group.barrier()


@pytest.mark.parametrize("full", [False, True])
def test_a_group_that_is_closed_says_goodbye(full: bool) -> None:
    run_ranks(2, _goodbye, full, backend="mesh")


def _closed_while_waiting(group: px.Group) -> None:
    half = group.subgroup([0, 1])
    warm(half)
    if group.rank == 0:
        time.sleep(0.02)
        half.close()
    else:
        began = time.monotonic()
        with pytest.raises(px.ChannelClosed, match="it has closed this group"):
            half.recv(np.zeros(1), 0)
        assert time.monotonic() - began < bound(CONTRACT)
        half.close()
    group.barrier()


def test_a_quick_receive_hears_the_goodbye() -> None:
    run_ranks(2, _closed_while_waiting, backend="mesh")


def _closed_here(group: px.Group) -> None:
    half = group.subgroup([0, 1])
    warm(half)
    threading.Timer(0.02, half.close).start()
    with pytest.raises((px.ChannelClosed, px.Closed)):
        half.recv(np.zeros(1), 1 - group.rank)
    group.barrier()


def test_closing_in_another_thread_ends_a_quick_receive() -> None:
    run_ranks(2, _closed_here, backend="mesh")


def _dropped(group: px.Group) -> None:
    warm(group)
    if group.rank == 0:
        time.sleep(0.1)
        faults.drop_connections(group)
        with pytest.raises(px.PhalanxError):
            group.send(np.zeros(1), 1)
    else:
        with pytest.raises(px.ChannelClosed):
            group.recv(np.zeros(1), 0)


def test_a_connection_that_breaks_ends_the_ring() -> None:
    run_ranks(2, _dropped, backend="mesh")


def _interrupted(group: px.Group) -> None:
    warm(group)
    if group.rank == 0:
        group.recv(np.zeros(1), 1)
        time.sleep(0.3)
        for number in range(5):
            group.send(np.full(4, number), 1)
        return

    def ring(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, ring)
    out = np.full(4, -1)
    group.send(np.zeros(1), 0)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        group.recv(out, 0)
    assert time.monotonic() - began < bound(0.25)
    assert (out == -1).all()
    for number in range(5):
        group.recv(out, 0)
        assert (out == number).all()


def test_an_interrupted_quick_receive_loses_nothing() -> None:
    run_ranks(2, _interrupted, backend="mesh")


class Alarm(Exception):
    """Raised by a signal handler, as Ctrl-C does."""


def _alarmed(group: px.Group, victim: int) -> dict[str, int]:
    """One rank is interrupted again and again; the other never sees anything but whole messages, in order."""

    def ring(_number: int, _frame: object) -> None:
        raise Alarm

    signal.signal(signal.SIGALRM, ring)
    times = random.Random(5)
    seen = {"whole": 0, "interrupted": 0, "closed": 0}
    for turn in range(10):
        sizes = random.Random(turn)
        half = group.subgroup([0, 1])
        warm(half)
        for number in range(20):
            x = np.full(sizes.choice([10, 10_000, 4 << 20]), number)
            try:
                try:
                    if group.rank == victim:
                        signal.setitimer(signal.ITIMER_REAL, times.uniform(0.0001, 0.004))
                    if group.rank == 0:
                        half.send(x, 1, tag=number)
                    else:
                        x[:] = -1
                        half.recv(x, 0, tag=number)
                        assert (x == number).all()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                seen["whole"] += 1
            except Alarm:
                seen["interrupted"] += 1
                if group.rank == 0:
                    break  # it may or may not have been sent
            except px.ChannelClosed:
                seen["closed"] += 1
                break
        half.close()
        group.barrier()
    return seen


@pytest.mark.parametrize("victim", [0, 1])
def test_interrupts_leave_no_half_message(victim: int) -> None:
    seen = run_ranks(2, _alarmed, victim, backend="mesh")
    assert seen[victim]["interrupted"] > 0
    assert min(s["whole"] for s in seen) > 10


def _alarmed_openings(_group: px.Group) -> tuple[int, int]:
    """Makes memory and opens it, as the two ends of a ring do; how often that was interrupted, and descriptors lost."""
    armed = False

    def ring(_number: int, _frame: object) -> None:
        if armed:
            raise Alarm

    signal.signal(signal.SIGALRM, ring)
    times = random.Random(7)
    before = len(os.listdir("/proc/self/fd"))
    interrupted = 0
    for _ in range(4000):
        made = opened = -1
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-6, 60e-6))
            [made, nonce] = make_memory("phalanx-test", 4096)
            opened = open_memory(os.getpid(), made, 4096, nonce)
            armed = False
        except Alarm:
            interrupted += 1
        armed = False
        for fd in (made, opened):
            if fd >= 0:
                os.close(fd)
    return interrupted, len(os.listdir("/proc/self/fd")) - before


def test_an_interrupt_loses_no_descriptor_of_memory() -> None:
    [(interrupted, lost)] = run_ranks(1, _alarmed_openings, backend="mesh")
    assert interrupted > 100
    assert lost == 0


def _forked(group: px.Group) -> None:
    warm(group)
    peer = 1 - group.rank
    x = np.ones(3)
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(px.Closed):
                group.send(x, peer)
            with pytest.raises(px.Closed):
                group.recv(x, peer)
            group.close()
            assert "phalanx-ring" not in Path("/proc/self/maps").read_text()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    for number in range(50):
        group.send(np.full(3, number), peer)
        out = np.zeros(3, np.int64)
        group.recv(out, peer)
        assert (out == number).all()


def test_a_forked_child_leaves_the_ring_alone() -> None:
    run_ranks(2, _forked, backend="mesh")
