"""Any collective, dtype, shape, root and counts, against NumPy's answer, with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.collectives.workers import Workers

import phalanx as px
from phalanx.testing import open_world

DTYPES = [
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
]
REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}
SIZES = [1, 2, 3, 5]
Array = np.ndarray[Any, np.dtype[Any]]


KINDS = ("simulated", "tcp", "segment", "network", "hosts")
"""The last three are the mesh: in shared memory, over TCP only, and both, as on two hosts."""


@pytest.fixture(scope="module", params=[(kind, n) for kind in KINDS for n in SIZES])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    kind, size = request.param
    if kind == "tcp" and size == 1:
        size = 4  # a star has at least two ranks
    with open_world(size, kind if kind in ("simulated", "tcp") else "mesh") as backends:
        for backend in backends:
            if kind in ("network", "hosts"):
                hosts = [str(rank * 2 // size) if kind == "hosts" else "" for rank in range(size)]
                backend.memory_ids = tuple(hosts)
        groups = [px.Group(backend) for backend in backends]
        yield Workers(groups)
        for group in groups:
            group.close()


common = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))


def make(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    values = rng.integers(0, 2 if dtype is np.bool_ else 4, shape)
    return np.asarray(values).astype(dtype)


def same_bits(results: list[Any]) -> bool:
    return len({np.asarray(result).tobytes() for result in results}) == 1


def layout(x: Array, how: str) -> Array:
    """The same values in another memory layout."""
    if how == "strided" and x.ndim:
        wide = np.zeros((2 * x.shape[0], *x.shape[1:]), x.dtype)
        wide[::2] = x
        return wide[::2]
    return np.array(x, order="F" if how == "fortran" else "C")


def exactly(inputs: list[Array], name: str, dtype: Any) -> Array:
    """NumPy's answer. The values are small whole numbers, so every dtype has it exactly, or wraps as NumPy does."""
    wide = np.stack(inputs).astype(np.complex128 if np.dtype(dtype).kind == "c" else np.int64)
    return np.asarray(REDUCTIONS[name](wide, axis=0)).astype(dtype)


case = {
    "seed": st.integers(0, 2**32 - 1),
    "dtype": st.sampled_from(DTYPES),
    "shape": shapes(),
    "how": st.sampled_from(["plain", "strided", "fortran"]),
}


@common
@given(**case, name=st.sampled_from(sorted(REDUCTIONS)), data=st.data())
def test_reductions(
    workers: Workers, seed: int, dtype: Any, shape: Any, how: str, name: str, data: st.DataObject
) -> None:
    if name not in ("sum", "prod") and np.dtype(dtype).kind == "c":
        name = "sum"
    rng = np.random.default_rng(seed)
    inputs = [make(rng, shape, dtype) for _ in range(workers.size)]
    wanted = exactly(inputs, name, dtype)
    root = data.draw(st.integers(0, workers.size - 1))

    def body(group: px.Group) -> Any:
        mine = layout(inputs[group.rank], how)
        everywhere = group.all_reduce(mine, op=name)
        assert everywhere is mine
        other = layout(inputs[group.rank], how)
        reduced = group.reduce(other, root, op=name)
        assert reduced is other
        if group.rank != root:
            assert (other == inputs[group.rank]).all()
        return everywhere, reduced

    results = workers.run(body)
    assert same_bits([result for result, _ in results])
    np.testing.assert_array_equal(results[0][0], wanted)
    np.testing.assert_array_equal(results[root][1], wanted)


