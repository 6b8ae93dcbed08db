"""Arrays of ml_dtypes' bfloat16 on the fast path, and that they mean the same as by the general way."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks

pytestmark = pytest.mark.skipif(not _native.available, reason="the fast path needs the core (PHALANX_PURE is set)")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def refuse_general_way(*_: Any) -> None:
    raise AssertionError("not on the fast path")


def every_verb(group: px.Group) -> list[list[float]]:
    group.barrier()
    group._run = refuse_general_way  # type: ignore[method-assign]
    mine = np.full((2, 2), group.rank + 1, BFLOAT16)
    whole, part = np.zeros(8, BFLOAT16), np.zeros((1, 2), BFLOAT16)
    found = [
        group.all_gather(mine, whole),
        group.reduce_scatter(mine, out=part),
        group.all_reduce(mine.copy(), "mean"),
        group.broadcast(mine.copy(), src=1),
    ]
    assert all(x.dtype == BFLOAT16 for x in found)
    return [x.astype(float).reshape(-1).tolist() for x in found]


def test_every_verb() -> None:
    expected = [[1.0] * 4 + [2.0] * 4, [3.0] * 2, [1.5] * 4, [2.0] * 4]
    assert run_ranks(2, every_verb, backend="mesh") == [expected] * 2


def meets_the_general_way(group: px.Group) -> list[float]:
    group.barrier()
    x = np.ones((3, 2), BFLOAT16)
    mine = x if group.rank == 0 else np.asfortranarray(x)  # which the fast path does not take
    return np.asarray(group.all_reduce(mine)).astype(float).reshape(-1).tolist()


def test_it_meets_the_general_way() -> None:
    assert run_ranks(2, meets_the_general_way, backend="mesh") == [[2.0] * 6] * 2


def with_a_frozen_one(group: px.Group) -> tuple[list[float], str]:
    group.barrier()
    x = np.ones(2, BFLOAT16)
    x.flags.writeable = False
    try:
        return x.astype(float).tolist(), str(group.all_reduce(x))
    except px.UsageError:
        return x.astype(float).tolist(), "refused"


def test_one_that_cannot_be_written_to_stays_as_it_is() -> None:
    for frozen, outcome in run_ranks(2, with_a_frozen_one, backend="mesh"):
        assert frozen == [1.0, 1.0]
        assert outcome in ("refused", "[2 2]")
