"""Saves beside the program: they see the values of the moment, and an error is not lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.checkpoint import saving
from phalanx.testing import run_ranks


def test_the_program_goes_on_at_once(tmp_path: Path) -> None:
    def body(world: px.Group) -> Any:
        x = np.full(100_000, 1.0)
        work = px.checkpoint.save_async(tmp_path / "a", {"x": x, "rank": px.checkpoint.PerRank(world.rank)}, world)
        x[:] = 2
        for _ in range(20):  # on another group than the save votes on
            world.all_reduce(x, op="mean")
        assert work.wait() is None
        found = px.checkpoint.load(tmp_path / "a", world)
        return found["x"].min(), found["x"].max(), found["rank"]

    assert run_ranks(3, body, backend="mesh") == [(1, 1, 0), (1, 1, 1), (1, 1, 2)]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        for step in range(5):
            px.checkpoint.save_async(tmp_path / "a", {"step": step}, world)
        px.checkpoint.save(tmp_path / "b", {"step": 5}, world)
        assert px.checkpoint.load(tmp_path / "a", world) == {"step": 4}

    run_ranks(2, body)


def test_the_end_of_the_group_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = saving.NewFile

    def slowly(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return write(*args)

    monkeypatch.setattr(saving, "NewFile", slowly)

    def body(world: px.Group) -> None:
        px.checkpoint.save_async(tmp_path / "a", {"x": np.ones(3)}, world)
        if world.rank == 0:
            assert begun.wait(20)
            go_on.set()

    run_ranks(2, body)
    assert px.checkpoint.load(tmp_path / "a")["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("looks", [False, True])
def test_an_error_is_raised_on_all_ranks_by_the_next_one(tmp_path: Path, looks: bool) -> None:
    (tmp_path / "file").write_text("in the way")

    def body(world: px.Group) -> None:
        work = px.checkpoint.save_async(tmp_path / "file" / "a", {"x": np.ones(3)}, world)
        if looks:
            with pytest.raises(px.CheckpointError, match="cannot make the folder"):
                work.wait()
        else:
            with pytest.raises(px.CheckpointError, match="cannot make the folder"):
                px.checkpoint.save_async(tmp_path / "b", {"x": np.ones(3)}, world)
        # Once is enough.
        px.checkpoint.save(tmp_path / "b", {"x": np.ones(3)}, world)

    run_ranks(2, body)


def test_an_error_at_the_end_is_raised_by_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def body(world: px.Group) -> None:
        part = world.subgroup(range(2))
        px.checkpoint.save_async(tmp_path / "file" / "a", {"x": 1}, part)
        with pytest.raises(px.CheckpointError, match="cannot make the folder"):
            part.close()
        with pytest.raises(px.Closed):
            part.barrier()  # it is closed all the same
        world.barrier()

    run_ranks(2, body)


def test_alone(tmp_path: Path) -> None:
    x = np.zeros(10)
    work = px.checkpoint.save_async(tmp_path / "a", {"x": x})
    x[:] = 1
    assert not px.checkpoint.load(tmp_path / "a")["x"].any()
    assert work.done()


def test_a_lost_rank_ends_a_save(tmp_path: Path) -> None:
    def body(world: px.Group) -> Any:
        if world.rank == 1:
            px.testing.faults.kill_self()
        with pytest.raises(px.PeerLost) as caught:
            px.checkpoint.save_async(tmp_path / "a", {"x": np.ones(3)}, world).wait()
        return caught.value.peer

    assert run_ranks(2, body, backend="mesh", may_die=[1])[0] == 1


def test_a_tree_that_one_rank_cannot_save(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        for step in range(3):
            tree: Any = {"x": np.full(4, step)}
            if (world.rank, step) == (1, 0):
                with pytest.raises(px.UsageError, match="x is of type set"):
                    px.checkpoint.save_async(tmp_path / "a", {"x": {1}}, world)
            elif step == 1:  # all hear of the save before
                with pytest.raises(px.PhalanxError, match="x is of type set"):
                    px.checkpoint.save_async(tmp_path / "a", tree, world)
            else:
                px.checkpoint.save_async(tmp_path / "a", tree, world)
        assert px.checkpoint.load(tmp_path / "a", world)["x"].tolist() == [2] * 4

    run_ranks(2, body)


def test_ranks_that_hear_of_an_error_at_different_calls_never_mix_two_saves(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        def save(step: int, x: Any = None) -> Any:
            tree = {"x": px.checkpoint.Shard.along(np.full(2, step), world) if x is None else x}
            return px.checkpoint.save_async(tmp_path / "a", tree, world)

        with pytest.raises(px.PhalanxError, match="x is of type set"):
            save(0, {1} if world.rank else None).wait()
        if world.rank == 1:  # it has not heard of it yet in the way that the other has
            with pytest.raises(px.UsageError, match="x is of type set"):
                save(1)
            last = save(2)
        else:
            last = save(1)
        with pytest.raises(px.Desync, match="the number of the save on rank 1 is not as on rank 0 .* left one out"):
            last.wait()
        assert px.checkpoint.latest(tmp_path) is None

    run_ranks(2, body)