@common
@given(**case, data=st.data())
def test_moves(workers: Workers, seed: int, dtype: Any, shape: Any, how: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    n = workers.size
    inputs = [make(rng, shape, dtype) for _ in range(n)]
    long = [make(rng, (n * 2, *shape), dtype) for _ in range(n)]
    stacked = np.concatenate([x.reshape(1) if not x.ndim else x for x in inputs])
    root = data.draw(st.integers(0, n - 1))

    def body(group: px.Group) -> Any:
        rank = group.rank
        gathered = group.gather(layout(inputs[rank], how), root)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, stacked)
        part = group.scatter(layout(long[root], how) if rank == root else None, root)
        np.testing.assert_array_equal(part, long[root][2 * rank : 2 * rank + 2])
        copied = group.broadcast(layout(inputs[rank], how), root)
        np.testing.assert_array_equal(copied, inputs[root])
        np.testing.assert_array_equal(group.all_gather(layout(inputs[rank], how)), stacked)
        turned = group.all_to_all(layout(long[rank], how))
        np.testing.assert_array_equal(turned, np.concatenate([x[2 * rank : 2 * rank + 2] for x in long]))
        if dtype is not np.bool_:
            total = group.reduce_scatter(layout(long[rank], how), op="sum")
            with np.errstate(all="ignore"):
                wanted = np.sum([x[2 * rank : 2 * rank + 2] for x in long], axis=0, dtype=dtype)
            np.testing.assert_array_equal(total, wanted)

    workers.run(body)


LONG = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
BFLOAT16 = ml_dtypes.bfloat16


@LONG
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([*DTYPES, BFLOAT16]),
    count=st.sampled_from([1000, 4096, 16_385, 70_001, 300_000]),
    name=st.sampled_from(["sum", "max", "mean"]),
)
def test_long_arrays_also_in_shared_memory(workers: Workers, seed: int, dtype: Any, count: int, name: str) -> None:
    kind = "f" if dtype is BFLOAT16 else np.dtype(dtype).kind
    name = "sum" if (kind == "c" and name == "max") or (kind not in "fc" and name == "mean") else name
    rng = np.random.default_rng(seed)
    n = workers.size
    inputs = [make(rng, (n, count), dtype) for _ in range(n)]
    wide = np.stack([x.astype(np.complex128 if kind == "c" else np.float64) for x in inputs])
    wanted = {"sum": np.sum, "max": np.max, "mean": np.mean}[name](wide, axis=0)
    wanted = wanted != 0 if kind == "b" else wanted
    shared = rng.integers(0, 2, n)  # who has its array in the segment, if there is one

    workers.run(lambda group: group.barrier())  # now there is a segment where there can be one

    def body(group: px.Group) -> Any:
        rank = group.rank
        mine = group.empty((n, count), dtype) if shared[rank] else np.empty((n, count), dtype)
        mine[:] = inputs[rank]
        part = group.reduce_scatter(mine, op=name)
        everything = group.all_gather(part)
        turned = group.all_to_all(mine)
        np.testing.assert_array_equal(turned, np.stack([x[rank] for x in inputs]))
        copied = group.broadcast(mine.copy(), n - 1)
        np.testing.assert_array_equal(copied, inputs[n - 1])
        result = group.all_reduce(mine, op=name)
        assert result is mine
        # Means and halves are rounded, in another order on another path; everything else is exact.
        return np.array(result), np.array(everything).reshape(n, count)

    results = workers.run(body)
    assert same_bits([result for result, _ in results])
    assert same_bits([everything for _, everything in results])
    digits = {"rtol": 0.02} if dtype in (BFLOAT16, np.float16) else {"rtol": 1e-6}
    for result in results[0]:
        np.testing.assert_allclose(result.astype(wide.dtype), wanted.astype(wide.dtype), **digits)


@common
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES), width=st.integers(0, 3), tell=st.booleans())
def test_uneven_all_to_all(workers: Workers, seed: int, dtype: Any, width: int, tell: bool) -> None:
    rng = np.random.default_rng(seed)
    n = workers.size
    counts = rng.integers(0, 4, (n, n))
    inputs = [make(rng, (int(counts[rank].sum()), width), dtype) for rank in range(n)]

    def body(group: px.Group) -> Any:
        rank = group.rank
        expected = counts[:, rank].tolist() if tell else None
        return group.all_to_all(inputs[rank], send_counts=counts[rank].tolist(), recv_counts=expected)

    for rank, result in enumerate(workers.run(body)):
        starts = np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1)
        rows = [inputs[i][starts[i, rank] : starts[i, rank + 1]] for i in range(n)]
        np.testing.assert_array_equal(result, np.concatenate(rows))


