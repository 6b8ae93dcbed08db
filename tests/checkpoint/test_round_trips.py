"""What is saved comes back: kinds, dtypes, shapes, plain data, and what other programs read of it."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import phalanx as px
from phalanx.testing import run_ranks

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 4, 3)]


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_arrays_of_all_dtypes_and_shapes(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    tree = {
        f"{dtype}{shape}": np.asarray(random.integers(0, 100, shape)).astype(dtype)
        for dtype in [*DTYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
        for shape in SHAPES
    }

    def body(world: px.Group) -> Any:
        px.checkpoint.save(tmp_path / "a", tree, world)
        return px.checkpoint.load(tmp_path / "a", world)

    for found in run_ranks(3, body):
        assert found.keys() == tree.keys()
        assert all(same(found[name], tree[name]) for name in tree)
    assert px.checkpoint.verify(tmp_path / "a") == sum(array.nbytes for array in tree.values())


def test_views_and_byte_orders(tmp_path: Path) -> None:
    base = np.arange(24.0).reshape(4, 6)
    tree = {"columns": base[:, ::2], "transposed": base.T, "big": base.astype(">f4"), "reversed": base[::-1]}
    px.checkpoint.save(tmp_path / "a", tree)
    found = px.checkpoint.load(tmp_path / "a")
    assert all((found[name] == tree[name]).all() for name in tree)
    assert found["big"].dtype == np.float32


def test_plain_data(tmp_path: Path) -> None:
    tree = {
        "none": None,
        "numbers": [1, -(2**70), 0.1, math.inf, -math.inf, 1 + 2j, True],
        "text": "größer",
        "derived": type("Text", (str,), {})("größer"),
        "bytes": b"\x00\xff",
        "nested": ({"a": [(), [], {}]},),
        3: {"int keys": 1, 2.5: None, None: 0, True: 1},
        "a.b": np.zeros(1),
        "a": {"b": np.ones(1)},  # of the same name as the one above
    }
    px.checkpoint.save(tmp_path / "a", tree)
    found = px.checkpoint.load(tmp_path / "a")
    assert found["a.b"].tolist() == [0]
    assert found["a"]["b"].tolist() == [1]
    rest = {key: value for key, value in tree.items() if key not in ("a", "a.b")}
    assert {key: value for key, value in found.items() if key not in ("a", "a.b")} == rest
    assert list(found) == list(tree)
    px.checkpoint.save(tmp_path / "long", 10**4000)
    assert px.checkpoint.load(tmp_path / "long") == 10**4000
    px.checkpoint.save(tmp_path / "nan", math.nan)
    assert math.isnan(px.checkpoint.load(tmp_path / "nan"))


CYCLE: dict[str, Any] = {}
CYCLE["again"] = CYCLE


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [object()]}, "a.0 is of type object"),
        ({"a": {(1, 2): 3}}, "a has a key of type tuple"),
        ({"a": {math.inf: 3}}, "a has a key inf (expected str or a finite number)"),
        ({"a": np.array(["x"])}, "a: dtype <U1 cannot be saved"),
        ({"a": lambda: 1}, "a is of type function"),
        ({"a": [CYCLE]}, "a.0.again is a dict that contains itself"),
        (functools.reduce(lambda inner, _: [inner], range(200), 1), "... is nested more than 100 deep"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, "a: a masked array cannot be saved"),
        ({"a": {math.nan: 1}}, "a has a key nan"),
        ({"a": "\ud800"}, "a is '\\ud800', which is not Unicode text"),
        ({"a": {"\ud800": np.ones(1)}}, "a key of a is '\\ud800'"),
        ({"a": 10**5000}, "a is a number of 16610 bits"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, tree: Any, words: str) -> None:
    with pytest.raises(px.UsageError) as caught:
        px.checkpoint.save(tmp_path / "a", tree)
    assert words in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_names_that_mean_something_to_the_format(tmp_path: Path) -> None:
    part = px.checkpoint.Shard(np.arange(2), (2,), (0,))
    twice = [np.ones(3)]
    tree = {"__metadata__": np.arange(5), "x": part, "x@0": np.zeros(1), "twice": [twice, twice]}

    def body(world: px.Group) -> None:
        mine = {**tree, "x": px.checkpoint.Shard.along(np.arange(1) + world.rank, world)}
        px.checkpoint.save(tmp_path / "a", mine, world)

    run_ranks(2, body)
    px.checkpoint.verify(tmp_path / "a")
    found = px.checkpoint.load(tmp_path / "a")
    assert found["__metadata__"].tolist() == [0, 1, 2, 3, 4]
    assert found["x"].tolist() == [0, 1]
    assert found["x@0"].tolist() == [0]
    assert len(found["twice"]) == 2  # something that is there twice does not contain itself
    px.checkpoint.export_safetensors(tmp_path / "a", tmp_path / "one.safetensors")
    px.checkpoint.import_safetensors(tmp_path / "one.safetensors", tmp_path / "b")
    assert px.checkpoint.load(tmp_path / "b")["__metadata__'"].tolist() == [0, 1, 2, 3, 4]


def test_what_all_ranks_have_is_written_once_and_by_all_of_them(tmp_path: Path) -> None:
    large = np.arange(3 << 20, dtype=np.float32).reshape(-1, 1024)
    tree = {"large": large, **{f"small{i}": np.full(1000, i) for i in range(8)}}
    run_ranks(4, lambda world: px.checkpoint.save(tmp_path / "a", tree, world))
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) == 4
    assert sum(sizes) < large.nbytes + 8 * 8000 + 20_000
    assert max(sizes) - min(sizes) < 10_000
    found = px.checkpoint.load(tmp_path / "a")
    assert all(same(found[name], tree[name]) for name in tree)


def test_other_programs_read_the_files(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    tree = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(3), "empty": np.zeros((2, 0), np.int8)}
    px.checkpoint.save(tmp_path / "a", tree)
    (file,) = (tmp_path / "a").glob("*.safetensors")
    found = numpy_files.load_file(file)
    assert all(same(found[name], tree[name]) for name in tree)
    px.checkpoint.export_safetensors(tmp_path / "a", tmp_path / "one.safetensors")
    assert numpy_files.load_file(tmp_path / "one.safetensors").keys() == tree.keys()
    numpy_files.save_file(tree, tmp_path / "theirs.safetensors")
    px.checkpoint.import_safetensors(tmp_path / "theirs.safetensors", tmp_path / "b")
    found = px.checkpoint.load(tmp_path / "b")
    assert all(same(found[name], tree[name]) for name in tree)


def test_like_is_filled_in_place(tmp_path: Path) -> None:
    px.checkpoint.save(tmp_path / "a", {"x": np.arange(6.0).reshape(2, 3), "step": 7, "more": np.ones(2)})
    mine = {
        "x": np.zeros((2, 3)),
        "step": 0,
    }
    found = px.checkpoint.load(tmp_path / "a", like=mine)
    assert found["x"] is mine["x"]
    assert mine["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["step"] == 7
    assert found["more"].tolist() == [1, 1]
    # Another dtype, another order, and one that cannot be written to.
    single, turned = np.zeros((2, 3), np.float32), np.zeros((3, 2)).T
    fixed = np.zeros((2, 3))
    fixed.flags.writeable = False
    for like in (single, turned):
        assert px.checkpoint.load(tmp_path / "a", like={"x": like})["x"] is like
        assert like.tolist() == [[0, 1, 2], [3, 4, 5]]
    new = px.checkpoint.load(tmp_path / "a", like={"x": fixed})["x"]
    assert new is not fixed
    assert not fixed.any()
    assert new.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"x": np.zeros(5)}, "'x' was saved with shape (2, 3), like has (5,)"),
        ({"y": np.zeros(5)}, "the checkpoint has no y (like has it)"),
        ({"x": 3}, "like has int for 'x', which is a tensor"),
        ({"x": np.zeros((2, 3), np.int64)}, "'x' was saved as float64, which int64 of like cannot hold"),
        ({"x": np.zeros((2, 3), bool)}, "which bool of like cannot hold"),
    ],
)
def test_like_that_does_not_fit(tmp_path: Path, like: Any, words: str) -> None:
    px.checkpoint.save(tmp_path / "a", {"x": np.zeros((2, 3))})
    with pytest.raises(px.PhalanxError) as caught:
        px.checkpoint.load(tmp_path / "a", like=like)
    assert words in str(caught.value)


class Moments(NamedTuple):
    mean: Any
    count: Any


def test_like_says_of_which_class_tuples_and_dicts_are(tmp_path: Path) -> None:
    tree = {"moments": Moments(np.ones(2), 3), "words": Counter("aab"), "order": OrderedDict(b=1, a=2)}
    px.checkpoint.save(tmp_path / "a", tree)
    assert px.checkpoint.load(tmp_path / "a")["words"] == {"a": 2, "b": 1}
    found = px.checkpoint.load(tmp_path / "a", like={**tree, "moments": Moments(np.zeros(2), 0)})
    assert [type(value) for value in found.values()] == [Moments, Counter, OrderedDict]
    assert found["moments"].mean.tolist() == [1, 1]
    assert found["words"]["absent"] == 0


def test_values_of_single_ranks_beside_tensors_of_such_names(tmp_path: Path) -> None:
    def body(world: px.Group) -> Any:
        mine = px.checkpoint.PerRank({"y": np.full(1, world.rank)})
        tree = {"x": mine, "x@0": {"y": np.full(1, 10)}, "x@1": {"y": np.full(1, 11)}}
        px.checkpoint.save(tmp_path / "a", tree, world)
        found = px.checkpoint.load(tmp_path / "a", world)
        return [int(found[name]["y"][0]) for name in tree]

    assert run_ranks(2, body) == [[0, 10, 11], [1, 10, 11]]
    px.checkpoint.verify(tmp_path / "a")


def test_values_of_single_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(world: px.Group) -> Any:
        mine = px.checkpoint.PerRank({"seed": world.rank, "state": np.arange(world.rank)})
        px.checkpoint.save(tmp_path / "a", {"random": mine}, world)
        found = px.checkpoint.load(tmp_path / "a", world)["random"]
        return found["seed"], found["state"].tolist()

    assert run_ranks(3, body) == [(0, []), (1, [0]), (2, [0, 1])]
    assert px.checkpoint.load(tmp_path / "a") == {"random": None}
    assert "random of" in caplog.text
    assert px.checkpoint.load(tmp_path / "a", like={"random": px.checkpoint.PerRank(5)}) == {"random": 5}


def test_latest_and_keep(tmp_path: Path) -> None:
    assert px.checkpoint.latest(tmp_path) is None
    assert px.checkpoint.latest(tmp_path / "nowhere") is None
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("stays")
    killed = tmp_path / "step-0"
    killed.mkdir()
    half = killed / "rank-00000-0123456789ab.safetensors"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    under_way = tmp_path / "of another job"
    under_way.mkdir()
    (under_way / half.name).write_bytes(b"half")
    (tmp_path / "a-link").symlink_to("step-5")
    for step in range(1, 6):
        px.checkpoint.save(tmp_path / f"step-{step}", {"step": step}, keep=2)
        assert px.checkpoint.latest(tmp_path) == tmp_path / f"step-{step}"
    assert sorted(os.listdir(tmp_path)) == ["a-link", "notes", "of another job", "step-4", "step-5"]
    with pytest.raises(px.UsageError, match="keep=0"):
        px.checkpoint.save(tmp_path / "x", {}, keep=0)


def test_a_new_one_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for step in range(3):
        run_ranks(2, lambda world, step=step: px.checkpoint.save(tmp_path / "a", {"x": np.full(5, step)}, world))
        assert px.checkpoint.load(tmp_path / "a")["x"].tolist() == [step] * 5
    assert len(os.listdir(tmp_path / "a")) == 2  # one file of the rank that wrote, and the index
