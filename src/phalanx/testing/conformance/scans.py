"""Prefix reductions, and extremes with the rank that has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import Timeout, UnsupportedOp
from ...group import Group
from ...types import Op
from .check import check
from .collectives import combined, ops_for, values_of
from .common import SHORT, differ, expect, same, sync
from .messages import DTYPES

RANKS = 4
NEUTRAL: dict[str, list[Any]] = {
    "bool": [False, True, True, False, True, False, False],
    "int8": [0, 1, 127, -128, -1, 0, 0],
    "uint16": [0, 1, 0xFFFF, 0, 0xFFFF, 0, 0],
    "int64": [0, 1, 2**63 - 1, -(2**63), -1, 0, 0],
    "float16": [0, 1, np.inf, -np.inf],
    "float32": [0, 1, np.inf, -np.inf],
    "complex64": [0, 1],
}
"""In the order of `ops_for`; the mean has none."""


def as_wanted(found: npt.NDArray[Any], op: Op, inputs: list[npt.NDArray[Any]]) -> bool:
    """Whether it is the reduction of these. A third may be rounded in two ways."""
    wanted = combined(op, inputs)
    return same(found, wanted) or (op == "mean" and found.dtype == wanted.dtype and np.allclose(found, wanted, 1e-3))


@check(ranks=RANKS)
def scan(backend: Any) -> None:
    """Scan and exscan give what NumPy gives, of every dtype and reduction."""
    with Group(backend) as group:
        me = group.rank
        for dtype in DTYPES:
            for op in ops_for(dtype):
                inputs = [values_of(rank, dtype, 41).reshape(1, 41) for rank in range(RANKS)]
                x, y = inputs[me].copy(), inputs[me].copy()
                assert group.scan(x, op) is x, "in place"
                assert as_wanted(x, op, inputs[: me + 1]), (dtype, op)
                assert group.exscan(y, op) is y, "in place"
                assert not me or as_wanted(y, op, inputs[:me]), (dtype, op)


@check(ranks=RANKS)
def nothing_below(backend: Any) -> None:
    """Rank 0 gets the neutral element of an exscan."""
    with Group(backend) as group:
        for dtype, wanted in NEUTRAL.items():
            for op, value in zip(ops_for(dtype), wanted, strict=False):
                x = group.exscan(np.ones(3, dtype), op)
                assert group.rank or x.tolist() == [value] * 3, (dtype, op)
        mean = group.exscan(np.full(2, 5.0), "mean")
        assert np.isnan(mean).all() if group.rank == 0 else mean.tolist() == [5.0, 5.0]


@check(ranks=RANKS)
def long_and_short_scans(backend: Any) -> None:
    """Scans of nothing, of less than an element a rank, of long vectors, of scalars, and of read-only arrays."""
    with Group(backend) as group:
        me = group.rank
        for count in (0, 1, RANKS - 1, 70_001):
            x = np.arange(count, dtype=np.int64) + me
            inclusive, exclusive = group.scan(x.copy()), group.exscan(x.copy())
            wanted = sum((np.arange(count) + rank for rank in range(me)), np.zeros(count, np.int64))
            assert same(exclusive, wanted)
            assert same(inclusive, wanted + x)
        assert group.scan(np.array(2.0)).item() == 2.0 * (me + 1)
        fixed = np.full(3, me)
        fixed.flags.writeable = False
        result = group.exscan(fixed)
        assert result is not fixed
        assert fixed.tolist() == [me] * 3
        assert result.tolist() == [sum(range(me))] * 3


@check(ranks=RANKS)
def extremes(backend: Any) -> None:
    """Argmin and argmax give what NumPy gives, also with equal values and NaN; the array stays as it is."""
    with Group(backend) as group:
        me = group.rank
        rng = np.random.default_rng(7)
        for dtype in (np.bool_, np.int8, np.uint64, np.float16, np.float32, np.float64):
            stacked = rng.integers(0, 3, (RANKS, 5, 7)).astype(dtype)
            if np.dtype(dtype).kind == "f":
                stacked[rng.random(stacked.shape) < 0.1] = np.nan
            x = stacked[me].copy()
            for verb, where, what in ((group.argmin, np.argmin, np.min), (group.argmax, np.argmax, np.max)):
                values, ranks = verb(x)
                assert same(ranks, where(stacked, axis=0).astype(np.int64)), (dtype, verb)
                assert values.dtype == dtype
                assert np.array_equal(values, what(stacked, axis=0), equal_nan=np.dtype(dtype).kind == "f")
                assert same(x, stacked[me]), "it stays as it is"
        values, ranks = group.argmax(np.array(float(me)))
        assert (values.item(), ranks.item(), ranks.shape) == (RANKS - 1, RANKS - 1, ())
        expect(UnsupportedOp, group.argmin, np.zeros(2, np.complex64))


@check(ranks=RANKS)
def scans_in_the_background(backend: Any) -> None:
    """Scans and extremes run asynchronously, in the order in which they were issued."""
    with Group(backend) as group:
        works: list[Any] = []
        for step in range(5):
            works.append(group.scan(np.full(100, step), async_op=True))
            works.append(group.exscan(np.full(100, step), async_op=True))
            works.append(group.argmax(np.full(100, group.rank * step), async_op=True))
        for step in range(5):
            assert (works[3 * step].wait(timeout=30) == step * (group.rank + 1)).all()
            assert (works[3 * step + 1].wait(timeout=30) == step * group.rank).all()
            values, ranks = works[3 * step + 2].wait(timeout=30)
            assert (values == step * (RANKS - 1)).all()
            assert (ranks == (RANKS - 1 if step else 0)).all()


@check(ranks=2, lanes=True)
def scans_time_out(backend: Any) -> None:
    """A scan whose partner does not come times out."""
    with Group(backend) as group:
        group.barrier()
        if group.rank == 1:  # rank 0 may have nobody to wait for
            expect(Timeout, group.scan, np.ones(1), timeout=SHORT)
        sync(backend)


@check(ranks=2, lanes=True)
def scans_that_differ(backend: Any) -> None:
    """Ranks with another reduction, another verb or another shape find out."""
    me = backend.rank
    ops: tuple[Op, Op] = ("sum", "max")
    differ(backend, lambda group, seconds: group.scan(np.ones(3), ops[me], timeout=seconds))
    differ(backend, lambda group, seconds: (group.scan, group.exscan)[me](np.ones(3), timeout=seconds))
    differ(backend, lambda group, seconds: group.argmin(np.ones(3 + me), timeout=seconds))
    differ(backend, lambda group, seconds: (group.argmin, group.argmax)[me](np.ones(3), timeout=seconds))