@common
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([*DTYPES, BFLOAT16]),
    shape=shapes(),
    how=st.sampled_from(["plain", "strided", "fortran"]),
    name=st.sampled_from(["sum", "prod", "min", "max"]),
)
def test_scans(workers: Workers, seed: int, dtype: Any, shape: Any, how: str, name: str) -> None:
    name = "sum" if np.dtype(dtype).kind == "c" else name
    check_scans(workers, seed, dtype, shape, how, name)


@LONG
@given(dtype=st.sampled_from([np.float64, np.int16, BFLOAT16]), count=st.sampled_from([1000, 300_001]))
def test_long_scans(workers: Workers, dtype: Any, count: int) -> None:
    check_scans(workers, 7, dtype, (count,), "plain", "max")


def check_scans(workers: Workers, seed: int, dtype: Any, shape: Any, how: str, name: str) -> None:
    rng = np.random.default_rng(seed)
    inputs = [make(rng, shape, dtype) for _ in range(workers.size)]

    def body(group: px.Group) -> Any:
        inclusive, exclusive = layout(inputs[group.rank], how), layout(inputs[group.rank], how)
        assert group.scan(inclusive, op=name) is inclusive
        assert group.exscan(exclusive, op=name) is exclusive
        return inclusive, exclusive

    results = workers.run(body)
    for rank, (inclusive, exclusive) in enumerate(results):
        np.testing.assert_array_equal(inclusive, exactly(inputs[: rank + 1], name, dtype))
        if rank:
            np.testing.assert_array_equal(exclusive, exactly(inputs[:rank], name, dtype))
        elif name in ("sum", "prod"):
            np.testing.assert_array_equal(exclusive, np.full(shape, name == "prod", dtype))


@common
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([*DTYPES[:-2], BFLOAT16]), shape=shapes())
def test_extremes(workers: Workers, seed: int, dtype: Any, shape: Any) -> None:
    rng = np.random.default_rng(seed)
    stacked = np.stack([make(rng, shape, dtype) for _ in range(workers.size)])
    if np.dtype(dtype).kind == "f" or dtype is BFLOAT16:
        stacked[rng.random(stacked.shape) < 0.2] = np.nan
    wide = stacked.astype(np.float64)

    def body(group: px.Group) -> Any:
        mine = stacked[group.rank].copy()
        found = group.argmin(mine), group.argmax(mine)
        assert mine.tobytes() == stacked[group.rank].tobytes()
        return found

    results = workers.run(body)
    for index, (where, what) in enumerate([(np.argmin, np.min), (np.argmax, np.max)]):
        for values, ranks in (result[index] for result in results):
            assert values.dtype == dtype
            np.testing.assert_array_equal(ranks, where(wide, axis=0))
            np.testing.assert_array_equal(values.astype(np.float64), what(wide, axis=0))


@common
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(0, 3),
    tell=st.booleans(),
    data=st.data(),
)
def test_uneven_gathers(workers: Workers, seed: int, dtype: Any, width: int, tell: bool, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    n = workers.size
    root = data.draw(st.integers(0, n - 1))
    lengths = rng.integers(0, 5, n).tolist()
    inputs = [make(rng, (length, width), dtype) for length in lengths]
    everything = np.concatenate(inputs)
    counts: Any = lengths if tell else "auto"

    def body(group: px.Group) -> Any:
        rank = group.rank
        np.testing.assert_array_equal(group.all_gather(inputs[rank], counts=counts), everything)
        gathered = group.gather(inputs[rank], root, counts=counts)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, everything)
        mine = everything if rank == root else None
        part = group.scatter(mine, root, counts=lengths if rank == root else counts)
        np.testing.assert_array_equal(part, inputs[rank])
        np.testing.assert_array_equal(group.scatter(mine, root, counts="auto"), np.array_split(everything, n)[rank])

    workers.run(body)


