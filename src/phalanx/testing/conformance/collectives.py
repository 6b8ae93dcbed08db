"""Barrier, broadcast and all_reduce: right on every rank, in every order of coming, also asynchronously."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import Desync, PhalanxError, Timeout
from ...group import Group, Work
from ...types import Op, ReduceOp
from .check import check
from .common import SHORT, expect, is_classic, same, sync
from .messages import DTYPES
from .threads import together

OPS: dict[Op, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def ops_for(dtype: npt.DTypeLike) -> list[Op]:
    """The reductions that a dtype has."""
    kind = np.dtype(dtype).kind
    if kind in "biu":
        return list(OPS)
    return ["sum", "prod", "mean"] if kind == "c" else ["sum", "prod", "min", "max", "mean"]


def values_of(rank: int, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Small whole numbers: every order of reduction gives the same, also in 16 bits."""
    lowest, end = (0, 2) if np.dtype(dtype).kind == "b" else (1, 3)
    numbers: npt.NDArray[Any] = np.random.default_rng([rank, count]).integers(lowest, end, count)
    return numbers.astype(dtype)


def combined(op: Op, arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The result by NumPy."""
    if op == "mean":
        mean: npt.NDArray[Any] = (np.sum(arrays, axis=0) / len(arrays)).astype(arrays[0].dtype)
        return mean
    result: npt.NDArray[Any] = arrays[0].copy()
    for array in arrays[1:]:
        OPS[op](result, array, out=result)
    return result


def agree(group: Group, array: npt.NDArray[Any]) -> None:
    """All ranks hold the same bits."""
    digest = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8).copy()
    first = group.broadcast(digest.copy(), 0)
    assert np.array_equal(first, digest), f"rank {group.rank} has other bits than rank 0"


@check(ranks=4)
def barrier(backend: Any) -> None:
    """A group's barrier."""
    with Group(backend) as group:
        for late in range(4):
            if group.rank == late:
                time.sleep(0.03)
            entered = time.monotonic()
            assert group.barrier() is None
            left = time.monotonic()
            latest = group.all_reduce(np.array([entered]), "max")[0]
            assert left >= latest, "this rank left before the last had come"
        for _ in range(30):
            group.barrier()


@check(ranks=4)
def broadcast(backend: Any) -> None:
    """Broadcast from every root, of every dtype."""
    with Group(backend) as group:
        for root in range(4):
            for dtype in DTYPES:
                wanted = values_of(root, dtype, 33)
                x = wanted.copy() if group.rank == root else np.zeros(33, dtype)
                assert group.broadcast(x, root) is x
                assert same(x, wanted)
            for shape in ((0,), (), (2, 3), (70_000,), (400_001,)):
                wanted = np.full(shape, root + 0.5)
                x = wanted.copy() if group.rank == root else np.zeros(shape)
                group.broadcast(x, root)
                assert same(x, wanted)


@check(ranks=3)
def odd_arrays(backend: Any) -> None:
    """Arrays that are not contiguous or not writable."""
    with Group(backend) as group:
        base = np.zeros((6, 6))
        view = base[::2, 1::2]
        if group.rank == 1:
            view[...] = np.arange(9).reshape(3, 3)
        assert group.broadcast(view, 1) is view
        assert np.array_equal(view, np.arange(9).reshape(3, 3))
        assert base[1::2].sum() == 0
        assert base[:, ::2].sum() == 0
        assert group.all_reduce(view) is view
        assert np.array_equal(view, 3 * np.arange(9).reshape(3, 3))
        turned = np.asfortranarray(np.arange(6.0).reshape(2, 3) + group.rank)
        group.all_reduce(turned)
        assert np.array_equal(turned, 3 * np.arange(6.0).reshape(2, 3) + 3)
        frozen = np.full(3, group.rank)
        frozen.flags.writeable = False
        fresh = group.all_reduce(frozen)
        assert (fresh.tolist(), frozen.tolist()) == ([3, 3, 3], [group.rank] * 3)
        # The root's own array is what everybody gets: there nothing is to be written.
        fresh = group.broadcast(frozen, 2)
        assert fresh.tolist() == [2, 2, 2]
        assert frozen.tolist() == [group.rank] * 3
        data = bytearray([group.rank] * 4)
        assert group.broadcast(data, 2) is data
        assert data == bytearray([2] * 4)
        assert bytes(group.broadcast(bytes([group.rank] * 4), 1)) == bytes([1] * 4)
        scalar = group.all_reduce(np.float64(group.rank + 1))
        assert scalar == 6


@check(ranks=3)
def all_reduce(backend: Any) -> None:
    """All_reduce gives what NumPy gives."""
    with Group(backend) as group:
        for dtype in DTYPES:
            for op in ops_for(dtype):
                inputs = [values_of(rank, dtype, 41) for rank in range(3)]
                x = inputs[group.rank].copy()
                assert group.all_reduce(x, op) is x
                wanted = combined(op, inputs)
                assert x.dtype == wanted.dtype
                if op == "mean":
                    np.testing.assert_allclose(x, wanted, rtol=1e-2 if dtype == "float16" else 1e-6)
                else:
                    assert same(x, wanted), f"{op} of {dtype}"
        assert group.all_reduce(np.array([2.0]), ReduceOp.MAX).tolist() == [2]


@check(ranks=4)
def same_bits(backend: Any) -> None:
    """All_reduce of every size has the same bits on all ranks."""
    with Group(backend) as group:
        for count in (0, 1, 2, 3, 4, 5, 1000, 65_537, 400_003):
            inputs = [
                np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32) for rank in range(4)
            ]
            x = inputs[group.rank].copy()
            group.all_reduce(x)
            np.testing.assert_allclose(x, np.sum(inputs, axis=0, dtype=np.float64), rtol=1e-4, atol=1e-4)
            agree(group, x)
            y = inputs[group.rank].copy()
            group.all_reduce(y)
            assert same(x, y), "a second run gave other bits"


