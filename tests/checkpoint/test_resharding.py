"""Tensors that ranks hold parts of, loaded by other numbers of ranks and on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.testing import run_ranks

WHOLE = np.arange(13 * 10, dtype=np.float32).reshape(13, 10)
Shard = px.checkpoint.Shard


def rows(world: px.Group, dim: int = 0) -> slice:
    length = WHOLE.shape[dim]
    return slice(length * world.rank // world.world_size, length * (world.rank + 1) // world.world_size)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def body(world: px.Group) -> None:
        mesh = px.Mesh(world, {"replica": 2, "shard": 2})
        part = np.array_split(WHOLE, 2)[mesh.coordinate["shard"]]
        tree = {
            "rows": Shard.along(WHOLE[rows(world)], world),
            "columns": Shard.along(WHOLE[:, rows(world, 1)], world, dim=-1),
            "mesh": Shard.along(part, mesh["shard"], axis="shard", replicas=mesh["replica"]),
        }
        px.checkpoint.save(tmp_path / "a", tree, mesh)

    run_ranks(4, body)
    return tmp_path / "a"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_another_number_of_ranks(saved: Path, size: int) -> None:
    def body(world: px.Group) -> Any:
        mine = rows(world)
        like = {
            "rows": Shard(np.zeros_like(WHOLE[mine]), WHOLE.shape, (mine.start, 0)),
            "columns": Shard(np.zeros_like(WHOLE[mine]), WHOLE.shape, (mine.start, 0)),
        }
        found = px.checkpoint.load(saved, world, like=like)
        assert (found["mesh"] == WHOLE).all()
        return [(found[name].array == WHOLE[mine]).all() for name in like]

    assert run_ranks(size, body) == [[True, True]] * size


def test_another_mesh(saved: Path) -> None:
    def body(world: px.Group) -> Any:
        mesh = px.Mesh(world, {"shard": 3, "replica": 2})
        found = px.checkpoint.load(saved, mesh=mesh)
        part = found["mesh"]
        assert isinstance(part, Shard)
        assert (part.array == WHOLE[part.region.slices_in(px.checkpoint.regions.whole(WHOLE.shape))]).all()
        assert (found["rows"] == WHOLE).all()  # saved along no axis that has a name
        # What was loaded can be saved, and is whole.
        px.checkpoint.save(saved.parent / "b", {"mesh": part}, mesh)
        return part.offset, part.array.shape

    assert run_ranks(6, body) == [
        ((0, 0), (4, 10)),
        ((0, 0), (4, 10)),
        ((4, 0), (4, 10)),
        ((4, 0), (4, 10)),
        ((8, 0), (5, 10)),
        ((8, 0), (5, 10)),
    ]
    assert (px.checkpoint.load(saved.parent / "b")["mesh"] == WHOLE).all()


def test_replicas_write_once(saved: Path) -> None:
    index = px.checkpoint.index.read_index(saved)
    assert len(index.tensors["mesh"].pieces) == 2
    assert len(index.tensors["columns"].pieces) == 4


def test_only_the_blocks_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = np.arange(16 << 18, dtype=np.float32).reshape(4096, 1024)  # 16 MiB: a block is 256 rows
    px.checkpoint.save(tmp_path / "a", {"large": large, "other": large})
    count = [0]
    read = px.checkpoint.tensors_file._Piece.read

    def counted(self: Any, file: Any, first: int, end: int) -> memoryview:
        count[0] += -(-end // (1 << 20)) - first // (1 << 20)
        return read(self, file, first, end)

    monkeypatch.setattr(px.checkpoint.tensors_file._Piece, "read", counted)
    part = Shard(np.zeros((300, 1024), np.float32), large.shape, (1000, 0))
    like = {"large": part, "other": Shard(np.zeros((1, 1), np.float32), large.shape, (0, 5))}
    found = px.checkpoint.load(tmp_path / "a", like=like)
    assert (found["large"].array == large[1000:1300]).all()
    assert found["other"].array == 5
    assert count == [3 + 1]


def test_parts_that_do_not_make_the_tensor(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        with pytest.raises(px.CheckpointError, match="the parts of 'x' that the ranks have do not make"):
            px.checkpoint.save(tmp_path / "a", {"x": Shard(np.zeros(3), (10,), (3 * world.rank,))}, world)

    run_ranks(3, body)
    with pytest.raises(px.UsageError, match="does not lie in a tensor of shape"):
        Shard(np.zeros(3), (10,), (8,))


def test_a_tree_that_one_rank_cannot_save(tmp_path: Path) -> None:
    def body(world: px.Group) -> str:
        with pytest.raises(px.PhalanxError) as caught:
            px.checkpoint.save(tmp_path / "a", {"x": object() if world.rank == 1 else 1}, world)
        world.barrier()
        return str(caught.value)

    assert all("x is of type object" in words for words in run_ranks(3, body))


def test_trees_that_differ(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        tree = {"x": np.zeros(3), "loss": 0.5 + (world.rank == 1)}
        with pytest.raises(px.Desync) as caught:
            px.checkpoint.save(tmp_path / "a", tree, world)
        assert "loss on rank 1 is not as on rank 0" in str(caught.value)
        assert "px.checkpoint.PerRank" in str(caught.value)
        assert "(1.5 there, 0.5 on rank 0;" in str(caught.value)

    run_ranks(3, body)
    assert px.checkpoint.latest(tmp_path) is None