@common
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_many_at_once_complete_in_any_order(workers: Workers, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    n, number = workers.size, 8
    inputs = rng.integers(0, 100, (number, n, 5))
    orders = [data.draw(st.permutations(range(number))) for _ in range(n)]

    def body(group: px.Group) -> None:
        works = [group.all_reduce(inputs[k, group.rank].copy(), async_op=True) for k in range(number)]
        for k in orders[group.rank]:
            np.testing.assert_array_equal(works[k].wait(), inputs[k].sum(axis=0))

    workers.run(body)


@common
@given(seed=st.integers(0, 2**32 - 1), root=st.integers(0, 4))
def test_many_arrays_and_objects(workers: Workers, seed: int, root: int) -> None:
    root %= workers.size
    rng = np.random.default_rng(seed)
    n = workers.size
    floats = rng.integers(0, 9, (n, 4)).astype(np.float32)
    whole = rng.integers(0, 9, (n, 2, 3))
    objects = [{"rank": rank, "array": floats[rank], "tuple": (rank, None, "x" * rank)} for rank in range(n)]

    def body(group: px.Group) -> None:
        rank = group.rank
        a, b, c = group.all_reduce_many([floats[rank].copy(), whole[rank].copy(), floats[rank, :1].copy()])
        np.testing.assert_array_equal(a, floats.sum(axis=0))
        np.testing.assert_array_equal(b, whole.sum(axis=0))
        np.testing.assert_array_equal(c, floats[:, :1].sum(axis=0))
        seen = [
            *group.all_gather_object(objects[rank]),
            *(group.gather_object(objects[rank], root) or objects),
            group.broadcast_object(objects[root] if rank == root else None, root),
            group.scatter_object(objects if rank == root else None, root),
        ]
        for found, wanted in zip(seen, [*objects, *objects, objects[root], objects[rank]], strict=True):
            np.testing.assert_equal(found, wanted)

    workers.run(body)


def test_what_does_not_fit_is_refused_and_the_group_goes_on(workers: Workers) -> None:
    def body(group: px.Group) -> None:
        n = group.world_size
        refusals: list[Callable[[], Any]] = [
            lambda: group.all_gather(np.zeros(2), out=np.zeros(2 * n + 1)),
            lambda: group.all_gather(np.zeros(2), out=np.zeros(2 * n, np.float32)),
            lambda: group.reduce_scatter(np.zeros(())),
            lambda: group.all_to_all(np.zeros((1, n)), send_counts=[1] * (n + 1)),
            lambda: group.all_to_all(np.zeros(n), recv_counts=[1] * n),
            lambda: group.all_to_all(np.zeros(n), send_counts=[1] * n, recv_counts=[2] * n),
            lambda: group.all_reduce(np.zeros(1), op="median"),
            lambda: group.all_reduce(np.zeros(1), op="bxor"),
            lambda: group.all_reduce(np.zeros(1, np.int32), op="mean"),
            lambda: group.all_reduce(np.array([object()])),
            lambda: group.all_reduce([1, 2]),
            lambda: group.broadcast_object(object(), group.rank),
        ]
        for refused in refusals:
            with pytest.raises(px.UsageError):
                refused()
        for rank in (-1, n):
            with pytest.raises(px.InvalidRank):
                group.broadcast(np.zeros(1), rank)
        with pytest.raises(px.UsageError, match="cannot be cut"):
            group.scatter(np.zeros(n + 1) if n > 1 else np.zeros(()), group.rank)
        group.barrier()

    workers.run(body)


def test_an_out_that_does_not_fit_what_the_root_scatters(workers: Workers) -> None:
    def body(group: px.Group) -> None:
        whole = np.arange(2 * group.world_size)
        if group.rank == 0:
            group.scatter(whole, 0)
        else:
            with pytest.raises(px.UsageError, match="rank 0 scattered"):
                group.scatter(None, 0, out=np.zeros(3))
        np.testing.assert_array_equal(group.scatter(whole if group.rank == 0 else None, 0)[0], 2 * group.rank)

    workers.run(body)
