"""`sendrecv` of short arrays takes the fast path, and refuses what it cannot receive before it sends anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.errors import PhalanxError, SizeMismatch
from phalanx.testing import run_ranks

WAYS = pytest.mark.parametrize("env", [{}, {"PHALANX_TRANSPORT": "tcp"}], ids=["memory", "tcp"])


def meet(group: px.Group) -> int:
    """Waits until messages go the fast way; the other rank."""
    other = 1 - group.rank
    for _ in range(20):
        group.sendrecv(np.ones(1), other, np.ones(1), other)
    return other


@WAYS
def test_short_arrays_take_the_fast_path(env: dict[str, str]) -> None:
    def body(group: px.Group) -> None:
        other = meet(group)

        def general(*args: Any) -> Any:
            raise AssertionError("by the general way")

        before = group._messages.post
        group._messages.post = general  # type: ignore[method-assign]
        for count in (0, 1, 2048):
            x, out = np.full(count, group.rank, np.int64), np.full(count, -1)
            assert group.sendrecv(x, other, out, other, tag=3) is out
            assert out.tolist() == [other] * count
        group._messages.post = before  # type: ignore[method-assign]
        same = np.full(8, group.rank)
        assert group.sendrecv(same, other, same, other).tolist() == [other] * 8

    run_ranks(2, body, backend="mesh", env=env)


@WAYS
def test_order_and_mismatches(env: dict[str, str]) -> None:
    def body(group: px.Group) -> None:
        other = meet(group)
        group.isend(np.array([1]), other).wait()
        first = group.irecv(np.empty(1, np.int64), other)
        out = np.empty(1, np.int64)
        group.sendrecv(np.array([2]), other, out, other)  # after what was posted before
        assert (first.wait().tolist(), out.tolist()) == ([1], [2])
        for bad in (np.empty((4, 4)).T[:2], np.array([None])):
            with pytest.raises(PhalanxError):
                group.sendrecv(np.array([9]), other, bad, other)
        with pytest.raises(PhalanxError):
            group.sendrecv(np.array([9]), other, out, 7)
        group.sendrecv(np.array([3]), other, out, other)
        assert out.tolist() == [3]  # nothing of those was sent
        with pytest.raises(SizeMismatch):
            group.sendrecv(np.ones(3), other, np.empty(2), other)

    run_ranks(2, body, backend="mesh", env=env)
