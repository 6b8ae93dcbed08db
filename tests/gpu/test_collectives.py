"""Every verb on arrays of a GPU, with the stand-in for the driver: the same results as on the host, by every way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.gpu.fake import DriverArray, FakeDriver, install

import phalanx as px
from phalanx import _native
from phalanx.errors import Desync, UnsupportedOp, UsageError
from phalanx.group.engines.cuda import routing
from phalanx.testing import run_ranks

LONG = 40_000
"""Elements that are worth a kernel."""
WAYS = {
    "executor": ("mesh", {}, "auto"),
    "no handles": ("mesh", {"exports": False}, "auto"),
    "tcp": ("mesh", {}, "tcp"),
}
"""The backend, the options of the stand-in, and the transport."""


def on_ranks(n: int, body: Any, way: str, *args: Any) -> list[Any]:
    backend, options, transport = WAYS[way]

    def started(group: px.Group, *given: Any) -> Any:
        fake = install(**options)
        result = body(group, fake, *given)
        group.barrier()
        return result

    return run_ranks(n, started, *args, backend=backend, options=px.Options(transport=transport))


def values(rank: int, count: int, dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(rank).random(count) * 100).astype(dtype)


def all_verbs(group: px.Group, fake: FakeDriver, count: int) -> list[str]:
    rank, size = group.rank, group.world_size
    wrong = []

    def check(what: str, found: Any, expected: Any) -> None:
        if not np.array_equal(found.numpy() if isinstance(found, DriverArray) else found, expected):
            wrong.append(what)

    every = [values(r, count * size) for r in range(size)]
    for op in ("sum", "mean", "prod", "min", "max"):
        x, host = DriverArray(every[rank]), every[rank].copy()
        assert group.all_reduce(x, op) is x
        check(f"all_reduce {op}", x, group.all_reduce(host, op))
    x = DriverArray(every[rank])
    group.reduce(x, 1)
    check("reduce", x, group.reduce(every[rank].copy(), 1))
    x = DriverArray(every[rank])
    group.broadcast(x, 1)
    check("broadcast", x, every[1])
    out = DriverArray(np.zeros(count, np.float32))
    group.reduce_scatter(DriverArray(every[rank]), "sum", out)
    check("reduce_scatter", out, group.reduce_scatter(every[rank]))
    part = values(rank, count)
    parts = [values(r, count) for r in range(size)]
    out = DriverArray(np.zeros(count * size, np.float32))
    assert group.all_gather(DriverArray(part), out) is out
    check("all_gather", out, np.concatenate(parts))
    whole = DriverArray(np.zeros(count * size, np.float32))
    mine = DriverArray(part, at=whole.address + rank * part.nbytes)
    group.all_gather(mine, whole)
    check("all_gather in place", whole, np.concatenate(parts))
    out = DriverArray(np.zeros(count * size, np.float32)) if rank == 0 else None
    group.gather(DriverArray(part), 0, out)
    if out is not None:
        check("gather", out, np.concatenate(parts))
    out = DriverArray(np.zeros(count, np.float32))
    group.scatter(DriverArray(every[0]) if rank == 0 else None, 0, out)
    check("scatter", out, np.split(every[0], size)[rank])
    out = DriverArray(np.zeros(count * size, np.float32))
    group.all_to_all(DriverArray(every[rank]), out)
    check("all_to_all", out, np.concatenate([np.split(e, size)[rank] for e in every]))
    counts = [count + r for r in range(size)]
    out = DriverArray(np.zeros(sum(counts), np.float32))
    group.all_gather(DriverArray(values(rank, counts[rank])), out, counts=counts)
    check("all_gather counts", out, np.concatenate([values(r, c) for r, c in enumerate(counts)]))
    out = DriverArray(np.zeros(sum(counts), np.float32))
    group.all_gather(DriverArray(values(rank, counts[rank])), out, counts="auto")
    check("all_gather auto", out, np.concatenate([values(r, c) for r, c in enumerate(counts)]))
    out = DriverArray(np.zeros(counts[rank], np.float32))
    group.scatter(DriverArray(values(0, sum(counts))) if rank == 0 else None, 0, out, counts=counts)
    check("scatter counts", out, np.split(values(0, sum(counts)), np.cumsum(counts)[:-1])[rank])
    sending = [(rank + other) % 3 * count for other in range(size)]
    receiving = [(rank + other) % 3 * count for other in range(size)]
    out = DriverArray(np.zeros(sum(receiving), np.int16))
    group.all_to_all(
        DriverArray(np.full(sum(sending), rank, np.int16)), out, send_counts=sending, recv_counts=receiving
    )
    check("all_to_all counts", out, np.repeat(np.arange(size, dtype=np.int16), receiving))
    x, y = DriverArray(every[rank]), DriverArray(values(rank, 5, np.int32))
    group.all_reduce_many([x, y], "max")
    check("all_reduce_many", x, np.max(every, axis=0))
    check("all_reduce_many", y, np.max([values(r, 5, np.int32) for r in range(size)], axis=0))
    x = DriverArray(every[rank])
    group.scan(x)
    check("scan", x, group.scan(every[rank].copy()))
    found, where = group.argmax(every[rank])
    expected, there = group.argmax(every[rank])
    check("argmax", found, expected)
    check("argmax", where, there)
    if rank == 0:
        group.send(DriverArray(part), 1)
    elif rank == 1:
        x = DriverArray(np.zeros(count, np.float32))
        assert group.recv(x, 0) is x
        check("recv", x, parts[0])
    x = DriverArray(every[rank])
    work = group.all_reduce(x, async_op=True)
    assert work.wait() is x
    check("async", x, group.all_reduce(every[rank].copy()))
    return wrong


@pytest.mark.parametrize("count", [3, LONG])
@pytest.mark.parametrize("way", WAYS)
def test_all_verbs(way: str, count: int) -> None:
    assert on_ranks(3, all_verbs, way, count) == [[]] * 3


def scattered(group: px.Group, fake: FakeDriver, count: int, lying: list[str]) -> list[str]:
    """Scatters from each root, with arrays where `lying` says for each rank."""
    wrong, size = [], group.world_size
    for turn in range(3):
        for root in range(size):
            whole = values(root + turn, count * size)
            x: Any = DriverArray(whole) if lying[root] == "gpu" else whole
            plain = np.zeros(count, np.float32)
            out: Any = DriverArray(plain) if lying[group.rank] == "gpu" else plain
            given = x if group.rank == root else None
            found = group.scatter(given, root, out)
            expected = np.split(whole, size)[group.rank]
            if found is not out or not np.array_equal(out.numpy() if out is not plain else out, expected):
                wrong.append(f"root {root}, turn {turn}")
            counts = [count + r for r in range(size)]
            whole = values(root, sum(counts))
            x = DriverArray(whole) if lying[root] == "gpu" else whole
            plain = np.zeros(counts[group.rank], np.float32)
            out = DriverArray(plain) if lying[group.rank] == "gpu" else plain
            group.scatter(x if group.rank == root else None, root, out, counts=counts)
            expected = np.split(whole, np.cumsum(counts)[:-1])[group.rank]
            if not np.array_equal(out.numpy() if out is not plain else out, expected):
                wrong.append(f"root {root}, turn {turn}, with counts")
        if turn == 1:
            group.all_reduce(DriverArray(np.ones(3, np.float32)))  # now all ranks have used an array on the GPU
    return wrong


@pytest.mark.parametrize("count", [3, LONG])
@pytest.mark.parametrize("lying", [["gpu"] * 3, ["gpu", "host", "gpu"], ["host", "host", "gpu"]])
@pytest.mark.parametrize("way", WAYS)
def test_scatter_wherever_the_arrays_lie(way: str, lying: list[str], count: int) -> None:
    """Only the root says what it hands out, and a rank may take its part on the host."""
    assert on_ranks(3, scattered, way, count, lying) == [[]] * 3


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_scatters_find_out_that_the_ranks_share_a_gpu() -> None:
    """The first one goes through the host, and all others by the kernel. One that does not fit is refused alone."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[list[str], int, str]:
        x = DriverArray(values(1, 2 * LONG)) if group.rank == 1 else None
        out = DriverArray(np.zeros(LONG, np.float32))
        for _ in range(3):
            group.scatter(x, 1, out)
            out.fill(0)
        before, text = fake.reads, ""
        other = DriverArray(np.zeros(LONG + 1, np.float32)) if group.rank == 0 else out
        try:
            group.scatter(x, 1, other)
        except UsageError as error:
            text = str(error)
        reads = fake.reads - before
        if group.rank and not np.array_equal(out.numpy(), values(1, 2 * LONG)[LONG:]):
            text = "wrong values"
        return fake.calls, reads, text

    first, second = on_ranks(2, body, "executor")
    assert first[0] == ["combine_uint64"] * 2  # what does not fit is done through the host
    assert "float32[40000]" in first[2]
    assert "out is float32[40001]" in first[2]
    assert second == ([], 1, "")


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_scatter_in_place() -> None:
    """The root's own part stays where it is; with another's place as its target, nobody reads what it writes."""

    def body(group: px.Group, fake: FakeDriver, place: int) -> bool:
        group.all_reduce(DriverArray(np.ones(3, np.float32)))
        whole = values(5, 3 * LONG)
        x = DriverArray(whole)
        out = DriverArray(whole[:LONG], at=x.address + 4 * place * LONG)
        x.fill(whole)
        if group.rank:
            out = DriverArray(np.zeros(LONG, np.float32))
        group.scatter(x if group.rank == 0 else None, 0, out)
        return np.array_equal(out.numpy(), np.split(whole, 3)[group.rank])

    for place in (0, 1):
        assert on_ranks(3, body, "executor", place) == [True] * 3


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_the_executor_does_it() -> None:
    """Rank 0 launches the kernels, and opens the memory of each other rank once. They open its word."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[list[str], int]:
        x = DriverArray(np.ones(LONG, np.float32))
        for _ in range(3):
            group.all_reduce(x)
        assert x.numpy()[-1] == 8
        return fake.calls, len(fake.opened)

    assert on_ranks(2, body, "executor") == [(["combine_float32"] * 3, 1), ([], 1)]


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
@pytest.mark.parametrize("dtype", [*_native.DTYPES])
def test_dtypes(dtype: str) -> None:
    """The same bits as on the host, for each dtype and reduction."""

    def body(group: px.Group, fake: FakeDriver) -> list[str]:
        storage = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":
            ml_dtypes = pytest.importorskip("ml_dtypes")
            storage = np.dtype(ml_dtypes.bfloat16)
        mine = values(group.rank, 2 * LONG).astype(storage)
        wrong = []
        for op in _native.valid_ops(dtype):
            x, host = DriverArray(mine), mine.copy()
            group.all_reduce(x, op)
            group.all_reduce(host, op)
            if x.numpy().tobytes() != host.tobytes():
                wrong.append(op)
        return wrong

    if dtype == "bfloat16":
        pytest.skip("the CUDA array interface has no bfloat16")
    assert on_ranks(2, body, "executor") == [[], []]


@pytest.mark.parametrize("count", [6, 3 * LONG])
@pytest.mark.parametrize("way", WAYS)
def test_means_of_float16(way: str, count: int) -> None:
    """The mean of values whose sum no float16 can hold."""

    def body(group: px.Group, fake: FakeDriver) -> list[float]:
        large = np.full(count, 60_000, np.float16)
        x, part = DriverArray(large), DriverArray(large[: count // 3])
        group.all_reduce(x, "mean")
        group.reduce_scatter(x, "mean", part)
        group.reduce(x, 1, "mean")
        return [*map(float, {*x.numpy(), *part.numpy()})]

    assert on_ranks(3, body, way) == [[60_000.0]] * 3


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
@pytest.mark.parametrize(("rank", "kernels"), [(0, 1), (1, 0)])
def test_memory_that_cannot_be_given_away(rank: int, kernels: int) -> None:
    """Of the executor it need not be opened by anybody; of another rank the array goes through the host."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[int, float]:
        small = DriverArray(np.ones(1, np.float32))
        group.all_reduce(small)  # they have agreed
        fake.exports = group.rank != rank
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x)
        return len(fake.calls), float(x.numpy()[-1])

    assert on_ranks(2, body, "executor") == [(kernels, 2.0), (0, 2.0)]


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_memory_that_stands_in() -> None:
    """Arrays that other processes cannot open are copied inside the GPU, and nothing goes through the host."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[list[str], int, int]:
        rank, size = group.rank, group.world_size
        routing.SHORT_IF_CLOSED = 0
        group.all_reduce(DriverArray(np.ones(1, np.float32)))  # they have agreed
        fake.reads, wrong = 0, []

        def private(array: Any) -> DriverArray:
            made = DriverArray(array)
            fake.private.add(made.address)
            return made

        def check(what: str, found: DriverArray, expected: Any) -> None:
            reads = fake.reads
            if not np.array_equal(found.numpy(), expected):
                wrong.append(what)
            fake.reads = reads

        every = [values(r, size * LONG) for r in range(size)]
        parts = [np.split(one, size) for one in every]
        for _ in range(2):
            x = private(every[rank])
            group.all_reduce(x, "max")
            check("all_reduce", x, np.max(every, axis=0))
            x = private(every[rank])
            group.reduce(x, 1, "max")
            check("reduce", x, np.max(every, axis=0) if rank == 1 else every[rank])
            x = private(every[rank])
            group.broadcast(x, 1)
            check("broadcast", x, every[1])
            x, out = private(every[rank]), private(np.zeros(LONG, np.float32))
            group.reduce_scatter(x, "max", out)
            check("reduce_scatter", out, np.max(every, axis=0)[rank * LONG : (rank + 1) * LONG])
            check("reduce_scatter's source", x, every[rank])
            x, out = private(parts[rank][0]), private(np.zeros(size * LONG, np.float32))
            group.all_gather(x, out)
            check("all_gather", out, np.concatenate([part[0] for part in parts]))
            group.gather(x, 2, out if rank == 2 else None)
            x, out = private(every[rank]), private(np.zeros(size * LONG, np.float32))
            group.all_to_all(x, out)
            check("all_to_all", out, np.concatenate([part[rank] for part in parts]))
            out = private(np.zeros(LONG, np.float32))
            group.scatter(x if rank == 2 else None, 2, out)
            check("scatter", out, parts[2][rank])
        return wrong, fake.reads, fake.copies

    found = on_ranks(3, body, "executor")
    assert [(wrong, reads) for wrong, reads, _ in found] == [([], 0)] * 3
    assert found[0][2] == 0  # the executor's own memory need not be opened
    assert min(found[1][2], found[2][2]) > 0


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_memory_that_was_replaced_is_closed() -> None:
    def body(group: px.Group, fake: FakeDriver) -> int:
        for _ in range(3):
            x = DriverArray(np.ones(LONG, np.float32))
            group.all_reduce(x)
            assert x.numpy()[0] == 2
            fake.free(x.address)
        return len(fake.opened)

    found = on_ranks(2, body, "executor")
    assert found[1] == 1  # the executor's word
    assert found[0] <= 3


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_a_busy_gpu_is_gone_round() -> None:
    """After a kernel that took long, arrays go through the host for a while; then the executor tries again."""

    def body(group: px.Group, fake: FakeDriver) -> list[int]:
        routing.SLICE = 0.25  # far above what a machine with other work is late
        x = DriverArray(np.ones(LONG, np.float32))
        group.all_reduce(x, "max")  # the first one may have to wait for anything
        for _ in range(300):
            group.all_reduce(x, "max")
        kernels = []
        for seconds in (0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
            before = len(fake.calls)
            fake.kernel_seconds = seconds
            group.all_reduce(x, "max")
            kernels.append(len(fake.calls) - before)
        return kernels

    assert on_ranks(2, body, "executor")[0] == [1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
@pytest.mark.parametrize(
    ("ranks", "verb", "elements", "goes_by_kernel"),
    [
        (2, "all_reduce", 8, True),
        (3, "all_reduce", 8, True),
        (2, "broadcast", 8, False),
        (3, "broadcast", 8, False),
        (3, "broadcast", 5000, True),
    ],
)
def test_short_arrays_of_an_idle_gpu(ranks: int, verb: str, elements: int, goes_by_kernel: bool) -> None:
    """The kernel is tried after sixteen operations, where it is quicker than the copies of all ranks."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[int, int, bool]:
        x = DriverArray(np.full(elements, group.rank + 1, np.float32))
        run: Any = (lambda: group.all_reduce(x, "max")) if verb == "all_reduce" else (lambda: group.broadcast(x, 1))
        for _ in range(16):
            run()
        before = len(fake.calls)
        run()
        expected = group.world_size if verb == "all_reduce" else 2
        return before, len(fake.calls), bool((x.numpy() == expected).all())

    found = on_ranks(ranks, body, "executor")
    assert found == [(0, int(goes_by_kernel), True)] + [(0, 0, True)] * (ranks - 1)


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
@pytest.mark.parametrize(
    ("elements", "dtype", "moved"),
    [
        (40_000, np.float32, "uint64"),
        (40_001, np.float32, "uint32"),
        (70_001, np.int16, "uint16"),
        (70_001, np.int8, "uint8"),
    ],
)
def test_moves_are_as_wide_as_they_can_be(elements: int, dtype: Any, moved: str) -> None:
    def body(group: px.Group, fake: FakeDriver) -> tuple[list[str], bool]:
        x = DriverArray(np.full(elements, group.rank, dtype))
        group.broadcast(x, 1)
        return fake.calls, bool((x.numpy() == 1).all())

    assert on_ranks(2, body, "executor") == [([f"combine_{moved}"], True), ([], True)]


