"""Memory that ranks of one host share: how they come to it, what it costs, and how they do without."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import random
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound

import phalanx as px
from phalanx import _native
from phalanx.group.engines.network import NetworkEngine
from phalanx.group.engines.segment import SegmentEngine
from phalanx.testing import run_ranks
from phalanx.tuning import DEFAULTS
from phalanx.tuning.decide import Decision
from phalanx.tuning.store import save

pytestmark = pytest.mark.skipif(not _native.available, reason="the segment needs the core (PHALANX_PURE is set)")


def run(n: int, fn: Any, *arguments: Any, **options: Any) -> list[Any]:
    return run_ranks(n, fn, *arguments, backend="mesh", options=px.Options(**options))


def engine_of(group: px.Group) -> tuple[str, float]:
    x = group.all_reduce(np.ones(3))
    return type(group._engine).__name__, float(x[0])


def test_ranks_of_one_host_share_memory() -> None:
    assert run(3, engine_of) == [(SegmentEngine.__name__, 3.0)] * 3


def test_not_if_it_is_not_wanted() -> None:
    assert run(3, engine_of, transport="tcp") == [(NetworkEngine.__name__, 3.0)] * 3


def reduce_in_place(group: px.Group) -> None:
    for count in (3000, 6000, 16_000, 40_000):
        shared, own = group.empty(count, np.int64), np.empty(count, np.int64)
        for turn in range(40):
            # Those of all ranks lie in shared memory, or those of some, or none.
            x = shared if turn % 4 < 2 or (turn % 4 == 2 and group.rank == 0) else own
            x[:] = np.arange(count) + group.rank
            group.barrier()
            group.all_reduce(x)
            assert np.array_equal(x, group.world_size * np.arange(count) + sum(range(group.world_size)))


@pytest.mark.parametrize("reduced_by_all", [1 << 10, 64 << 10, 1 << 20])
def test_nobody_reads_an_array_while_its_owner_writes_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduced_by_all: int
) -> None:
    path = tmp_path / "tuning.json"
    save(path, [Decision("reduced_by_all", DEFAULTS.reduced_by_all, reduced_by_all, "a test wants it")])
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    run(2, reduce_in_place)
    run(3, reduce_in_place)


class Kept(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without_room(group: px.Group, poor: int) -> tuple[str, float, list[str]]:
    kept = Kept()
    logging.getLogger("phalanx").addHandler(kept)
    if group.rank == poor:
        status = Path("/proc/self/status").read_text()
        size = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), limits[1]))
    x = group.all_reduce(np.ones(100_000))
    y = group.empty(10)
    group.all_reduce(y)
    return type(group._engine).__name__, float(x[-1]), kept.lines


@pytest.mark.parametrize("poor", [0, 1])
def test_without_room_for_it_all_use_tcp_and_one_says_so(poor: int) -> None:
    found = run(3, without_room, poor)
    assert [(name, value) for name, value, _ in found] == [(NetworkEngine.__name__, 3.0)] * 3
    for rank, (_, _, lines) in enumerate(found):
        warned = [line for line in lines if "use TCP, which is slower" in line]
        assert len(warned) == (1 if rank == poor else 0), lines


def segments_open() -> int:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("phalanx-segment" in name for name in files)


def nothing_to_find(group: px.Group) -> tuple[list[int], list[str]]:
    group.barrier()
    named = [path.name for path in Path("/dev/shm").iterdir()] if Path("/dev/shm").is_dir() else []
    counts = [segments_open()]
    with group.subgroup([0, 1]) as both:
        both.barrier()
        array = both.empty(10)
        counts.append(segments_open())
    counts.append(segments_open())
    del array
    counts.append(segments_open())
    group.barrier()
    slates = f"phalanx-{os.geteuid()}"
    return counts, [name for name in named if "phalanx" in name and name != slates]


def test_it_has_no_name_and_takes_one_descriptor() -> None:
    # A forked child needs the descriptor to have pages of its own, as long as there is a group or an array.
    assert run(2, nothing_to_find) == [([1, 2, 2, 1], [])] * 2


def arrays(group: px.Group) -> list[Any]:
    rank = group.rank
    first = group.empty((4, 5), np.float64)
    first[:] = rank
    found: list[Any] = [first.shape, first.dtype.name, first.flags.c_contiguous, first.flags.writeable]
    group.all_reduce(first)
    found.append(float(first.sum()))
    # 1 MiB in all: two of 512 KiB do not fit beside `first`, and what is given back can be had again.
    segment = group._engine.segment  # type: ignore[union-attr]
    big = [group.empty(512 << 10, np.uint8) for _ in range(2)]
    found.append([segment.empty(512 << 10) is None, big[0].base is not None, big[1].base is None])
    del big
    gc.collect()
    again = group.empty(900 << 10, np.uint8)
    found.append(again.base is not None)
    found.append([group.empty(0).size, group.empty((), np.int8).shape, group.empty([2, 3]).shape])
    # An array outlives its group.
    again[:] = 7
    group.close()
    found.append(int(again.sum()) // again.size)
    return found


def test_arrays_in_it() -> None:
    expected = [(4, 5), "float64", True, True, 20.0, [True, True, True], True, [0, (), (2, 3)], 7]
    assert run(2, arrays, segment_heap=1 << 20) == [expected] * 2


def puts_huge_pages_together() -> bool:
    """Whether the kernel does so for shared memory when it is asked to."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    version = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    return version >= (6, 1) and mmap.PAGESIZE == 4096 and setting.exists() and "[deny]" not in setting.read_text()


