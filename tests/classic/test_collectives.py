"""Groups of Phalanx in one world with ferrotorch's ranks: the collectives of the specification, in every role."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.classic import plain_collectives as plain
from tests.classic.plain_rank import mesh as plain_mesh
from tests.classic.together import Seat, free_place, patience, seats, side_by_side

import phalanx as px

Array = npt.NDArray[Any]
SEATINGS = [("phalanx", "plain", "phalanx"), ("plain", "phalanx", "plain"), ("phalanx", "plain")]
DTYPES = [np.float32, np.float64]


def name(kinds: tuple[str, ...]) -> str:
    return "-".join(kinds)


def numbers(rank: int, count: int, dtype: npt.DTypeLike) -> Array:
    return np.random.default_rng(rank).standard_normal(count).astype(dtype)


def play(world: list[Seat], part: Callable[[Any, int], Any]) -> list[Any]:
    """Runs `part(group or plain rank, rank)` on all ranks at once."""
    groups = {seat.rank: px.Group(seat.phalanx) for seat in world if isinstance(seat.inner, px.backends.Backend)}
    try:
        return side_by_side(*(lambda seat=seat: part(groups.get(seat.rank, seat.inner), seat.rank) for seat in world))
    finally:
        for group in groups.values():
            group.close()


@pytest.mark.parametrize("kinds", SEATINGS, ids=name)
@pytest.mark.parametrize("topology", ["star", "mesh"])
def test_through_rank_0(topology: str, kinds: tuple[str, ...]) -> None:
    size = len(kinds)

    def part(me: Any, rank: int) -> dict[str, Array]:
        found: dict[str, Array] = {}
        ours = isinstance(me, px.Group)
        for dtype in DTYPES:
            x, many = numbers(rank, 1001, dtype), numbers(rank, 20 * size, dtype)
            label = np.dtype(dtype).name
            found["sum " + label] = me.all_reduce(x.copy()) if ours else plain.all_reduce(me, x)
            found["mean " + label] = me.all_reduce(x.copy(), op="mean") if ours else plain.all_reduce(me, x, mean=True)
            found["broadcast " + label] = me.broadcast(x.copy(), 0) if ours else plain.broadcast(me, x, 0)
            found["all_gather " + label] = me.all_gather(x) if ours else plain.all_gather(me, x)
            found["reduce_scatter " + label] = me.reduce_scatter(many) if ours else plain.reduce_scatter(me, many)
            nothing = np.empty(0, dtype)
            found["nothing " + label] = me.all_reduce(nothing) if ours else plain.all_reduce(me, nothing)
            me.barrier()
        return found

    with seats(topology, kinds, peers="ferrotorch") as world:
        results = play(world, part)
    for dtype in DTYPES:
        label = np.dtype(dtype).name
        arrays = [numbers(rank, 1001, dtype) for rank in range(size)]
        total = arrays[0].copy()
        for other in arrays[1:]:
            total += other  # in the order of ranks, so the bits are known
        scattered = numbers(0, 20 * size, dtype)
        for rank in range(1, size):
            scattered += numbers(rank, 20 * size, dtype)
        for rank, found in enumerate(results):
            assert found["sum " + label].tobytes() == total.tobytes()
            assert found["mean " + label].tobytes() == (total / np.dtype(dtype).type(size)).tobytes()
            assert found["broadcast " + label].tobytes() == arrays[0].tobytes()
            assert found["all_gather " + label].tobytes() == np.concatenate(arrays).tobytes()
            assert found["reduce_scatter " + label].tobytes() == np.split(scattered, size)[rank].tobytes()
            assert found["nothing " + label].size == 0


@pytest.mark.parametrize("kinds", SEATINGS, ids=name)
def test_all_to_all_and_any_root_on_the_mesh(kinds: tuple[str, ...]) -> None:
    size = len(kinds)
    counts = [[(3 * i + j) % 4 for j in range(size)] for i in range(size)]

    def rows(i: int, j: int) -> Array:
        return np.full((counts[i][j], 2), 10 * i + j, np.float64)

    def part(me: Any, rank: int) -> list[Any]:
        x = numbers(rank, 5, np.float32)
        root = size - 1
        if not isinstance(me, px.Group):
            parts = [rows(rank, j) for j in range(size)]
            even = [np.full(2, 10 * rank + j, np.float32) for j in range(size)]
            return [
                plain.broadcast(me, x, root),
                np.concatenate(plain.all_to_all(me, parts, [rows(i, rank) for i in range(size)])),
                np.concatenate(plain.all_to_all(me, even, even)),
            ]
        sent = np.concatenate([rows(rank, j) for j in range(size)])
        even_rows = np.concatenate([np.full(2, 10 * rank + j, np.float32) for j in range(size)])
        expected = [counts[i][rank] for i in range(size)]
        return [
            me.broadcast(x, root),
            me.all_to_all(sent, send_counts=counts[rank], recv_counts=expected),
            me.all_to_all(even_rows),
        ]

    with seats("mesh", kinds, peers="ferrotorch") as world:
        for rank, (got, uneven, even) in enumerate(play(world, part)):
            assert got.tobytes() == numbers(size - 1, 5, np.float32).tobytes()
            assert uneven.tolist() == np.concatenate([rows(i, rank) for i in range(size)]).tolist()
            assert even.tolist() == [10 * i + rank for i in range(size) for _ in range(2)]


@pytest.mark.parametrize("kinds", [*SEATINGS, ("plain", "phalanx", "phalanx", "plain", "phalanx")], ids=name)
def test_the_ring_and_the_tree_of_the_mesh(kinds: tuple[str, ...]) -> None:
    size = len(kinds)
    lengths = (0, 1, size - 1, 1001, 300_000)  # also fewer elements than ranks, and more than a socket holds

    def part(me: Any, rank: int) -> list[Array]:
        found = []
        for count in lengths:
            x = numbers(rank, count, np.float32)
            ours = isinstance(me, px.Group)
            if count:
                found.append(me.all_reduce(x.copy()) if ours else plain.ring_allreduce_sum_f32(me, x))
            for root in range(size):
                found.append(me.broadcast(x.copy(), root) if ours else plain.tree_broadcast_f32(me, x, root))
        return found

    with seats("mesh", kinds, peers="ferrotorch", options=px.Options(algorithm="ring")) as world:
        first, *others = play(world, part)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert mine.tobytes() == theirs.tobytes()
    long = [numbers(rank, 300_000, np.float32) for rank in range(size)]
    np.testing.assert_allclose(first[-size - 1], np.sum(long, axis=0), rtol=1e-4, atol=1e-5)


def test_messages_are_plain_bytes() -> None:
    def part(me: Any, rank: int) -> Any:
        if rank == 1:
            assert me.recv(0) == np.arange(3.0).tobytes()
            me.send(np.ones(2).tobytes(), 0)
            return None
        me.send(np.arange(3.0), 1)
        with pytest.raises(px.UnsupportedOp, match="tag"):
            me.send(np.ones(1), 1, tag=3)
        with pytest.raises(px.UnsupportedOp, match="out"):
            me.recv(src=1, timeout=5)
        with pytest.raises(px.UnsupportedOp):
            me.send_object({}, 1)
        with pytest.raises(px.UnsupportedOp):
            me.recv_object(1, timeout=5)
        return me.recv(np.zeros(2), 1)

    with seats("mesh", ("phalanx", "plain"), peers="ferrotorch") as world:
        assert play(world, part)[0].tolist() == [1, 1]


def test_what_ferrotorch_does_not_have_is_refused_before_anything_is_sent() -> None:
    def part(me: Any, rank: int) -> Any:
        if rank == 1:
            return plain.all_reduce(me, np.ones(3, np.float32))
        refused: list[Callable[[], Any]] = [
            lambda: me.all_gather(np.zeros(3, np.float32), counts="auto"),
            lambda: me.scatter(np.zeros(3, np.float32), 0, counts="auto"),
            lambda: me.scan(np.zeros(3, np.float32)),
            lambda: me.exscan(np.zeros(3, np.float32)),
            lambda: me.argmin(np.zeros(3, np.float32)),
            lambda: me.all_reduce(np.ones(3, np.int64)),
            lambda: me.all_reduce(np.ones(3, np.float32), op="max"),
            lambda: me.reduce(np.ones(3), 1),
            lambda: me.gather(np.ones(3), 1),
            lambda: me.scatter(np.ones(4), 0),
            lambda: me.broadcast_object("x", 0),
            lambda: me.all_gather_object("x"),
        ]
        for call in refused:
            with pytest.raises(px.UnsupportedOp, match="ferrotorch"):
                call()
        with pytest.raises(px.UsageError, match="recv_counts"):
            me.all_to_all(np.ones(2, np.float32), send_counts=[1, 1])
        with pytest.raises(px.UnsupportedOp, match="ClassicAgent"):
            px.rpc.Agent(me)
        return me.all_reduce(np.ones(3, np.float32))

    with seats("mesh", ("phalanx", "plain"), peers="ferrotorch") as world:
        assert [found.tolist() for found in play(world, part)] == [[2, 2, 2]] * 2


def test_a_sub_group_shares_the_stream() -> None:
    def part(me: Any, rank: int) -> Any:
        if rank == 1:
            return None
        if rank == 2:  # ferrotorch's sub-group: ranks 0 and 2
            me.barrier([0, 2])
            me.send(np.full(2, 5, np.float32).tobytes(), 0)
            return np.frombuffer(me.recv(0), np.float32)
        with me.subgroup([0, 2]) as pair:
            pair.barrier()
            return pair.all_reduce(np.ones(2, np.float32))

    with seats("mesh", ("phalanx", "plain", "plain"), peers="ferrotorch") as world:
        results = play(world, part)
        assert results[0].tolist() == results[2].tolist() == [6, 6]


def test_the_backends_messages_go_on_after_its_group() -> None:
    closed = threading.Barrier(2)  # a group that is still open would take the other's message
    with seats("mesh", ("phalanx", "phalanx"), peers="ferrotorch") as world:

        def ours(seat: Seat) -> None:
            with px.Group(seat.phalanx) as group:
                work = group.irecv(np.zeros(1), 1 - group.rank)
            with pytest.raises(px.PhalanxError):
                work.wait(5)
            closed.wait(10)
            seat.barrier()
            seat.send(b"still here", 1 - seat.rank)
            assert seat.recv(10, 1 - seat.rank) == b"still here"

        side_by_side(*(lambda seat=seat: ours(seat) for seat in world))


def test_other_sizes_break_the_group() -> None:
    def part(me: Any, rank: int) -> Any:
        with pytest.raises(px.Desync):
            me.all_reduce(np.ones(3 + rank, np.float32), timeout=5)
        with pytest.raises(px.Desync):
            me.barrier()

    with seats("mesh", ("phalanx", "plain"), peers="ferrotorch") as world:
        group = px.Group(world[0].phalanx)
        world[1].send(b"12345", 0)
        part(group, 0)
        group.close()


def test_a_late_rank_is_a_timeout_with_its_seconds() -> None:
    with seats("mesh", ("phalanx", "plain"), peers="ferrotorch") as world, px.Group(world[0].phalanx) as group:
        with pytest.raises(px.Timeout) as caught:
            group.all_reduce(np.ones(3, np.float32), timeout=0.2)
        assert caught.value.seconds == 0.2
        assert caught.value.missing == (1,)


def test_the_mesh_from_the_four_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    host, port = free_place()
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    for variable in variables:
        with monkeypatch.context() as context:
            context.delenv(variable)
            with pytest.raises(px.MissingVariable, match=variable):
                px.backends.MeshBackend.from_env(wire="classic")
            context.setenv(variable, " one" if variable != "MASTER_ADDR" else " ")
            with pytest.raises(px.ConfigError, match=variable):
                px.backends.MeshBackend.from_env(wire="classic")
    one, zero = side_by_side(
        lambda: px.backends.MeshBackend.from_env(wire="classic", peers="ferrotorch", timeout=patience),
        lambda: plain_mesh(0, 2, (host, port)),
    )
    side_by_side(one.barrier, zero.barrier)
    one.close()
    zero.close()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: px.backends.TcpBackend(0, 2, "127.0.0.1:1", peers="gloo"), "peers='gloo'"),
        (lambda: px.backends.MeshBackend(0, 2, "127.0.0.1:1", wire="classic", peers="gloo"), "peers='gloo'"),
        (lambda: px.backends.MeshBackend(0, 2, "127.0.0.1:1", peers="ferrotorch"), "wire='classic'"),
    ],
    ids=["star", "mesh", "phalanx"],
)
def test_peers_must_make_sense(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(px.ConfigError, match=match):
        make()


def test_a_ring_needs_the_mesh() -> None:
    options = px.Options(algorithm="ring")
    with (
        seats("star", ("phalanx", "plain"), peers="ferrotorch", options=options) as world,
        px.Group(world[0].phalanx) as group,
        pytest.raises(px.ConfigError, match="star"),
    ):
        group.barrier()
