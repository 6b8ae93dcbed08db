"""Every argument of every public call, with every odd value: refused by an error of ours, at once, and nothing breaks.

One table. It runs on a world of one, on ranks that are threads, and on processes that share a segment: there a call
goes into the core first, which must decline what it does not understand.
"""

from __future__ import annotations

import array
import ctypes
import fractions
import functools
import math
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import testing
from phalanx.backends import MeshBackend, SimulatedBackend, SubBackend, TcpBackend
from phalanx.testing import run_ranks

QUICKLY = 2.0
"""Seconds: far less than any deadline."""

NOT_ARRAYS: list[Any] = [
    None,
    3,
    2.0,
    1j,
    "abc",
    [1.0],
    {"a": 1},
    object(),
    np.array([object()]),
    np.ma.array([1.0, 2.0], mask=[False, True]),
    np.zeros(2, [("a", "f4")]),
    np.rec.array([(1.0,)], dtype=[("a", "f8")]),
    np.ones(2, np.dtype("f4").newbyteorder()),
    np.ones(2, np.longdouble),
    np.float32,
    memoryview(np.ones(2, np.longdouble)),
]
NOT_RANKS: list[Any] = [
    None,
    -1,
    7,
    2**70,
    1.0,
    math.nan,
    "0",
    b"0",
    [0],
    True,
    np.float64(0),
    np.bool_(True),
    object(),
]
NOT_SECONDS: list[Any] = ["3", b"3", -1, -0.5, math.nan, math.inf, 1e300, True, [3], 3j, object(), np.array([1.0, 2.0])]
NOT_SECONDS += [np.float32("nan"), np.float64("inf"), np.bool_(True)]
NOT_TAGS: list[Any] = [None, -1, 2**64, 1.5, "a", True, [1], object()]
NOT_OPS: list[Any] = [None, "avg", "SUM", 3, [], {}, b"sum", object(), np.ones(2)]
NOT_COUNTS: list[Any] = [5, "11", [1.0], [None], {}, [-1], object(), [[1]], [2**70], [True], np.ones(2)]
NOT_SHAPES: list[Any] = [-5, (2, -1), 1.5, (1.5,), "3", None, 2**70, (2**40, 2**40), True, [[1]], object(), np.ones(2)]
NOT_SHAPES += [(1,) * 40, {1: 2}, math.nan]
NOT_DTYPES: list[Any] = ["nonsense", object, np.longdouble, np.dtype("f4").newbyteorder(), [("a", "f4")], 7, [], "M9"]
NOT_LISTS: list[Any] = [None, 3, "ab", b"ab", object(), {0: 1, 1: 2}, {1, 2}]
NOT_OBJECTS: list[Any] = [object(), lambda: 0, {"a": [object()]}, np.array([object()])]
NOT_LISTS_OF_RANKS: list[Any] = [5, None, "01", {}, [7], [-1], [True], [[0]], [0.0], [], object(), np.ones(2), [None]]
NOT_NUMBERS: list[Any] = ["a", 1.5, [0], object(), math.nan, np.float64(1), b"1"]