def in_huge_pages() -> int:
    """MiB of the segments that this process reaches through huge pages."""
    found = re.findall(r"memfd:phalanx-segment.*?ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.S)
    return sum(map(int, found)) >> 10


def long_arrays(group: px.Group) -> list[int]:
    long, short = group.empty((8 << 20) + 5, np.uint8), group.empty(1 << 20, np.uint8)
    found = [in_huge_pages()]
    for x in (short, long):
        x[:] = group.rank + 1
        group.all_reduce(x)
        assert (x == sum(range(1, group.world_size + 1))).all()
    for _ in range(20):
        group.all_reduce(long, "max")
    found.append(in_huge_pages())
    group.barrier()
    del x, long
    group.barrier()
    return [*found, in_huge_pages()]


@pytest.mark.skipif(
    not puts_huge_pages_together(), reason="Linux puts huge pages of shared memory together from 6.1 on"
)
def test_long_arrays_lie_in_huge_pages_and_give_them_back() -> None:
    for own, with_others, at_the_end in run(2, long_arrays):
        assert (own, at_the_end) == (8, 0)
        assert with_others >= 10  # a rank reads and writes pieces of what the other has: as many as it comes to


def many_arrays(group: px.Group) -> None:
    times = random.Random(group.rank)
    held: list[tuple[int, Any]] = []
    for turn in range(300):
        size = times.choice([1, 4096, 100_000, (1 << 20) + 1, 2 << 20, 5_000_000])
        x = group.empty(size, np.uint8)
        x[:] = turn % 256
        held.append((turn, x))
        while len(held) > 6:
            number, old = held.pop(times.randrange(len(held)))
            assert (old == number % 256).all()
    del x, old
    held.clear()
    gc.collect()
    assert group._engine.segment.empty(16 << 20) is not None  # type: ignore[union-attr]


def test_arrays_of_many_lengths_keep_out_of_each_others_way() -> None:
    run(2, many_arrays, segment_heap=16 << 20)


def full_of_arrays(group: px.Group) -> list[bool]:
    group.barrier()
    segment = group._engine.segment  # type: ignore[union-attr]
    held = [segment.empty((2 << 20) + 4096) for _ in range(5)]
    return [x is not None for x in held]


def test_all_of_the_room_is_given_out() -> None:
    assert run(2, full_of_arrays, segment_heap=4 * ((2 << 20) + 4096)) == [[True] * 4 + [False]] * 2


def halves(group: px.Group) -> float:
    # 2048 + 1 is 2048 in float16; summed in float32 and rounded once, the ones count.
    x = np.full(5000, 2048 if group.rank == 0 else 1, np.float16)
    return float(group.all_reduce(x)[0])


def test_halves_are_rounded_once() -> None:
    assert run(5, halves) == [2052.0] * 5


def mixed(group: px.Group) -> list[float]:
    """The fast path on one rank, the general one on another: they must agree on what each operation is."""
    found = []
    quick = group.rank == 0
    group.barrier()
    for dtype in "?bBhHiIlLqQefdFD":
        x = np.ones(6, dtype)
        y, z = np.empty(12, dtype), np.empty(6, dtype)
        extra: dict[str, Any] = {} if quick else {"timeout": 20.0}
        group.broadcast(x, 0, **extra)
        group.all_gather(x, y, **extra)
        group.all_to_all(x, z, **extra)
        group.gather(x, 1, y if group.rank == 1 else None, **extra)
        for root in (0, 1):
            group.scatter(x if group.rank == root else None, root, z[:3], **extra)
        found.append(float(np.real(group.all_reduce(x, "max" if dtype not in "FD" else "sum", **extra)[0])))
        group.reduce(x, 1, **extra)
        group.reduce_scatter(x, "sum", np.empty(3, dtype), **extra)
        group.barrier(**extra)
        if dtype in "efdFD":
            group.all_reduce(x, "mean", **extra)
    return found


def test_quick_and_general_calls_meet() -> None:
    assert run(2, mixed) == [[1.0] * 14 + [2.0] * 2] * 2


def parts_of(group: px.Group) -> list[Any]:
    """Rank 0 takes the fast path and rank 1 the general one, in turns as the root."""
    group.barrier()
    found: list[Any] = []
    words: dict[str, Any] = {} if group.rank == 0 else {"timeout": 20.0}
    for root in (0, 1):
        for count in (1, 5, 6000, 300_000):
            x = np.arange(2.0 * count).reshape(2 * count) if group.rank == root else None
            given = np.full(count, -1.0)
            assert group.scatter(x, root, given, **words) is given
            new = group.scatter(x, root, **words)
            assert np.array_equal(given, np.arange(count) + float(group.rank * count))
            assert np.array_equal(new, given)
            everything = group.gather(given, root, np.empty(2 * count) if group.rank == root else None, **words)
            if group.rank == root:
                assert np.array_equal(everything, np.arange(2.0 * count))
            else:
                assert everything is None
            found.append(new.shape)
    assert group._fast_path is not None
    return found


def test_gathers_and_scatters_on_both_paths() -> None:
    assert run(2, parts_of) == [[(1,), (5,), (6000,), (300_000,)] * 2] * 2


def in_place(group: px.Group) -> list[float]:
    group.barrier()
    found = []
    for other in (0, 2):  # this rank's own part, which the fast path takes, and another one, which it declines
        x = np.repeat(np.arange(3.0), 50_000)
        part = x[50_000 * ((group.rank + other) % 3) :][:50_000]
        group.scatter(x if group.rank == 1 else None, 1, part)
        found += [float(part[0]), float(part[-1])]
    x = np.repeat(np.full(3, -1.0), 50_000)
    part = x[50_000 * group.rank :][:50_000]
    part[:] = group.rank
    group.gather(part, 1, x if group.rank == 1 else None)
    return [*found, *x[::50_000]]


def test_in_place_where_that_is_allowed() -> None:
    after = [[0.0, -1.0, -1.0], [0.0, 1.0, 2.0], [-1.0, -1.0, 2.0]]
    assert run(3, in_place) == [[float(rank)] * 4 + after[rank] for rank in range(3)]


def misfits(group: px.Group) -> list[str]:
    group.barrier()
    said = []
    for words in ({}, {"timeout": 20.0}):
        for count, dtype in ((10, np.float64), (9, np.float32), (40_000, np.float64)):
            x = np.ones(2 * max(count, 10), np.float32) if group.rank == 0 else None
            out = np.full(count if group.rank else max(count, 10), -1, dtype if group.rank else np.float32)
            try:
                group.scatter(x, 0, out, **words)
            except px.UsageError as error:
                said.append(str(error))
                assert np.all(out == -1)
    group.barrier()
    with pytest.raises(px.UsageError, match="cannot be cut into 2"):
        group.scatter(np.ones(3), group.rank, np.ones(1))
    with pytest.raises(px.UsageError, match="only filled on rank"):
        group.gather(np.ones(3), 1 - group.rank, np.ones(6))
    with pytest.raises(px.InvalidRank):
        group.gather(np.ones(3), 2, np.ones(6))
    group.barrier()
    return said


def test_a_part_that_does_not_fit_is_an_error_where_it_does_not() -> None:
    said = [
        f"out is {out}, but rank 0 scattered {part}"
        for out, part in (
            ("float64[10]", "float32[10]"),
            ("float32[9]", "float32[10]"),
            ("float64[40000]", "float32[40000]"),
        )
    ]
    assert run(2, misfits) == [[], said * 2]


def threads_at_once(group: px.Group) -> list[Any]:
    small, big = np.full(1, group.rank + 1.0), np.full(50_000, 10.0 + group.rank)
    guarded = np.full(200_000, -7.0)
    target, everything = guarded[:2], np.empty(100_000)
    group.barrier()
    if group.rank == 0:
        first = threading.Thread(target=group.all_gather, args=(small, target))
        first.start()
        while not group._health.status().running:
            time.sleep(0.001)
        # Declined, because the first one has not come back yet. It must leave no trace.
        assert group._fast_path is not None
        assert group._fast_path.all_gather(big, everything) is None
        assert group._fast_path.all_to_all(np.zeros(100_000), everything) is None
        group.send(np.ones(1), 1)
        first.join()
    else:
        group.recv(np.ones(1), 0)
        group.all_gather(small, target)
    group.all_gather(big, everything)
    return [*target, int(np.count_nonzero(guarded[2:] != -7.0)), everything[0], everything[-1]]


def test_a_call_that_another_thread_waits_in_is_left_alone() -> None:
    assert run(2, threads_at_once) == [[1.0, 2.0, 0, 10.0, 11.0]] * 2


def two_ways(group: px.Group) -> list[Any]:
    """Rank 0 goes through the core at once, rank 1 the general way: to both it is the same operation."""
    group.barrier()
    assert group._fast_path is not None
    if group.rank == 1:
        group._fast_path = None
    found = []
    for shape in [(), (1,), (6,), (2, 3), (0, 3), (1,) * 8, (1,) * 9, (40_000, 2)]:
        found.append(group.all_reduce(np.ones(shape)).shape)
        group.broadcast(np.ones(shape), 0)
        group.all_gather(np.ones(shape), np.empty(2 * int(np.prod(shape))))
    return found


def test_both_ways_have_the_same_fingerprint() -> None:
    shapes = [(), (1,), (6,), (2, 3), (0, 3), (1,) * 8, (1,) * 9, (40_000, 2)]
    assert run(2, two_ways) == [shapes] * 2


def closed_by_another_thread(group: px.Group) -> tuple[str, float]:
    with group.subgroup([0, 1]) as pair:
        pair.barrier()
        if group.rank == 0:
            inside = threading.Thread(target=wait, args=(pair,))
            inside.start()
            while not pair._health.status().running:
                time.sleep(0.001)
            pair.close()
            inside.join()
            group.send(np.ones(1), 1)
            return "", 0.0
        group.recv(np.ones(1), 0)
        began = time.monotonic()
        with pytest.raises(px.ChannelClosed) as caught:
            pair.barrier()
        return str(caught.value), time.monotonic() - began


def wait(group: px.Group) -> None:
    with contextlib.suppress(px.PhalanxError):
        group.barrier()


def test_a_group_that_another_thread_closes_in_a_collective() -> None:
    text, seconds = run(2, closed_by_another_thread)[1]
    assert "rank 0 is no longer there: it has closed this group" in text
    assert seconds < bound(1.0)


def unheard(group: px.Group) -> list[str]:
    told = []
    for asks in (False, True):
        pair = group.subgroup([0, 1])
        work = pair.all_reduce(np.ones(3 + group.rank), async_op=True)
        while not work.done():
            time.sleep(0.001)
        if asks:
            assert isinstance(work.exception(), px.Desync)
        try:
            pair.close()
            told.append("nothing")
        except px.Desync:
            told.append("Desync")
    return told


def test_close_raises_a_desync_that_nobody_asked_for() -> None:
    assert run(2, unheard) == [["Desync", "nothing"]] * 2
