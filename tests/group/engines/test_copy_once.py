"""Long arrays that are read from the memory of another rank's process: agreed on by all, and done without if not."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.failures.system_calls import READ_PEER, forbid, has_secret_memory, refuse, secret_memory, siblings_can_read

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks
from phalanx.tuning import DEFAULTS, Tuning, lookup

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="the segment needs the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory"),
]

NOBODY = 65534


def run(n: int, fn: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    return run_ranks(n, fn, *arguments, backend="mesh", options=px.Options(**options))


def by_address(group: px.Group) -> bool:
    """Whether the group's ranks read long arrays where they lie."""
    return bool(group._engine.segment.reads_peers)  # type: ignore[union-attr]


def copy_once_from(size: int) -> None:
    """Before the first collective: from which size this rank's segments do."""
    lookup._known[:] = [Tuning(copy_once_from=size)]


def move(group: px.Group, count: int) -> None:
    """Everything that only moves arrays, `count` elements from one rank to another. Inputs are wiped afterwards."""
    n, rank = group.world_size, group.rank

    def array(size: int, start: int) -> Any:
        return np.arange(start, start + size, dtype=np.int32)

    def room(size: int) -> Any:
        return np.full(size, -1, np.int32)

    mine = array(count, rank * count)
    all_of_it = group.all_gather(mine, room(count * n))
    mine[:] = -2
    assert np.array_equal(all_of_it, array(count * n, 0))
    for root in range(n):
        mine = array(count, rank * count)
        gathered = group.gather(mine, root, room(count * n) if rank == root else None)
        mine[:] = -2
        if rank == root:
            assert np.array_equal(gathered, array(count * n, 0))
        whole = array(count * n, root) if rank == root else None
        part = group.scatter(whole, root, room(count))
        if whole is not None:
            whole[:] = -2
        assert np.array_equal(part, array(count, root + rank * count))
    mine = array(count * n, rank * count * n)
    exchanged = group.all_to_all(mine, room(count * n))
    mine[:] = -2
    expected = np.concatenate([array(count, (r * n + rank) * count) for r in range(n)])
    assert np.array_equal(exchanged, expected)


def of_all_sizes(group: px.Group) -> list[bool]:
    limit = DEFAULTS.copy_once_from // 4
    group.barrier()
    for fast_path in (group._fast_path, None):
        group._fast_path = fast_path
        for count in (1, limit - 1, limit, limit + 1, 70_001, 300_001):
            move(group, count)
    return [by_address(group)]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_sizes_on_both_paths(n: int) -> None:
    assert run(n, of_all_sizes) == [[True]] * n


def of_odd_shapes(group: px.Group) -> bool:
    """Parts of different lengths, some of them empty; and arrays of `Group.empty` beside others."""
    copy_once_from(4096)
    n, rank = group.world_size, group.rank
    sent = [100_000 * ((rank + r) % n) for r in range(n)]
    found = group.all_to_all(np.full(sum(sent), rank, np.int32), send_counts=sent)
    assert np.array_equal(found, np.concatenate([np.full(100_000 * ((rank + r) % n), r, np.int32) for r in range(n)]))
    for turn in range(4):
        x = group.empty(400_000, np.int32) if (turn + rank) % 2 else np.empty(400_000, np.int32)
        x[:] = rank
        assert np.array_equal(group.all_gather(x), np.repeat(np.arange(n, dtype=np.int32), 400_000))
    everything = np.full(400_000 * n, -1, np.int32)
    part = everything[400_000 * rank :][:400_000]
    part[:] = rank
    group.all_gather(part, everything)
    assert np.array_equal(everything, np.repeat(np.arange(n, dtype=np.int32), 400_000))
    return by_address(group)


@pytest.mark.parametrize("n", [2, 3])
def test_odd_shapes(n: int) -> None:
    assert run(n, of_odd_shapes) == [True] * n


def refused_first(group: px.Group, error: int) -> bool:
    if group.rank == 1:
        refuse(READ_PEER, error)
    move(group, 100_000)
    return by_address(group)


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_if_one_is_refused_all_do_without(error: int) -> None:
    # As Yama's ptrace_scope and containers refuse it, and old kernels.
    assert run(3, refused_first, error) == [False] * 3