def without_none(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


Call = Callable[[px.Group], Any]


def calls(size: int) -> Iterator[tuple[str, Call]]:
    """Each with one argument that is not valid."""
    x = np.ones(2 * size)
    out = {"all_gather": np.ones(2 * size * size), "reduce_scatter": np.ones(2), "all_to_all": np.ones(2 * size)}
    arrays: dict[str, Callable[[px.Group, Any, dict[str, Any]], Any]] = {
        "all_reduce": lambda g, a, k: g.all_reduce(a, **k),
        "all_reduce_many": lambda g, a, k: g.all_reduce_many([np.ones(2), a], **k),
        "reduce": lambda g, a, k: g.reduce(a, 0, **k),
        "reduce_scatter": lambda g, a, k: g.reduce_scatter(a, **k),
        "reduce_scatter, out": lambda g, a, k: g.reduce_scatter(a, "sum", out["reduce_scatter"], **k),
        "broadcast": lambda g, a, k: g.broadcast(a, 0, **k),
        "all_gather": lambda g, a, k: g.all_gather(a, **k),
        "all_gather, out": lambda g, a, k: g.all_gather(a, out["all_gather"], **k),
        "gather": lambda g, a, k: g.gather(a, 0, **k),
        "scatter": lambda g, a, k: g.scatter(a, g.rank, **k),
        "all_to_all": lambda g, a, k: g.all_to_all(a, **k),
        "all_to_all, out": lambda g, a, k: g.all_to_all(a, out["all_to_all"], **k),
        "all_to_all, counts": lambda g, a, k: g.all_to_all(a, send_counts=[2] * size, **k),
    }
    for verb, call in arrays.items():
        for value in NOT_ARRAYS:
            yield f"{verb} of {value!r}", lambda g, c=call, v=value: c(g, v, {})
        yield f"{verb} of None, async_op", lambda g, c=call: c(g, None, {"async_op": True})
        for value in NOT_SECONDS:
            yield f"{verb}, timeout={value!r}", lambda g, c=call, v=value: c(g, x, {"timeout": v})
    outs: dict[str, Callable[[px.Group, Any], Any]] = {
        "reduce_scatter": lambda g, a: g.reduce_scatter(x, "sum", a),
        "all_gather": lambda g, a: g.all_gather(x, a),
        "gather": lambda g, a: g.gather(x, g.rank, a),
        "scatter": lambda g, a: g.scatter(x, g.rank, a),
        "all_to_all": lambda g, a: g.all_to_all(x, a),
        "all_to_all, counts": lambda g, a: g.all_to_all(x, a, send_counts=[2] * size, recv_counts=[2] * size),
    }
    shared = np.broadcast_to(np.ones(1), (4,))
    shared.flags.writeable = True
    for verb, put in outs.items():
        for value in [*without_none(NOT_ARRAYS), np.ones(1, np.float32), np.ones(2 * size * size + 1), np.ones(0)]:
            yield f"{verb}, out={value!r}", lambda g, c=put, v=value: c(g, v)
    yield "all_reduce of elements in one place", lambda g: g.all_reduce(shared)
    reductions: dict[str, Callable[[px.Group, Any], Any]] = {
        "all_reduce": lambda g, op: g.all_reduce(x, op),
        "all_reduce_many": lambda g, op: g.all_reduce_many([x], op),
        "reduce": lambda g, op: g.reduce(x, 0, op),
        "reduce_scatter": lambda g, op: g.reduce_scatter(x, op, np.ones(2)),
    }
    for verb, reduce in reductions.items():
        for value in NOT_OPS:
            yield f"{verb}, op={value!r}", lambda g, c=reduce, v=value: c(g, v)
        yield f"{verb}, a mean of ints", lambda g, v=verb: getattr(g, v)(*_ints(v), op="mean")
        yield f"{verb}, a sum of dates", lambda g, v=verb: getattr(g, v)(*_ints(v, "M8[D]"), op="sum")
    roots: dict[str, Callable[[px.Group, Any], Any]] = {
        "broadcast": lambda g, r: g.broadcast(x, r),
        "reduce": lambda g, r: g.reduce(x, r),
        "gather": lambda g, r: g.gather(x, r),
        "scatter": lambda g, r: g.scatter(x, r),
        "broadcast_object": lambda g, r: g.broadcast_object(1, r),
        "gather_object": lambda g, r: g.gather_object(1, r),
        "scatter_object": lambda g, r: g.scatter_object([1] * size, r),
        "send": lambda g, r: g.send(x, r),
        "isend": lambda g, r: g.isend(x, r),
        "send_object": lambda g, r: g.send_object(1, r),
        "sendrecv, dst": lambda g, r: g.sendrecv(x, r, None, 0),
        "backend.send": lambda g, r: g.backend.send(b"x", r),
        "backend.recv": lambda g, r: g.backend.recv(bytearray(1), r),
    }
    for verb, to in roots.items():
        for value in NOT_RANKS:
            yield f"{verb}, rank {value!r}", lambda g, c=to, v=value: c(g, v)
    sources: dict[str, Callable[[px.Group, Any], Any]] = {
        "recv": lambda g, r: g.recv(x, r),
        "irecv": lambda g, r: g.irecv(None, r),
        "recv_object": lambda g, r: g.recv_object(r),
        "sendrecv, src": lambda g, r: g.sendrecv(x, _peer(g), None, r),
    }
    for verb, come in sources.items():
        for value in without_none(NOT_RANKS):
            yield f"{verb}, rank {value!r}", lambda g, c=come, v=value: c(g, v)
    messages: dict[str, Callable[[px.Group, dict[str, Any]], Any]] = {
        "send": lambda g, k: g.send(x, _peer(g), **k),
        "isend": lambda g, k: g.isend(x, _peer(g), **k),
        "recv": lambda g, k: g.recv(x, _peer(g), **k),
        "recv from anyone": lambda g, k: g.recv(**k),
        "irecv": lambda g, k: g.irecv(x, _peer(g), **k),
        "sendrecv": lambda g, k: g.sendrecv(x, _peer(g), None, _peer(g), **k),
        "send_object": lambda g, k: g.send_object(1, _peer(g), **k),
        "recv_object": lambda g, k: g.recv_object(_peer(g), **k),
    }
    for verb, say in messages.items():
        for value in NOT_TAGS:
            yield f"{verb}, tag={value!r}", lambda g, c=say, v=value: c(g, {"tag": v})
        for value in NOT_SECONDS:
            yield f"{verb}, timeout={value!r}", lambda g, c=say, v=value: c(g, {"timeout": v})
    for value in NOT_ARRAYS:
        yield f"send of {value!r}", lambda g, v=value: g.send(v, _peer(g))
        yield f"isend of {value!r}", lambda g, v=value: g.isend(v, _peer(g))
        yield f"sendrecv of {value!r}", lambda g, v=value: g.sendrecv(v, _peer(g), None, _peer(g))
        yield f"backend.send of {value!r}", lambda g, v=value: g.backend.send(_no_buffer(v), _peer(g))
    for value in without_none(NOT_ARRAYS):
        yield f"recv to {value!r}", lambda g, v=value: g.recv(v, _peer(g))
        yield f"irecv to {value!r}", lambda g, v=value: g.irecv(v, _peer(g))
        yield f"sendrecv to {value!r}", lambda g, v=value: g.sendrecv(x, _peer(g), v, _peer(g))
        yield f"backend.recv to {value!r}", lambda g, v=value: g.backend.recv(_no_buffer(v), _peer(g))
    for value in NOT_SECONDS:
        yield f"barrier, timeout={value!r}", lambda g, v=value: g.barrier(timeout=v)
        yield f"split, timeout={value!r}", lambda g, v=value: g.split(0, timeout=v)
        yield f"all_gather_object, timeout={value!r}", lambda g, v=value: g.all_gather_object(1, timeout=v)
        yield f"backend.send, timeout={value!r}", lambda g, v=value: g.backend.send(b"x", _peer(g), timeout=v)
        yield f"backend.recv, timeout={value!r}", lambda g, v=value: g.backend.recv(bytearray(1), _peer(g), timeout=v)
        yield f"backend.barrier, timeout={value!r}", lambda g, v=value: g.backend.barrier(timeout=v)
        yield f"Work.wait, timeout={value!r}", lambda g, v=value: g.barrier(async_op=True).wait(timeout=v)
    for value in [None, 3, "call", object()]:
        yield f"add_done_callback({value!r})", lambda g, v=value: g.barrier(async_op=True).add_done_callback(v)
    for value in NOT_COUNTS:
        yield f"send_counts={value!r}", lambda g, v=value: g.all_to_all(x, send_counts=_each(v, size))
        counts = functools.partial(px.Group.all_to_all, x=x, send_counts=[2] * size)
        yield f"recv_counts={value!r}", lambda g, v=value, c=counts: c(g, recv_counts=_each(v, size))
    yield "recv_counts alone", lambda g: g.all_to_all(x, recv_counts=[2] * size)
    yield "send_counts that do not add up", lambda g: g.all_to_all(x, send_counts=[3] * size)
    for value in NOT_LISTS:
        if not isinstance(value, (dict, set, str, bytes)):
            yield f"all_reduce_many of {value!r}", lambda g, v=value: g.all_reduce_many(v)
        yield f"scatter_object of {value!r}", lambda g, v=value: g.scatter_object(v, g.rank)
    yield "scatter_object of too many", lambda g: g.scatter_object([1] * (size + 1), g.rank)
    for value in NOT_OBJECTS:
        yield f"broadcast_object of {value!r}", lambda g, v=value: g.broadcast_object(v, g.rank)
        yield f"all_gather_object of {value!r}", lambda g, v=value: g.all_gather_object(v)
        yield f"gather_object of {value!r}", lambda g, v=value: g.gather_object(v, 0)
        yield f"scatter_object of {value!r}, each", lambda g, v=value: g.scatter_object([v] * size, g.rank)
        yield f"send_object of {value!r}", lambda g, v=value: g.send_object(v, _peer(g))
    for value in NOT_SHAPES:
        yield f"empty({value!r})", lambda g, v=value: g.empty(v)
    for value in NOT_DTYPES:
        yield f"empty of {value!r}", lambda g, v=value: g.empty(3, v)
    for value in NOT_LISTS_OF_RANKS:
        yield f"subgroup({value!r})", lambda g, v=value: g.subgroup(v)
        yield f"SubBackend({value!r})", lambda g, v=value: SubBackend(g.backend, v)
    for value in NOT_NUMBERS:
        yield f"split(color={value!r})", lambda g, v=value: g.split(v)
        yield f"split(key={value!r})", lambda g, v=value: g.split(0, v)
    yield "split(key=True)", lambda g: g.split(0, True)
    yield "average_gradients of an object", lambda g: px.parallel.average_gradients([object()], g)
    yield "average_gradients of masked arrays", lambda g: px.parallel.average_gradients([NOT_ARRAYS[9]], g)
    yield "DataParallel.broadcast, root", lambda g: px.parallel.DataParallel(g).broadcast([x], root=7)


def _ints(verb: str, dtype: str = "i8") -> list[Any]:
    x = np.ones(2, np.int64).astype(dtype)
    return [[x]] if verb == "all_reduce_many" else [x, 0] if verb == "reduce" else [x]


def _peer(group: px.Group) -> int:
    return (group.rank + 1) % group.world_size


def _each(value: Any, size: int) -> Any:
    """As many as there are ranks, where it is the one that is odd."""
    return value * size if isinstance(value, list) else value


def _no_buffer(value: Any) -> Any:
    """A raw message is any buffer; what is one is replaced."""
    return object() if isinstance(value, (np.ndarray, memoryview)) else value


def throw(group: px.Group) -> list[str]:
    """All of the table; what did not go as it should."""
    problems = []
    size = group.world_size
    group.all_reduce(np.ones(1))  # there is a segment, and a fast path
    verb = ""
    for name, call in calls(size):
        began = time.monotonic()
        try:
            result = call(group)
        except px.PhalanxError as error:
            if not isinstance(error, (px.UsageError, px.ConfigError)):
                problems.append(f"{name}: {error!r}")
            elif not str(error):
                problems.append(f"{name}: no words")
        except BaseException as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
        else:
            problems.append(f"{name}: returned {result!r}")
        if time.monotonic() - began > QUICKLY:
            problems.append(f"{name}: took {time.monotonic() - began:.1f} s")
        if name.partition(" ")[0] != verb:
            verb = name.partition(" ")[0]
            total = group.all_reduce(np.ones(3))
            if total.tolist() != [size] * 3:
                problems.append(f"after {name}: {total}")
    return problems


@pytest.mark.parametrize(("ranks", "backend"), [(1, "simulated"), (2, "simulated"), (2, "mesh")])
def test_odd_values_are_refused_and_nothing_is_broken(ranks: int, backend: str) -> None:
    for rank, problems in enumerate(run_ranks(ranks, throw, backend=backend, timeout=120)):
        assert not problems, f"rank {rank}: {len(problems)} problems\n" + "\n".join(problems[:40])


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda v: px.init(v), ["nothing", None, 3, [], np.ones(2)]),
        (lambda v: px.init(rank=v, world_size=2), ["0", 1.0, -1, 2, True, 2**70, [0], np.float64(0)]),
        (lambda v: px.init(rank=0, world_size=v), ["2", 1.5, -1, 0, True, [2], np.float64(2)]),
        (lambda v: px.init(rank=0, world_size=2, master=v), ["nowhere", 3, ("h",), ["h", 1], object(), ("h", "1")]),
        (lambda v: px.init(rank=0, world_size=2, token=v), [3, object(), "", b"", ["t"]]),
        (lambda v: px.init(auth=v), ["all", None, 3, np.ones(2)]),
        (lambda v: px.init(timeout=v), NOT_SECONDS),
        (lambda v: px.init(options=v), [{}, 3, "x", px.Options]),
        (lambda v: px.Group(v), [None, 3, object(), SimulatedBackend]),
        (lambda v: SimulatedBackend.create_group(v), [0, -1, "2", 1.5, None, True, [2]]),
        (lambda v: SimulatedBackend.create_group(1, timeout=v), NOT_SECONDS),
        (lambda v: TcpBackend(v, 2, "127.0.0.1:1"), NOT_RANKS),
        (lambda v: TcpBackend(0, v, "127.0.0.1:1"), [0, 1, -1, "2", 1.5, None, True]),
        (lambda v: TcpBackend(0, 2, v), [None, 3, "nowhere", ["h", 1], object()]),
        (lambda v: TcpBackend(0, 2, "127.0.0.1:1", timeout=v), NOT_SECONDS),
        (lambda v: MeshBackend(v, 2, "127.0.0.1:1"), without_none(NOT_RANKS)),
        (lambda v: MeshBackend(0, v, "127.0.0.1:1"), [0, -1, "2", 1.5, True]),
        (lambda v: MeshBackend(0, 2, v), [3, "nowhere", ["h", 1], object()]),
        (lambda v: MeshBackend(0, 2, "127.0.0.1:1", wire=v), [None, 3, "other", [], np.ones(2)]),
        (lambda v: MeshBackend(0, 2, "127.0.0.1:1", auth=v), [None, 3, "other", []]),
        (lambda v: MeshBackend(0, 2, "127.0.0.1:1", timeout=v), NOT_SECONDS),
        (lambda v: MeshBackend(0, 2, "127.0.0.1:1", options=v), [{}, 3, "x"]),
        (lambda v: testing.run_ranks(v, len), [0, -1, "2", 1.5, None, True, [2]]),
        (lambda v: testing.run_ranks(1, v), [None, 3, "f"]),
        (lambda v: testing.run_ranks(1, len, backend=v), ["nothing", None, 3, []]),
        (lambda v: testing.run_ranks(1, len, timeout=v), [0, None, *NOT_SECONDS]),
        (lambda v: testing.run_ranks(1, len, backend="mesh", may_die=v), [[1], 3, ["a"], [True]]),
        (lambda v: testing.run_ranks(1, len, backend="mesh", options=v), [{}, 3]),
    ],
)
def test_odd_values_never_make_a_world(call: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        with pytest.raises((px.UsageError, px.ConfigError)) as caught:
            call(value)
        assert not isinstance(caught.value, testing.RankFailed), value


FIELDS = {
    "heartbeat": NOT_SECONDS,
    "max_message": [0, -1, 1.5, "9", True, None, [1], np.float64(5), np.ones(2)],
    "port_range": [3, "1-2", (1,), (2, 1), (0, 5), (1.0, 2), (True, 2), np.array([1, 2]), {}],
    "transport": [None, 3, "ring", [], np.ones(2), np.array(["auto"])],
    "interface": [3, "", "a b", [], np.ones(2)],
    "algorithm": [3, "rings", [], {}, np.ones(2)],
    "mpi_check": [None, 1, "1", np.bool_(True), []],
    "tls": [3, "x", {}, []],
}


@pytest.mark.parametrize("field", FIELDS)
def test_odd_options_are_refused(field: str) -> None:
    for value in FIELDS[field]:
        with pytest.raises(px.ConfigError, match=field):
            px.Options(**{field: value})


def test_numbers_of_any_library_are_options() -> None:
    made = px.Options(heartbeat=np.float32(0.5), max_message=np.int64(4096), port_range=(np.int16(5), np.uint8(9)))
    assert made == px.Options(heartbeat=0.5, max_message=4096, port_range=(5, 9))
    assert [type(n) for n in (made.heartbeat, made.max_message, *made.port_range)] == [float, int, int, int]


# -- what has `__index__` is an integer ------------------------------------------------------------------------------


class Seven:
    """An integer of a library that nobody has heard of."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def integers(group: px.Group, kind: Callable[[int], Any]) -> list[Any]:
    me, peer = group.rank, 1 - group.rank
    found: list[Any] = [group.broadcast(np.full(2, me), kind(1))[0], group.reduce(np.ones(2), kind(0))[0]]
    gathered = group.gather(np.full(1, me), kind(1))
    found += [None if gathered is None else gathered.tolist(), group.scatter(np.arange(2), kind(0)).tolist()]
    found += [
        group.broadcast_object(me, kind(1)),
        group.scatter_object([5, 6], kind(0)),
        group.gather_object(me, kind(0)),
    ]
    found.append(group.sendrecv(np.full(1, me), kind(peer), None, kind(peer), tag=kind(3)).tolist())
    group.send(np.full(1, me), kind(peer), tag=kind(4))
    found.append(group.recv(None, kind(peer), tag=kind(4)).tolist())
    group.send_object(me, kind(peer))
    found.append(group.recv_object(kind(peer)))
    exchanged = group.all_to_all(np.arange(2), send_counts=[kind(1), kind(1)], recv_counts=[kind(1), kind(1)])
    found += [exchanged.tolist(), group.empty(kind(3)).shape, group.empty((kind(2), kind(3))).shape]
    found.append(group.split(kind(0), kind(1 - me)).members)  # type: ignore[union-attr]
    group.backend.send(bytes([me]), kind(peer))
    group.backend.recv(raw := bytearray(1), kind(peer))
    found.append(raw[0])
    # Beside plain integers on the other rank: the same group.
    ranks: Any = [kind(0), kind(1)] if me == 0 else [0, 1]
    found.append(group.subgroup(ranks).all_reduce(np.ones(1), timeout=5)[0])
    ranks = np.array([0, 1]) if me == 0 else range(2)
    found.append(group.subgroup(ranks).all_reduce(np.ones(1), timeout=np.float32(5))[0])
    return found


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, Seven], ids=lambda kind: kind.__name__)
def test_anything_with_index_is_an_integer(backend: str, kind: Callable[[int], Any]) -> None:
    zero, one = run_ranks(2, integers, kind, backend=backend, timeout=40)
    assert zero == [1, 2, None, [0], 1, 5, [0, 1], [1], [1], 1, [0, 0], (3,), (2, 3), (1, 0), 1, 2, 2]
    assert one == [1, 1, [0, 1], [1], 1, 6, None, [0], [0], 0, [1, 1], (3,), (2, 3), (1, 0), 0, 2, 2]


@pytest.mark.parametrize("seconds", [2, 2.0, np.float32(2), np.int64(2), fractions.Fraction(2), np.array(2.0)])
def test_any_number_is_a_timeout(seconds: Any) -> None:
    with px.init(rank=0, world_size=1, timeout=seconds) as world:
        assert type(world.timeout) is float
        world.barrier(timeout=seconds)
        assert world.all_reduce(np.ones(1), timeout=seconds).tolist() == [1]
        world.barrier(async_op=True).wait(timeout=seconds)


def test_a_condition_is_a_color() -> None:
    def split(group: px.Group) -> tuple[Any, Any]:
        halves = [group.split(color) for color in (group.rank < 2, np.array(group.rank) < 2)]
        return tuple(half.members for half in halves if half is not None)

    assert run_ranks(3, split) == [((0, 1), (0, 1))] * 2 + [((2,), (2,))]


# -- what has a buffer or DLPack is an array -------------------------------------------------------------------------


class Packed:
    """An array of a library that nobody has heard of: it speaks DLPack and nothing else."""

    def __init__(self, device: int = 1) -> None:
        self.values = np.arange(3.0)
        self.device = device

    def __dlpack__(self, **words: Any) -> Any:
        return self.values.__dlpack__(**words)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class OnGpu:
    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012  # what CuPy's arrays have


def memory(size: int) -> mmap.mmap:
    made = mmap.mmap(-1, size)
    made[:] = bytes(range(size))
    return made


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: array.array("d", [0, 1, 2]), list),
        (lambda: (ctypes.c_float * 3)(0, 1, 2), list),
        (lambda: memory(3), bytes),
        (lambda: bytearray([0, 1, 2]), list),
        (lambda: memoryview(array.array("i", [0, 1, 2])), list),
        (lambda: np.arange(3.0).view(np.matrix), lambda x: np.asarray(x).reshape(-1).tolist()),
        (lambda: np.arange(6)[::2] // 2, list),
        (lambda: np.arange(2, -1, -1)[::-1], list),
        (lambda: np.asfortranarray(np.arange(3.0).reshape(3, 1)), lambda x: x.reshape(-1).tolist()),
        (lambda: np.arange(3.0).view(type("Mine", (np.ndarray,), {})), list),
    ],
)
def test_a_writable_buffer_is_an_array(make: Callable[[], Any], read: Callable[[Any], list[Any]]) -> None:
    def add(group: px.Group) -> tuple[bool, list[float]]:
        x = make()
        total = group.all_reduce(x)
        return total is x, [float(value) for value in read(x)]

    assert run_ranks(2, add) == [(True, [0.0, 2.0, 4.0])] * 2


def test_arrays_that_cannot_be_written_to_are_left_alone() -> None:
    def add(group: px.Group) -> list[Any]:
        frozen = np.arange(3.0).view(np.matrix)
        frozen.flags.writeable = False
        matrix = group.all_reduce(frozen)
        scalar = group.all_reduce(np.float32(2))
        spread = group.all_reduce(np.broadcast_to(np.float32(1), (3,)))
        found = [type(matrix).__name__, matrix.tolist(), frozen.tolist(), type(scalar).__name__, float(scalar)]
        return [*found, spread.tolist(), group.all_reduce(b"\1\2"), group.all_reduce(np.array(2.0)).tolist()]

    expected = ["matrix", [[0.0, 2.0, 4.0]], [[0.0, 1.0, 2.0]], "float32", 4.0, [2.0] * 3, b"\2\4", 4.0]
    assert run_ranks(2, add) == [expected] * 2


def test_dlpack_is_an_array_and_a_device_is_refused() -> None:
    def add(group: px.Group) -> list[Any]:
        gathered = group.all_gather(Packed())
        found = [gathered.tolist()]
        with pytest.raises(px.UnsupportedArray, match="copy it to the CPU"):
            group.all_reduce(Packed(device=2))
        with pytest.raises(px.UnsupportedArray, match="cannot be read by the CUDA array interface"):
            group.all_reduce(OnGpu())
        return found

    assert run_ranks(2, add) == [[[0.0, 1.0, 2.0] * 2]] * 2


def test_a_rank_that_is_alone_waits_for_itself_or_for_nobody() -> None:
    with px.Group(SimulatedBackend.create_group(1)[0]) as alone:
        with pytest.raises(px.Timeout, match="rank 0 is this rank: it has not sent itself such a message"):
            alone.recv(src=0, timeout=0.1)
        with pytest.raises(px.Timeout, match="waiting for: nobody, because this rank is alone in its group"):
            alone.recv(timeout=0.1)