@check(ranks=3)
def means_of_float16(backend: Any) -> None:
    """A mean of large float16 is one, though their sum is not."""
    with Group(backend) as group:
        large = np.full(6, 60_000, np.float16)
        means = [group.all_reduce(large.copy(), "mean"), group.all_reduce(large.copy(), "mean", async_op=True).wait()]
        for own in (large.copy(), group.empty(6, np.float16)):
            own[:] = large
            means.append(group.reduce_scatter(own, "mean"))
            assert same(own, large)
            reduced = group.reduce(own, 1, "mean")
            assert group.rank == 1 or same(own, large)
            means.append(reduced if group.rank == 1 else large)
        for mean in means:
            np.testing.assert_allclose(mean, 60_000, rtol=2e-3)


@check(ranks=3)
def bfloat16(backend: Any) -> None:
    """Bfloat16 is reduced as bfloat16."""
    try:
        import ml_dtypes
    except ImportError:
        return
    with Group(backend) as group:
        values = np.array([1.5, -2, 0.25, 100], ml_dtypes.bfloat16)
        x = values * (group.rank + 1)
        assert group.all_reduce(x) is x
        assert x.dtype == values.dtype
        assert x.astype(float).tolist() == (values.astype(float) * 6).tolist()
        y = values.copy() if group.rank == 2 else np.zeros_like(values)
        group.broadcast(y, 2)
        assert np.array_equal(y, values)
        if group.rank == 0:
            group.send(values, 1)
        elif group.rank == 1:
            got = group.recv(src=0)
            assert got.dtype == values.dtype
            assert np.array_equal(got, values)
        group.barrier()


