"""Objects as messages: data by a safe codec, everything else only where both sides ask for it."""

from __future__ import annotations

import datetime as dt
import fractions
from typing import Any

import numpy as np

from ...errors import Timeout, UsageError
from ...group import Group
from ...types import Received
from .check import check
from .common import SHORT, expect, pairs

DATA: list[Any] = [
    None, True, 0, -1, 1 << 80, 2.5, float("inf"), 3 + 4j, "", "text ✓", b"", b"bytes", bytearray(b"more"), [], (), {},
    [1, [2, [3, (4, {"five": {6, 7}})]]], {"a": 1, 2: "b", (3, 4): None, None: [True]}, {1, 2}, frozenset({"x"}),
    dt.datetime(2024, 2, 29, 12, 30, 1, 500, tzinfo=dt.timezone.utc), dt.date(2020, 1, 2), dt.timedelta(days=3),
]  # fmt: skip


@check(ranks=3)
def objects_arrive(backend: Any) -> None:
    """Objects arrive as equal values of the same types."""
    with Group(backend) as group:
        for a, b in pairs(backend):
            for value in DATA:
                if group.rank == a:
                    group.send_object(value, b)
                elif group.rank == b:
                    got = group.recv_object(a)
                    assert type(got) is type(value)
                    assert got == value
        group.barrier()


@check(ranks=2)
def objects_with_arrays(backend: Any) -> None:
    """Objects with arrays in them."""
    state = {
        "weights": [np.arange(100_000, dtype=np.float32), np.ones((3, 4))],
        "step": 7,
        "empty": np.zeros((0, 3)),
        "nested": {"rng": (np.arange(5), "x")},
    }
    with Group(backend) as group:
        if group.rank == 0:
            group.send_object(state, 1)
        else:
            got = group.recv_object(0)
            assert got["step"] == 7
            for mine, theirs in zip(state["weights"], got["weights"], strict=True):  # type: ignore[call-overload]
                assert np.array_equal(mine, theirs)
                assert mine.dtype == theirs.dtype
                assert theirs.flags.writeable
            assert got["empty"].shape == (0, 3)
            assert got["nested"]["rng"][0].tolist() == [0, 1, 2, 3, 4]
        group.barrier()


@check(ranks=3)
def objects_in_every_way(backend: Any) -> None:
    """Objects, tags, anyone and asynchronous."""
    with Group(backend) as group:
        if group.rank:
            group.send_object({"from": group.rank}, 0, tag=group.rank)
            work = group.send_object(["later", group.rank], 0, async_op=True)
            assert work is not None
            work.wait()
        else:
            assert group.recv_object(2, tag=2) == {"from": 2}
            assert group.recv_object(1, tag=1) == {"from": 1}
            works = [group.recv_object(async_op=True) for _ in range(2)]
            found = [work.wait() for work in works]
            assert all(isinstance(got, Received) and got.data == ["later", got.src] for got in found)
            assert {got.src for got in found} == {1, 2}
            expect(Timeout, group.recv_object, 1, timeout=SHORT)
        group.barrier()


@check(ranks=2)
def pickles(backend: Any) -> None:
    """Pickles need consent on both sides."""
    value = {"ratio": fractions.Fraction(1, 3)}
    with Group(backend) as group:
        other = 1 - group.rank
        expect(UsageError, group.send_object, value, other)
        if group.rank == 0:
            group.send_object(value, 1, allow_pickle=True)
            group.send_object(value, 1, allow_pickle=True)
            group.send_object("after", 1)
        else:
            assert group.recv_object(0, allow_pickle=True) == value
            text = str(expect(UsageError, group.recv_object, 0))
            assert "allow_pickle" in text
            assert group.recv_object(0) == "after"
        group.barrier()


@check(ranks=2)
def wrong_verb(backend: Any) -> None:
    """An object is not an array."""
    with Group(backend) as group:
        if group.rank == 0:
            group.send_object([1, 2], 1)
            group.send(np.arange(3), 1)
            group.send(np.arange(3), 1)
        else:
            assert "object" in str(expect(UsageError, group.recv, src=0))
            assert "array" in str(expect(UsageError, group.recv_object, 0))
            assert group.recv(src=0).tolist() == [0, 1, 2]
        group.barrier()
