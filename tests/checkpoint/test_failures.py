"""Saves that fail, files that are damaged, ranks that die: the old checkpoint stays, and the error says why."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.soak.saves import kill_in_a_save
from tests.soak.saves_rank import Plan

import phalanx as px
from phalanx.checkpoint.index import INDEX
from phalanx.checkpoint.tensors_file import NewFile
from phalanx.testing import Died, faults, run_ranks

OLD = {"x": np.arange(100_000), "step": 1}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def is_old(folder: Path) -> bool:
    found = px.checkpoint.load(folder)
    return found["step"] == 1 and bool((found["x"] == OLD["x"]).all())


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    px.checkpoint.save(tmp_path / "a", OLD)

    def body(world: px.Group) -> str:
        if world.rank == 1:  # the system refuses to write more than this to a file of this rank
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        new = {"small": np.zeros(3), "x": px.checkpoint.Shard.along(np.zeros(5000), world), "step": 2}
        with pytest.raises(px.CheckpointError) as caught:
            px.checkpoint.save(tmp_path / "a", new, world)
        assert caught.value.tensor == "x"
        assert "rank-00001" in str(caught.value.path)
        world.barrier()  # it goes on
        return str(caught.value)

    words = run_ranks(3, body, backend="mesh")
    assert all("cannot write 'x' to" in text and "File too large" in text for text in words)
    assert [text.startswith("rank 1: ") for text in words] == [True, False, True]
    assert is_old(tmp_path / "a")
    assert len(files(tmp_path / "a")) == 1  # nothing of the new one is left


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_of_a_disk_that_nobody_expected(tmp_path: Path, size: int) -> None:
    px.checkpoint.save(tmp_path / "a", OLD)

    def body(world: px.Group) -> str:
        def fail(_file: NewFile) -> NoReturn:
            raise MemoryError("none left")

        if world.rank == 0:
            NewFile.sync = fail  # type: ignore[method-assign]
        with pytest.raises((px.CheckpointError, MemoryError)) as caught:
            px.checkpoint.save(tmp_path / "a", {"x": np.zeros(3), "step": 2}, world)
        return str(caught.value)

    words = run_ranks(size, body, backend="mesh")
    assert all("none left" in text for text in words), words
    assert is_old(tmp_path / "a")


def test_a_save_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    px.checkpoint.save(tmp_path / "a", OLD)
    assert is_old(tmp_path / "a")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def body(world: px.Group) -> None:
        with pytest.raises(px.CheckpointError, match="cannot make the folder"):
            px.checkpoint.save(tmp_path / "file" / "a", OLD, world)

    run_ranks(2, body)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: flip(file, -5), "a damaged block in 'x' of"),
        (lambda file: file.unlink(), "cannot read 'x' from"),
        (lambda file: os.truncate(file, 1000), "bytes are missing in 'x' of"),
    ],
)
def test_a_damaged_file(tmp_path: Path, damage: Any, words: str) -> None:
    run_ranks(2, lambda world: px.checkpoint.save(tmp_path / "a", OLD, world))
    (file,) = files(tmp_path / "a")
    damage(file)

    def body(world: px.Group) -> None:
        # Only the second rank needs the tensor.
        like = {"x": px.checkpoint.Shard(np.zeros(0 if world.rank == 0 else 100_000, int), (100_000,), (0,))}
        with pytest.raises(px.CheckpointError) as caught:
            px.checkpoint.load(tmp_path / "a", world, like=like)
        assert words in str(caught.value)
        assert file.name in str(caught.value)
        assert caught.value.tensor == "x"
        world.barrier()

    run_ranks(2, body)
    with pytest.raises(px.CheckpointError):
        px.checkpoint.verify(tmp_path / "a")


def test_a_damaged_header_is_found_by_verify(tmp_path: Path) -> None:
    px.checkpoint.save(tmp_path / "a", OLD)
    (file,) = files(tmp_path / "a")
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"I64"', b'"I32"'))
    assert is_old(tmp_path / "a")  # the index says where everything lies
    with pytest.raises(px.CheckpointError, match="the header of .* does not fit 'x'"):
        px.checkpoint.verify(tmp_path / "a")


@pytest.mark.parametrize("place", [0, 40, 70, 200, -3])
def test_a_damaged_index(tmp_path: Path, place: int) -> None:
    px.checkpoint.save(tmp_path / "a", OLD)
    flip(tmp_path / "a" / INDEX, place)

    def body(world: px.Group) -> None:
        with pytest.raises(px.CheckpointError) as caught:
            px.checkpoint.load(tmp_path / "a", world)
        assert INDEX in str(caught.value)

    run_ranks(2, body)
    assert px.checkpoint.latest(tmp_path) is None


def test_no_checkpoint(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        with pytest.raises(px.CheckpointNotFound, match="does not exist"):
            px.checkpoint.load(tmp_path / "a", world)
        with pytest.raises(px.CheckpointNotFound, match="is not a checkpoint"):
            px.checkpoint.load(tmp_path, world)
        with pytest.raises(FileNotFoundError):
            px.checkpoint.load(tmp_path / "a", world)

    run_ranks(2, body)


def test_ranks_that_load_different_checkpoints(tmp_path: Path) -> None:
    for name in "ab":
        px.checkpoint.save(tmp_path / name, OLD)

    def body(world: px.Group) -> str:
        with pytest.raises(px.PhalanxError) as caught:
            px.checkpoint.load(tmp_path / "ab"[world.rank], world)
        return str(caught.value)

    assert all("this rank loads" in words for words in run_ranks(2, body))


def test_ranks_that_save_to_different_folders(tmp_path: Path) -> None:
    def body(world: px.Group, *names: str) -> str:
        with pytest.raises(px.PhalanxError) as caught:
            px.checkpoint.save(tmp_path / names[world.rank], {"x": px.checkpoint.Shard.along(np.ones(3), world)}, world)
        return str(caught.value)

    for words in run_ranks(2, body, "a", "b"):
        assert "the folder on rank 1 is not as on rank 0 (b there, a on rank 0; all ranks save to one folder)" in words
    # A name that is the same may be another folder all the same.
    for words in run_ranks(2, body, "a/last", "b/last"):
        assert f"which rank 1 has written to {tmp_path / 'b' / 'last'}, is not in {tmp_path / 'a' / 'last'}" in words
    assert not list(tmp_path.rglob("*.safetensors"))


class Stubborn:
    """Gives no state, or takes none."""

    def __init__(self, gives: bool = True) -> None:
        self._gives = gives

    def state_dict(self) -> dict[str, Any]:
        if not self._gives:
            raise KeyError("lost")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("not mine")


def test_an_error_of_the_program_itself_is_heard_by_all(tmp_path: Path) -> None:
    def body(world: px.Group) -> None:
        mine = world.rank == 1
        with pytest.raises(KeyError if mine else px.CheckpointError, match="lost"):
            px.checkpoint.save(tmp_path / "a", {"model": Stubborn(gives=not mine)}, world)
        px.checkpoint.save(tmp_path / "a", {"model": Stubborn()}, world)
        with pytest.raises(RuntimeError if mine else px.CheckpointError, match="not mine"):
            px.checkpoint.load(tmp_path / "a", world, like={"model": Stubborn() if mine else {"x": 1}})
        assert px.checkpoint.load(tmp_path / "a", world) == {"model": {"x": 1}}

    run_ranks(2, body)


def test_a_rank_that_dies_while_it_writes(tmp_path: Path) -> None:
    px.checkpoint.save(tmp_path / "a", OLD)

    def body(world: px.Group) -> Any:
        if world.rank == 1:
            px.checkpoint.saving.NewFile = lambda *_: faults.kill_self()
        with pytest.raises(px.PeerLost) as caught:
            px.checkpoint.save(tmp_path / "a", {"x": px.checkpoint.Shard.along(np.zeros(9), world)}, world)
        return caught.value.peer

    first, second, third = run_ranks(3, body, backend="mesh", may_die=[1])
    assert (first, third) == (1, 1)
    assert isinstance(second, Died)
    assert is_old(tmp_path / "a")
    # What the survivors wrote goes with the next save.
    px.checkpoint.save(tmp_path / "a", OLD)
    assert len(files(tmp_path / "a")) == 1


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_any_moment_there_is_the_old_one_or_the_new_one(tmp_path: Path, seed: int) -> None:
    """`make saves` does this five hundred times."""
    kill_in_a_save(tmp_path / "a", Plan.draw(seed, 3), ranks=3)