@check(ranks=3)
def asynchronous(backend: Any) -> None:
    """Asynchronous collectives run in the order of issue."""
    with Group(backend) as group:
        works: list[tuple[Work[Any], Any]] = []
        for number in range(60):
            x = np.array([group.rank + number, number])
            if number % 3 == 0:
                works.append((group.all_reduce(x, async_op=True), [3 + 3 * number, 3 * number]))
            elif number % 3 == 1:
                works.append((group.broadcast(x, number % 3, async_op=True), [1 + number, number]))
            else:
                barrier_work = group.barrier(async_op=True)
                assert barrier_work is not None
                works.append((barrier_work, None))
        # A synchronous one waits for its turn.
        assert group.all_reduce(np.array([1])).tolist() == [3]
        for work, wanted in works if group.rank % 2 else reversed(works):
            result = work.wait(timeout=20)
            assert work.done()
            assert (None if result is None else result.tolist()) == wanted
            assert work.result() is result
            assert work.exception() is None
        told = threading.Event()
        work = group.all_reduce(np.array([2.0]), "mean", async_op=True)
        work.add_done_callback(lambda _w: told.set())
        assert told.wait(20)
        assert work.result().tolist() == [2]

        async def awaited() -> list[Any]:
            works = [group.all_reduce(np.array([k]), async_op=True) for k in range(5)]
            return [(await work).tolist() for work in works]

        assert asyncio.run(awaited()) == [[0], [3], [6], [9], [12]]


@check(ranks=3)
def mixed(backend: Any) -> None:
    """Messages and collectives at the same time."""
    with Group(backend) as group:
        me, count = group.rank, 30

        def collect() -> None:
            for number in range(count):
                assert group.all_reduce(np.full(1000, number))[-1] == 3 * number

        def talk() -> None:
            for number in range(count):
                if me:
                    group.send(np.array([number]), 0, tag=me)
                    assert group.recv(src=0, tag=me)[0] == number + 1
                else:
                    for peer in (1, 2):
                        assert group.recv(src=peer, tag=peer)[0] == number
                        group.send(np.array([number + 1]), peer, tag=peer)

        together(collect, talk)


@check(ranks=4)
def crossing(backend: Any) -> None:
    """Collectives of sub-groups cross those of the parent."""
    with Group(backend) as group:
        me = group.rank
        sub = group.subgroup([0, 2, 3]) if me != 1 else None

        def outer() -> None:
            for number in range(15):
                assert group.all_reduce(np.array([number + me]))[0] == 4 * number + 6

        def inner() -> None:
            if sub is not None:
                for number in range(15):
                    assert sub.all_reduce(np.array([number + me]))[0] == 3 * number + 5

        together(outer, inner)
        group.barrier()
        if sub is not None:
            sub.close()


@check(ranks=2, lanes=True)
def timeout_breaks(backend: Any) -> None:
    """A collective that times out breaks the group."""
    group = Group(backend)
    if group.rank == 0:
        error = expect(Timeout, group.barrier, timeout=4 * SHORT)
        assert group.members[1] in error.missing
        assert "barrier" in str(error)
        again = expect(PhalanxError, group.barrier)
        assert isinstance(again, Timeout), "the first cause stays"
        expect(Timeout, group.send, np.zeros(1), 1)
        backend.send(b"g", 1)
    else:
        backend.recv(bytearray(1), 0)

        def twice() -> None:
            group.barrier(timeout=0.5)  # may end well: the other did call it, before it gave up
            group.barrier(timeout=0.5)

        expect(PhalanxError, twice)
    group.close()
    sync(backend)
    with Group(backend) as fresh:  # only that group is broken
        fresh.barrier()
        sync(backend)


@check(ranks=2, lanes=True)
def desync(backend: Any) -> None:
    """Different operations at the same time are Desync."""
    group = Group(backend)
    group.barrier()
    classic = is_classic(backend)
    count = 10 + group.rank
    error = expect(PhalanxError, group.all_reduce, np.zeros(count, np.float32), timeout=1 if classic else 10)
    if isinstance(error, Desync):
        assert error.mine
        assert error.theirs
    else:  # only one rank may have met the other's mark, where no directory tells the second
        assert classic, error
    expect(PhalanxError, group.barrier)
    group.close()
    sync(backend)
