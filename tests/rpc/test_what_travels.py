"""Remote calls: which values travel, and that they are what they were when they were sent."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.rpc.support import error_of, run, until

import phalanx as px
from phalanx.errors import InvalidArgument
from phalanx.rpc import Agent


def echo(x: Any) -> Any:
    return x


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Box(msgspec.Struct):
    corner: Point
    sides: list[float]


class Pair(NamedTuple):
    left: int
    right: str


class Color(enum.Enum):
    RED = "red"


def move(point: Point, by: int) -> Point:
    assert type(point) is Point
    return Point(point.x + by, point.y)


def grow(box: Box, factor: float = 2.0) -> Box:
    assert type(box) is Box
    return Box(box.corner, [side * factor for side in box.sides])


def swap(pair: Pair, color: Color) -> list[Any]:
    assert type(pair) is Pair
    assert color is Color.RED
    return [pair.right, pair.left]


def serve_types(agent: Agent) -> None:
    for function in (echo, move, grow, swap):
        agent.register(function)
    agent.register("unlike", lambda *items: [np.asarray(item) + 1 for item in items])


def types(agent: Agent) -> None:
    assert agent.call(1, "move", Point(1), 2) == Point(3)
    assert agent.call(1, "move", point={"x": 1}, by=2) == Point(3)
    assert agent.call(1, "grow", Box(Point(1), [1.0, 2.0])) == Box(Point(1), [2.0, 4.0])
    assert agent.call(1, "swap", Pair(1, "a"), Color.RED) == ["a", 1]
    assert agent.call(1, "echo", Point(4), returns=Point) == Point(4)
    assert agent.call(1, "echo", Point(4)) == {"x": 4, "y": 0.5}
    assert agent.call_async(1, "echo", Point(4), returns=Point).result(5) == Point(4)
    assert asyncio.run(agent.acall(1, "echo", [Point(4)], returns=list[Point])) == [Point(4)]
    for wrong in (("move", Point(1), "2"), ("move", {"y": 1}, 2), ("grow", {"corner": Point(1)})):
        error = error_of(agent.call, 1, *wrong)
        assert isinstance(error, InvalidArgument), error
        assert wrong[0] in str(error)
    assert isinstance(error_of(agent.call, 1, "echo", "no point", returns=Point), px.PhalanxError)


def test_types(where: str) -> None:
    run(where, 2, serve_types, types)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


VALUES: list[Any] = [
    None,
    True,
    -(2**63),
    2**64 - 1,
    2**200,
    1.5,
    "",
    "é" * 40_000,
    "x" * (300 << 10),
    b"",
    b"b" * 100_000,
    [1, [2, [3, {"four": [5]}]]],
    {"a": 1, "b": {"c": None}},
    {1: 2, (3, 4): {5}},
    [list(range(1000))] * 30,
]
DTYPES = [
    "?",
    "i1",
    "u1",
    "<i2",
    ">i4",
    "u4",
    "i8",
    "u8",
    "f2",
    "f4",
    ">f8",
    "c8",
    "c16",
    "M8[s]",
    "m8[ms]",
    "U5",
    "S3",
]


def values(agent: Agent) -> None:
    dst = (agent.rank + 1) % agent.world_size
    for value in VALUES:
        assert same(agent.call(dst, "echo", value), value), str(value)[:50]
    for dtype in DTYPES:
        array = np.arange(6).astype(dtype).reshape(2, 3)
        for sent in (array, array[:0], array[0, 0:1], array.T, array[::-1, ::2], np.asfortranarray(array)):
            assert same(agent.call(dst, "echo", sent), sent), (dtype, sent)
    for size in (0, 1, 63, 64, 65, 16_383, 16_385, (64 << 10) - 24, 64 << 10, 1 << 20, (20 << 20) + 3):
        array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        assert same(agent.call(dst, "echo", array), array), size
        assert same(agent.call(dst, "echo", array.tobytes()), array.tobytes()), size
    arrays = [np.full(number * 37 % 5000, number, "f4") for number in range(100)]
    assert same(agent.call(dst, "unlike", *arrays), [array + 1 for array in arrays])
    nested = {"deep": [{"array": np.eye(3)}, np.float32(2.5)]}
    back = agent.call(dst, "echo", nested)
    assert same(back["deep"][0]["array"], np.eye(3))
    assert same(back["deep"][1], np.float32(2.5))
    got = agent.call(dst, "echo", np.zeros(1000))
    got += 1  # it is the caller's own, to write to


def test_values_and_arrays(where: str) -> None:
    run(where, 2, serve_types, values, everyone=True)


@pytest.mark.parametrize("kind", ["pure", "star", "classic mesh"])
def test_values_and_arrays_elsewhere(kind: str) -> None:
    run(kind, 2, serve_types, values, everyone=True)


def test_values_and_arrays_inside_tls(tls: px.TlsOptions) -> None:
    run("tcp", 2, serve_types, values, everyone=True, options=px.Options(tls=tls))


def serve_tensors(agent: Agent) -> None:
    # Both ranks at the same time: it takes seconds, and later one would wait for the other.
    pytest.importorskip("torch")
    agent.register(echo)


def tensors(agent: Agent) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        sent = torch.arange(12).reshape(3, 4).to(dtype)
        for tensor in (sent, sent.T, sent[:, ::2], sent[:0], torch.zeros((), dtype=dtype)):
            got = agent.call(1, "echo", tensor)
            assert type(got) is torch.Tensor
            assert got.dtype == dtype
            assert torch.equal(got, tensor)
    big = torch.rand(3 << 20)
    assert torch.equal(agent.call(1, "echo", {"w": big})["w"], big)


def test_tensors() -> None:
    pytest.importorskip("torch")
    run("rings", 2, serve_tensors, tensors)


def changed_afterwards(agent: Agent) -> None:
    """What was given to a call that is over is the caller's again."""
    array = np.zeros(8 << 20, np.uint8)
    for number in range(1, 6):
        array[:] = number
        agent.notify(1, "keep", array)
    array[:] = 99
    assert agent.call(1, "kept") == [[number, number] for number in range(1, 6)]


def serve_keep(agent: Agent) -> None:
    kept: list[list[int]] = []
    agent.register("keep", lambda x: (time.sleep(0.02), kept.append([int(x.min()), int(x.max())]))[1])
    agent.register("kept", lambda: (until(lambda: len(kept) >= 5, "all"), sorted(kept))[1])


def test_arrays_of_notifications_are_the_callers_again(where: str) -> None:
    run(where, 2, serve_keep, changed_afterwards)


def torn_results(agent: Agent) -> list[Any]:
    futures = [agent.call_async(1, "weights") for _ in range(6)]
    time.sleep(0.2)
    agent.call(1, "update")
    return [[int(x.min()), int(x.max())] for x in (future.result(10) for future in futures)]


def serve_weights(agent: Agent) -> None:
    weights = np.zeros(8 << 20, np.uint8)
    agent.register("weights", lambda: weights)

    def update() -> None:
        weights[:] += 1

    agent.register(update)


def test_a_result_is_what_it_was_when_the_handler_returned(processes: str) -> None:
    """A parameter server returns its weights, and changes them in the next call."""
    for low, high in run(processes, 2, serve_weights, torn_results, workers=1):
        assert low == high, "a part of the result is from before the update, and a part from after it"
