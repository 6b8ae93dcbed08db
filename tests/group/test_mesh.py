"""Meshes: who is where, which groups there are, and that they do not mix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.testing import run_ranks

EIGHT = {"replica": 2, "shard": 4}


def everywhere(group: px.Group) -> list[int]:
    return [int(rank) for rank in group.all_gather(np.array([group.members[group.rank]]))]


@pytest.mark.parametrize("backend", ["simulated", "mesh", "mesh-classic"])
def test_each_axis_is_a_group(backend: str) -> None:
    def body(world: px.Group) -> Any:
        mesh = px.Mesh(world, EIGHT)
        found = {axis: everywhere(mesh[axis]) for axis in mesh}
        assert mesh["shard"] is mesh["shard"]
        assert mesh["shard"].rank == mesh.coordinate["shard"]
        mesh.close()
        assert not world.all_gather(np.zeros(1)).any()  # the group goes on
        return dict(mesh.coordinate), found

    results = run_ranks(8, body, backend=backend)
    for rank, (coordinate, found) in enumerate(results):
        row, column = divmod(rank, 4)
        assert coordinate == {"replica": row, "shard": column}
        assert found == {"replica": [column, column + 4], "shard": [4 * row + i for i in range(4)]}


def test_groups_are_told_apart_whatever_the_order_in_which_ranks_ask() -> None:
    def body(world: px.Group) -> None:
        # Of one size all the same members, and yet six groups.
        meshes = [px.Mesh(world, {"x": 4, "y": 1}), px.Mesh(world, {"x": 4, "y": 1}), px.Mesh(world, {"x": 1, "y": 4})]
        groups = [(0, "x"), (1, "x"), (2, "y")]
        made = {key: meshes[key[0]][key[1]] for key in (groups if world.rank % 2 else reversed(groups))}
        flat = {i: meshes[i].flatten()["x_y"] for i in ((0, 1) if world.rank % 2 else (1, 0))}
        for number, key in enumerate(groups):
            assert made[key].all_reduce(np.array([number])).tolist() == [4 * number]
        works = [made[key].all_reduce(np.array([number]), async_op=True) for number, key in enumerate(groups)]
        works += [flat[i].all_reduce(np.array([10 + i]), async_op=True) for i in (0, 1)]
        assert [work.wait().tolist() for work in works] == [[0], [4], [8], [40], [44]]

    run_ranks(4, body)


def test_only_members_make_a_group() -> None:
    def body(world: px.Group) -> list[int]:
        mesh = px.Mesh(world, {"a": 2, "b": 2})
        found = everywhere(mesh["b"]) if mesh.coordinate["a"] == 0 else []
        world.barrier()
        return found

    assert run_ranks(4, body) == [[0, 1], [0, 1], [], []]


def test_parts_and_flattening() -> None:
    def body(world: px.Group) -> None:
        mesh = px.Mesh(world, {"pipe": 2, "replica": 2, "shard": 2})
        part = mesh["shard", "replica"]
        assert part.axes == ("shard", "replica")
        assert dict(part.shape) == {"shard": 2, "replica": 2}
        assert part["shard"] is mesh["shard"]
        first = world.rank // 4 * 4
        assert part.ranks.tolist() == [[first, first + 2], [first + 1, first + 3]]
        flat = mesh.flatten("replica", "shard", name="data")
        assert dict(flat.shape) == {"pipe": 2, "data": 4}
        assert flat.coordinate["data"] == world.rank % 4
        assert everywhere(flat["data"]) == list(range(first, first + 4))
        outer = mesh.flatten("pipe", "shard")
        assert outer.axes == ("pipe_shard", "replica")
        of_replica = [rank for rank in range(8) if rank // 2 % 2 == mesh.coordinate["replica"]]
        assert everywhere(outer["pipe_shard"]) == of_replica
        # A flattened axis is an axis as any other.
        assert everywhere(outer.flatten("replica", "pipe_shard", name="all")["all"]) == [0, 1, 4, 5, 2, 3, 6, 7]
        assert mesh.flatten().size == mesh.size == 8

    run_ranks(8, body)


def test_neighbours_of_the_last_axis_are_on_one_host() -> None:
    def body(world: px.Group) -> Any:
        # As a launcher that deals ranks to two hosts in turn would have it.
        world._backend.host_ids = ("a", "b") * 2
        mesh = px.Mesh(world, {"host": 2, "local": 2})
        mine = px.Mesh(world, {"host": 2, "local": 2}, ranks=[[0, 1], [2, 3]])
        return mesh.ranks.tolist(), everywhere(mesh["local"]), everywhere(mine["local"])

    results = run_ranks(4, body)
    assert [own for own, _, _ in results] == [[[0, 2], [1, 3]]] * 4
    assert [local for _, local, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [local for _, _, local in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_group_may_be_a_part_of_the_world() -> None:
    def body(world: px.Group) -> Any:
        if world.rank % 2:
            return None
        mesh = px.Mesh(world.subgroup([0, 2, 4, 6]), {"a": -1, "b": 2})
        assert dict(mesh.shape) == {"a": 2, "b": 2}
        return everywhere(mesh["a"])

    assert run_ranks(8, body)[::2] == [[0, 4], [2, 6], [0, 4], [2, 6]]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"a": 2, "b": 3}, "a mesh of a 2 by b 3 does not fit a group of 4 ranks"),
        ({"a": -1, "b": 3}, "a mesh of a -1 by b 3 does not fit"),
        ({"a": -1, "b": -1}, "does not fit"),
        ({"a": 0}, "the axis 'a' has length 0"),
        ({}, "expected a length for each axis"),
        ([2, 2], "expected a length for each axis"),
        ({1: 4}, "is not the name of an axis"),
        ({"a": 2.5}, "a=2.5"),
    ],
)
def test_shapes_that_do_not_fit(shape: Any, words: str) -> None:
    def body(world: px.Group) -> None:
        with pytest.raises(px.UsageError) as caught:
            px.Mesh(world, shape)
        assert words in str(caught.value)

    run_ranks(4, body)


def test_refusals() -> None:
    def body(world: px.Group) -> None:
        mesh = px.Mesh(world, {"a": 2, "b": 2})
        for wrong, words in [
            (lambda: mesh["c"], "the mesh has no axis 'c' (it has 'a', 'b')"),
            (lambda: mesh["a", "a"], "an axis is named twice"),
            (lambda: mesh[0], "mesh[0] is not an axis"),
            (lambda: mesh.flatten("a", name="b"), "name='b' is not valid"),
            (lambda: mesh.flatten("a", name=5), "name=5 is not valid"),
            (lambda: mesh.flatten("c"), "no axis 'c'"),
            (lambda: px.Mesh(world, {"a": 4}, ranks=[0, 1, 2, 2]), "each rank below 4 once"),
            (lambda: px.Mesh(world, {"a": 4}, ranks=[[0, 1, 2, 3]]), "in shape (4,)"),
        ]:
            with pytest.raises(px.UsageError) as caught:
                wrong()
            assert words in str(caught.value)
        mesh.close()
        with pytest.raises(px.Closed):
            mesh["a"]

    run_ranks(4, body)


def test_a_lost_rank_is_named_in_the_groups_of_a_mesh() -> None:
    def body(world: px.Group) -> Any:
        mesh = px.Mesh(world, {"a": 2, "b": 2})
        mesh["b"].barrier()
        if world.rank == 3:
            px.testing.faults.kill_self()
        with pytest.raises(px.PeerLost) as caught:
            {0: world, 1: mesh["a"], 2: mesh["b"]}[world.rank].all_reduce(np.ones(1))
        return caught.value.peer

    assert run_ranks(4, body, backend="mesh", may_die=[3])[:3] == [3, 3, 3]