@pytest.mark.skipif(not _native.available, reason="ranks share memory only with the core")
def test_long_plans_are_several_launches() -> None:
    """A launch has 64 pieces; an all_to_all of nine ranks has 81."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[int, bool]:
        size = group.world_size
        x, out = DriverArray(np.full((size, 3000), group.rank)), DriverArray(np.zeros((size, 3000), np.int64))
        group.all_to_all(x, out)
        return len(fake.calls), bool((out.numpy() == np.arange(size)[:, None]).all())

    assert on_ranks(9, body, "executor") == [(2, True), *[(0, True)] * 8]


def test_host_and_gpu_do_not_mix() -> None:
    def body(group: px.Group, fake: FakeDriver) -> str:
        group.barrier()
        mine = DriverArray(np.ones(4, np.float32))
        x: Any = mine if group.rank else np.ones(4, np.float32)
        try:
            group.all_reduce(x)
        except Desync as error:
            return str(error)
        return ""

    def started(group: px.Group) -> str:
        return body(group, install())

    for text in run_ranks(2, started, backend="mesh"):
        assert "float32[4] on a GPU" in text


def test_messages_use_memory_that_the_gpu_knows() -> None:
    """Some memory is enough for many of them, and what is received is not read before."""

    def body(group: px.Group, fake: FakeDriver) -> tuple[int, int, float]:
        x = DriverArray(np.full(LONG, group.rank, np.float32))
        group.all_reduce(DriverArray(np.zeros(1, np.float32)))
        before, known = fake.reads, len(fake.registered)
        for _ in range(5):
            if group.rank == 0:
                group.send(x, 1)
            else:
                group.recv(x, 0)
        return fake.reads - before, len(fake.registered) - known, float(x.numpy()[-1])

    (sent, blocks, value), receiver = on_ranks(2, body, "executor")
    assert (sent, value, receiver) == (5, 0.0, (0, 1, 0.0))
    assert blocks <= 2  # the one before may still be on its way


def test_refusals() -> None:
    def body(group: px.Group) -> None:
        fake = install()
        x = DriverArray(np.ones(4, np.float32), stream=5)
        fake.capturing.add(5)
        with pytest.raises(UsageError, match="CUDA graph"):
            group.all_reduce(x)
        fake.capturing.clear()
        with pytest.raises(UsageError, match="out lies on the host, but x lies on a GPU"):
            group.all_gather(x, np.zeros(4, np.float32))
        with pytest.raises(UnsupportedOp):
            group.all_reduce(x, "bor")
        with pytest.raises(UsageError, match="x and out overlap"):
            group.all_to_all(DriverArray(x.numpy()[:2], at=x.address + 4), DriverArray(x.numpy()[:2], at=x.address))

    run_ranks(1, body, backend="simulated")


def test_a_stream_that_does_not_end() -> None:
    """What is waited for is named, and the call ends with its deadline."""

    def body(group: px.Group) -> str:
        fake = install()
        fake.held_streams.add(7)
        group.barrier()
        x = DriverArray(np.ones(LONG, np.float32), stream=7 if group.rank else 5)
        try:
            group.all_reduce(x, timeout=0.5)
        except px.Timeout as error:
            return str(error)
        return "no error"

    for text in run_ranks(2, body, backend="mesh"):
        assert "not done within 0.5 s" in text
