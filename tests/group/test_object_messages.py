"""Messages of objects: short ones go through a ring in one call of the core, and all arrive alike."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks

MESH = {"backend": "mesh"}
LONGEST = 4 << 10
"""Bytes of structure up to which the core takes an object."""


@dataclasses.dataclass
class Config:
    depth: int
    name: str


class Odd:
    """Of no type that can be sent without a pickle."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    def __hash__(self) -> int:
        return 1


def objects(count: int, seed: int) -> list[Any]:
    """Of all kinds and lengths, those around the longest for the core among them."""
    chosen = random.Random(seed)
    made: list[Any] = []
    for number in range(count):
        kind = chosen.randrange(5)
        if kind == 0:
            made.append({"number": number, "loss": chosen.random(), "tags": ["a", None, True]})
        elif kind == 1:
            made.append(b"x" * (LONGEST + chosen.randrange(-8, 8)))
        elif kind == 2:
            made.append(np.arange(chosen.randrange(2000), dtype=np.float32))
        elif kind == 3:
            made.append("y" * chosen.randrange(100_000))
        else:
            made.append((number, {1, 2}, 2**70))
    return made


def alike(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def to_and_fro(group: px.Group, count: int) -> bool:
    mine, other = objects(count, group.rank), objects(count, 1 - group.rank)
    for number, (given, expected) in enumerate(zip(mine, other, strict=True)):
        if number % 2 == group.rank:
            group.send_object(given, 1 - group.rank, tag=number % 3)
            got = group.recv_object(1 - group.rank, tag=number % 3)
        else:
            got = group.recv_object(1 - group.rank, tag=number % 3)
            group.send_object(given, 1 - group.rank, tag=number % 3)
        if not alike(got, expected):
            return False
    return True


def test_all_kinds_and_lengths_arrive() -> None:
    assert run_ranks(2, to_and_fro, 120, **MESH) == [True, True]


def out_of_order(group: px.Group) -> list[Any]:
    if group.rank == 0:
        group.send_object("first", 1, tag=1)
        group.send(np.arange(3.0), 1, tag=2)
        group.send_object("second", 1, tag=3)
        group.send_object("of any", 1)
        return []
    return [
        group.recv_object(0, tag=3),
        group.recv(src=0, tag=2).tolist(),
        group.recv_object(0, tag=1),
        group.recv_object(None),
    ]


def test_each_receive_gets_the_object_of_its_tag() -> None:
    assert run_ranks(2, out_of_order, **MESH)[1] == [
        "second",
        [0.0, 1.0, 2.0],
        "first",
        px.types.Received("of any", 0, 0),
    ]


def refused(group: px.Group) -> list[str]:
    if group.rank == 0:
        group.send_object(Odd(), 1, allow_pickle=True)
        group.send_object(Config(3, "x"), 1)
        group.send_object({"depth": "deep"}, 1)
        group.send_object(Config(4, "y"), 1)
        group.send_object(np.arange(2), 1)
        group.send_object("the end", 1)
        return []
    said = []
    for type_ in (None, None, Config):
        with pytest.raises(px.UsageError) as failed:
            group.recv_object(0, type=type_)
        said.append(str(failed.value))
    assert group.recv_object(0, type=Config) == Config(4, "y")
    with pytest.raises(px.UsageError):
        group.recv(np.empty(2, np.int64), 0)
    said.append(group.recv_object(0))
    return said


def test_an_object_that_is_refused_is_taken_and_the_next_one_comes() -> None:
    said = run_ranks(2, refused, **MESH)[1]
    assert "allow_pickle=True" in said[0]
    assert "type=Config" in said[1]
    assert "depth" in said[2]
    assert said[3] == "the end"


def shared(group: px.Group, count: int) -> list[int]:
    if group.rank == 0:
        for number in range(2 * count):
            group.send_object(number, 1)
        return []
    got: list[int] = []

    def take() -> None:
        for _ in range(count):
            got.append(group.recv_object(0))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_two_threads_that_receive_from_one_rank_get_each_object_once() -> None:
    assert sorted(run_ranks(2, shared, 300, **MESH)[1]) == list(range(600))


def refuse_general_way(*_: Any) -> None:
    raise AssertionError("not on the fast path")


def by_the_core(group: px.Group) -> bool:
    assert to_and_fro(group, 40)  # the first ones go before the rings are there
    fast: Any = group._fast_messages
    group.barrier()
    group._send = group._receive = refuse_general_way  # type: ignore[method-assign, assignment]
    if group.rank == 0:
        group.send_object({"short": 1}, 1)
        group.send_object("another", 1)
        group.barrier()
        return not fast.send_object(b"x" * (LONGEST + 1), 1, 0, 1.0)
    group.barrier()  # they have come: a wait that lasts goes on the general way
    head, place = fast.next_object(0, 0, 1.0)
    assert fast.next_object(0, 0, 1.0) == (head, place)
    assert fast.next_object(0, 7, 1.0) is None
    assert not fast.take_object(0, 0, len(head), place + 1)
    return bool(group.recv_object(0) == {"short": 1} and group.recv_object(0) == "another")


@pytest.mark.skipif(not _native.available, reason="without the core there are no rings")
def test_the_core_takes_short_objects() -> None:
    assert run_ranks(2, by_the_core, **MESH) == [True, True]