def refused_later(group: px.Group, verb: str, lose_it: str) -> list[bool]:
    group.barrier()
    found = [by_address(group)]
    if group.rank == group.world_size - 1:
        if lose_it == "another user":
            os.setresuid(NOBODY, NOBODY, NOBODY)
        else:
            refuse(READ_PEER, getattr(errno, lose_it))
    count, n = 100_000, group.world_size
    x = np.full(count, group.rank, np.int32)
    ranks = np.arange(n, dtype=np.int32)
    if verb == "all_gather":
        assert np.array_equal(group.all_gather(x, np.empty(count * n, np.int32)), np.repeat(ranks, count))
    elif verb == "gather":
        result = group.gather(x, 1, np.empty(count * n, np.int32) if group.rank == 1 else None)
        assert group.rank != 1 or np.array_equal(result, np.repeat(ranks, count))
    elif verb == "scatter":
        part = group.scatter(np.repeat(ranks, count) if group.rank == 0 else None, 0, np.empty(count, np.int32))
        assert np.array_equal(part, np.full(count, group.rank))
    else:
        found_parts = group.all_to_all(np.repeat(x[:1], count * n), np.empty(count * n, np.int32))
        assert np.array_equal(found_parts, np.repeat(ranks, count))
    found.append(by_address(group))
    move(group, 100_000)
    group._fast_path = None  # the general way
    move(group, 100_000)
    return found


TWO_AND_THREE = [(2, verb) for verb in ("all_gather", "gather")] + [
    (n, verb) for n in (2, 3) for verb in ("scatter", "all_to_all")
]
"""Ranks and verbs; gathers read by address between two ranks only."""


@pytest.mark.parametrize(("n", "verb"), TWO_AND_THREE)
def test_if_one_is_refused_later_the_data_is_right_and_nobody_tries_again(n: int, verb: str) -> None:
    # Where all meet, all do without from then on. Where they do not, the rank whose memory it is offers it no more.
    meets = verb in ("all_gather", "all_to_all")
    assert run(n, refused_later, verb, "EPERM") == [[True, not meets]] * n


@pytest.mark.parametrize("reason", ["ENOSYS", "EFAULT", "ENOMEM"])
def test_whatever_the_refusal_is(reason: str) -> None:
    assert run(2, refused_later, "all_gather", reason) == [[True, False]] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_rank_that_becomes_another_user() -> None:
    assert run(2, refused_later, "all_gather", "another user") == [[True, False]] * 2


def with_a_secret(group: px.Group) -> list[bool]:
    count = 1 << 18
    group.barrier()
    found = [by_address(group)]
    room = mmap.mmap(secret_memory(4 * count), 4 * count) if group.rank == 1 else bytearray(4 * count)
    x = np.frombuffer(room, np.int32)
    x[:] = group.rank
    everything = group.all_gather(x, np.empty(2 * count, np.int32))
    assert np.array_equal(everything, np.repeat(np.arange(2, dtype=np.int32), count))
    return [*found, by_address(group)]


@pytest.mark.skipif(not has_secret_memory(), reason="this kernel has no memory that others cannot read")
def test_memory_that_only_its_own_process_can_read() -> None:
    assert run(2, with_a_secret) == [[True, False]] * 2


def never(group: px.Group) -> bool:
    copy_once_from(1 << 40)
    forbid(READ_PEER)  # it is not even tried
    move(group, 100_000)
    return by_address(group)


def test_it_can_be_switched_off() -> None:
    assert run(2, never) == [False] * 2


def with_a_child(group: px.Group) -> bool:
    """A forked child has copies of everything, and keeps them; the others read the rank's own."""
    group.barrier()
    x = np.full(400_000, -1, np.int32)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    x[:] = group.rank
    everything = group.all_gather(x, np.empty(800_000, np.int32))
    os.close(writer)
    os.waitpid(child, 0)
    assert np.array_equal(everything, np.repeat(np.arange(2, dtype=np.int32), 400_000))
    return by_address(group)


def test_a_rank_with_a_forked_child() -> None:
    assert run(2, with_a_child) == [True] * 2
