"""Everything at once, by seed: threads that send and receive in all ways, collectives and sub-groups beside them."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.stress.support import any_size, groups, pattern, together

import phalanx as px
from phalanx.testing import run_ranks

TAGS = 3
ANY = 7
"""The tag of messages that are received from anyone."""
MESSAGES = 25


def content(src: int, dst: int, tag: int, number: int) -> Any:
    """What a message holds: known to both sides."""
    seed = ((src * 8 + dst) * 8 + tag) * 10_000 + number
    return pattern(seed, any_size(random.Random(seed)))


def send_all(group: px.Group, dst: int, seed: int) -> None:
    """All messages to one rank, those of one tag in order, each sent in one of the ways there are."""
    rng = random.Random(seed * 1000 + group.rank * 10 + dst)
    next_number = dict.fromkeys([*range(TAGS), ANY], 0)
    works: list[px.Work] = []
    while next_number:
        tag = rng.choice(list(next_number))
        data = content(group.rank, dst, tag, next_number[tag])
        if rng.random() < 0.5:
            works.append(group.isend(data, dst, tag=tag))
        else:
            group.send(data, dst, tag=tag)
        next_number[tag] += 1
        if next_number[tag] == MESSAGES:
            del next_number[tag]
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
    for work in works:
        work.wait()


def receive_one(group: px.Group, src: int | None, tag: int, expected: Any, rng: random.Random) -> Any:
    """One message, asked for in one of the ways there are, and again if the time was too short."""
    while True:
        out = None if expected is None or rng.random() < 0.5 else np.zeros(expected.size, np.uint8)
        timeout = rng.choice([0, 0.0005, 0.003, 20, 20])
        try:
            if rng.random() < 0.5:
                return group.recv(out, src, tag=tag, timeout=timeout)
            work = group.irecv(out, src, tag=tag, timeout=timeout)
            if rng.random() < 0.5:
                deadline = time.monotonic() + 30
                while not work.done() and time.monotonic() < deadline:
                    time.sleep(0.001)
            return work.wait()
        except px.Timeout:
            if timeout == 20:
                raise


def receive_all(group: px.Group, src: int, tag: int, seed: int) -> None:
    rng = random.Random(seed * 100_000 + group.rank * 1000 + src * 10 + tag)
    for number in range(MESSAGES):
        expected = content(src, group.rank, tag, number)
        got = receive_one(group, src, tag, expected, rng)
        assert np.array_equal(got, expected), (src, group.rank, tag, number)


def receive_from_anyone(group: px.Group, seed: int) -> None:
    rng = random.Random(seed * 7 + group.rank)
    peers = [rank for rank in range(group.world_size) if rank != group.rank]
    count = dict.fromkeys(peers, 0)
    for _ in range(MESSAGES * len(peers)):
        got = receive_one(group, None, ANY, None, rng)
        assert got.tag == ANY
        assert np.array_equal(got.data, content(got.src, group.rank, ANY, count[got.src])), (got.src, count)
        count[got.src] += 1
    assert set(count.values()) == {MESSAGES}


def collectives(group: px.Group, seed: int) -> None:
    """The same on all ranks, also of groups that come and go meanwhile."""
    rng = random.Random(seed)
    for number in range(15):
        size = rng.choice([1, 100, 100_000])
        total = group.all_reduce(np.full(size, group.rank + number, np.int64), async_op=rng.random() < 0.5)
        total = total.wait() if isinstance(total, px.Work) else total
        assert (total == sum(range(group.world_size)) + number * group.world_size).all()
        half = group.subgroup(range(group.world_size))
        assert half.all_gather_object((half.rank, number)) == [(r, number) for r in range(half.world_size)]
        if rng.random() < 0.5:
            half.close()


def everything(group: px.Group, seed: int) -> int:
    peers = [rank for rank in range(group.world_size) if rank != group.rank]
    calls = [partial(send_all, group, dst, seed) for dst in peers]
    calls += [partial(receive_all, group, src, tag, seed) for src in peers for tag in range(TAGS)]
    calls += [partial(receive_from_anyone, group, seed), partial(collectives, group, seed)]
    together(*calls, limit=60)
    group.barrier()
    lane = group._messages
    assert len(lane.mailbox._posted) == 0
    assert len(lane.mailbox._waiting) == 0
    return threading.active_count()


@pytest.mark.parametrize("backend", ["simulated", "mesh", "mesh-classic"])
def test_threads_in_one_process(backend: str) -> None:
    with groups(3, backend) as world:
        together(*[partial(everything, group, 1) for group in world], limit=80)


def test_processes() -> None:
    run_ranks(3, everything, 2, backend="mesh", timeout=80)
