"""Threads that help a rank with long arrays, where the ranks of a host leave cores free."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.failures.system_calls import READ_PEER, has_secret_memory, refuse, secret_memory, siblings_can_read
from tests.group.helped import helped, helpers

import phalanx as px
from phalanx import _native
from phalanx.rendezvous.cores import cores_between
from phalanx.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(not _native.available, reason="the segment needs the core (PHALANX_PURE is set)"),
    pytest.mark.skipif(not siblings_can_read(), reason="this machine lets no process read another's memory"),
]

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="ranks that share a core have no help, whatever they believe to have"
)

LONG = 5 << 18
"""Elements of 4 bytes that a rank sums with help."""


def reads(group: px.Group) -> bool:
    return bool(group._engine.segment.reads_peers)  # type: ignore[union-attr]


def values(rank: int, count: int, dtype: Any = np.int32) -> Any:
    return (np.arange(count) % 1009 + rank).astype(dtype)


def all_verbs(group: px.Group, count: int) -> None:
    n, rank = group.world_size, group.rank
    total = sum(values(r, count * n) for r in range(n))
    x = values(rank, count * n)
    group.all_reduce(x)
    assert np.array_equal(x, total)
    x = values(rank, count * n)
    part = group.reduce_scatter(x)
    x[:] = -1
    assert np.array_equal(part, total[count * rank :][:count])
    x = values(rank, count)
    everything = group.all_gather(x)
    gathered = group.gather(x, 1)
    x[:] = -1
    expected = np.concatenate([values(r, count) for r in range(n)])
    assert np.array_equal(everything, expected)
    assert rank != 1 or np.array_equal(gathered, expected)
    x = values(rank, count * n)
    exchanged = group.all_to_all(x)
    x[:] = -1
    assert np.array_equal(exchanged, np.concatenate([values(r, count * n)[count * rank :][:count] for r in range(n)]))
    for root in range(n):
        x = values(rank, count * n)
        group.broadcast(x, root)
        assert np.array_equal(x, values(root, count * n))
        mine = group.scatter(x if rank == root else None, root, np.empty(count, np.int32))
        x[:] = -1
        assert np.array_equal(mine, values(root, count * n)[count * rank :][:count])


def in_the_segment(group: px.Group) -> None:
    """Sums of arrays that all ranks have there."""
    n, rank = group.world_size, group.rank
    x = group.empty(n * LONG, np.int32)
    total = sum(values(r, n * LONG) for r in range(n))
    for root in (None, 1):
        x[:] = values(rank, n * LONG)
        group.barrier()
        if root is None:
            group.all_reduce(x)
        else:
            group.reduce(x, root)
        assert np.array_equal(x, total if root in (None, rank) else values(rank, n * LONG))
    x[:] = values(rank, n * LONG)
    assert np.array_equal(group.reduce_scatter(x), total[LONG * rank :][:LONG])


def with_help(group: px.Group) -> list[int]:
    with helped(group) as sub:
        before = helpers()
        for count in (1000, 200_003, LONG // 2, LONG + 7):
            all_verbs(sub, count)
        x = sub.empty(LONG, np.int32) if sub.rank else np.empty(LONG, np.int32)
        x[:] = values(sub.rank, LONG)
        sub.all_reduce(x)  # of one in the segment, and one elsewhere
        assert np.array_equal(x, values(0, LONG) + values(1, LONG))
        in_the_segment(sub)
        assert reads(sub)
        during = helpers()
    return [before, during, helpers()]


@two_cores
def test_all_verbs_with_help_and_no_thread_is_left() -> None:
    assert run_ranks(2, with_help, backend="mesh") == [[0, 2, 0]] * 2


def at_the_root(group: px.Group) -> list[Any]:
    x = values(group.rank, LONG)
    for _ in range(3):
        gathered = group.gather(x, 1)
        if gathered is not None:
            assert np.array_equal(gathered, np.concatenate([values(r, LONG) for r in range(group.world_size)]))
    cores = cores_between(group.backend.core_masks)
    return [helpers(), group.rank == 1 and reads(group) and group.world_size > cores > 1]


def test_a_root_that_gathers_has_help_while_the_others_rest() -> None:
    """Where ranks share cores, so that nobody else has any; but not on ARM, where such arrays go through the slots."""
    cores = len(os.sched_getaffinity(0))
    found = run_ranks(max(cores + 1, 3), at_the_root, backend="mesh")
    for count, is_helped in found:
        assert count == (is_helped and platform.machine() == "x86_64")


def with_help_over_tcp(group: px.Group) -> list[int]:
    found = []
    for cores in (0, 2):
        with helped(group, cores) as sub:
            for count in (1000, LONG + 7):
                for _ in range(2):  # the first of each size goes the general way
                    all_verbs(sub, count)
            found.append(helpers())
    return found


def test_long_arrays_are_copied_with_help_over_tcp() -> None:
    """Within a rank: its own part of what is gathered, scattered or exchanged."""
    assert run_ranks(2, with_help_over_tcp, backend="mesh", options=px.Options(transport="tcp")) == [[0, 2]] * 2


def of_all_types(group: px.Group) -> None:
    with helped(group) as sub:
        for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, np.complex64, np.uint8, np.int64):
            for op in ("sum", "mean") if np.dtype(dtype).kind not in "ui" else ("sum", "max", "bxor"):
                if op == "max" and np.dtype(dtype).kind == "c":
                    continue
                count = (5 << 20) // np.dtype(dtype).itemsize + 3
                x, y = values(sub.rank, count, dtype), values(sub.rank, count, dtype)
                sub.all_reduce(x, op)
                group.all_reduce(y, op)  # without help
                assert x.tobytes() == y.tobytes(), (dtype, op)
        assert reads(sub)


def test_sums_are_those_without_help_to_the_last_bit() -> None:
    run_ranks(2, of_all_types, backend="mesh")


def refused(group: px.Group, verb: str) -> list[bool]:
    with helped(group) as sub:
        found = [reads(sub)]
        if sub.rank == 1:
            refuse(READ_PEER, errno.EPERM)
        x = values(sub.rank, 2 * LONG)
        total = values(0, 2 * LONG) + values(1, 2 * LONG)
        if verb == "all_reduce":
            sub.all_reduce(x)
            assert np.array_equal(x, total)
        elif verb == "reduce_scatter in place":
            part = x[LONG * sub.rank :][:LONG]
            sub.reduce_scatter(x, out=part)
            assert np.array_equal(part, total[LONG * sub.rank :][:LONG])
        elif verb == "reduce_scatter":
            assert np.array_equal(sub.reduce_scatter(x), total[LONG * sub.rank :][:LONG])
        else:
            sub.broadcast(x, 0)
            assert np.array_equal(x, values(0, 2 * LONG))
        found.append(reads(sub))
        all_verbs(sub, LONG)
    return found


@two_cores
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "reduce_scatter in place", "broadcast"])
def test_a_rank_that_may_not_read_any_more(verb: str) -> None:
    assert run_ranks(2, refused, verb, backend="mesh") == [[True, verb == "broadcast"]] * 2


def partly_secret(group: px.Group, at: int) -> list[bool]:
    """An array of which the other rank can read one part and not the other."""
    count = 2 * LONG
    with helped(group) as sub:
        room = np.empty(count, np.int32)
        if sub.rank == 1:
            whole = mmap.mmap(-1, 4 * count)
            address = np.frombuffer(whole, np.uint8).ctypes.data
            secret = secret_memory(4 * count)
            _map_over(address + 4 * at, 4 * count - 4 * at, secret)
            room = np.frombuffer(whole, np.int32)
        for turn in range(2):
            room[:] = values(sub.rank + turn, count)
            sub.all_reduce(room)
            assert np.array_equal(room, values(turn, count) + values(1 + turn, count))
        return [reads(sub)]


def _map_over(address: int, size: int, fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x10
    made = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, fd, 0)
    assert made == address, os.strerror(ctypes.get_errno())


@two_cores
@pytest.mark.skipif(not has_secret_memory(), reason="this kernel has no memory that others cannot read")
@pytest.mark.parametrize("at", [1 << 18, LONG + (1 << 18)])
def test_an_array_of_which_a_part_cannot_be_read(at: int) -> None:
    # In the half that the other rank sums, and in the half that it reads when it is summed.
    assert run_ranks(2, partly_secret, at, backend="mesh") == [[False]] * 2


def broken(group: px.Group) -> int:
    kept = []
    for _ in range(3):
        with helped(group) as sub:
            all_verbs(sub, LONG)
            try:
                sub.all_reduce(np.zeros(LONG + sub.rank, np.int32))
            except px.PhalanxError as error:
                kept.append(error)  # and with it all that its traceback holds
    assert len(kept) == 3
    deadline = time.monotonic() + 10
    while helpers() and time.monotonic() < deadline:
        time.sleep(0.01)
    return helpers()


def test_no_thread_outlives_a_broken_group() -> None:
    assert run_ranks(2, broken, backend="mesh") == [0, 0]


def in_a_child(group: px.Group) -> int:
    with helped(group) as sub:
        all_verbs(sub, LONG)
        child = os.fork()
        if child == 0:
            os._exit(helpers())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        all_verbs(sub, LONG)
    return status


def test_a_forked_child_has_no_such_threads() -> None:
    assert run_ranks(2, in_a_child, backend="mesh") == [0, 0]
