"""Objects as messages: data by a safe codec, everything else only where both sides ask for it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import fractions
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

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


@dataclasses.dataclass
class Layer:
    """A dataclass with an array in it."""

    name: str
    weights: npt.NDArray[Any]
    bias: npt.NDArray[Any] | None = None


class Mode(enum.Enum):
    """An enum."""

    TRAIN = "train"
    TEST = "test"


class Model(msgspec.Struct):
    """A Struct with dataclasses and an enum in it."""

    layers: list[Layer]
    mode: Mode = Mode.TRAIN
    step: int = 0


class Narrow(msgspec.Struct, forbid_unknown_fields=True):
    """One that refuses what it does not know."""

    mode: Mode


def model_of(rank: int) -> Model:
    """A model that only this rank has."""
    layers = [Layer("a", np.arange(rank + 1)), Layer("b", np.full((2, 3), rank, np.float32), np.zeros(3))]
    return Model(layers, Mode.TEST, rank)


def is_model_of(found: Any, rank: int) -> bool:
    """Whether it is, in values and types."""
    assert type(found) is Model
    assert [type(layer) for layer in found.layers] == [Layer, Layer]
    a, b = found.layers
    return (
        (found.mode, found.step, a.bias) == (Mode.TEST, rank, None)
        and np.array_equal(a.weights, np.arange(rank + 1))
        and np.array_equal(b.weights, np.full((2, 3), rank, np.float32))
        and b.bias is not None
        and b.bias.shape == (3,)
    )


@check(ranks=3)
def typed_objects(backend: Any) -> None:
    """Dataclasses, Structs and members of an enum arrive as the types that the receivers name."""
    with Group(backend) as group:
        me = group.rank
        found = group.broadcast_object(model_of(1) if me == 1 else None, 1, type=Model)
        assert is_model_of(found, 1)
        assert all(is_model_of(one, rank) for rank, one in enumerate(group.all_gather_object(model_of(me), type=Model)))
        gathered = group.gather_object(model_of(me), 2, type=Model)
        assert (gathered is None) == (me != 2)
        assert all(is_model_of(one, rank) for rank, one in enumerate(gathered or []))
        assert is_model_of(
            group.scatter_object([model_of(r) for r in range(3)] if me == 0 else None, 0, type=Model), me
        )
        for a, b in pairs(backend):
            if me == a:
                group.send_object([model_of(a), model_of(b)], b)
            elif me == b:
                both = group.recv_object(a, type=list[Model])
                assert is_model_of(both[0], a)
                assert is_model_of(both[1], b)
        assert group.all_gather_object(Mode(("train", "test")[me % 2]), type=Mode, async_op=True).wait()[1] is Mode.TEST


@check(ranks=2)
def types_that_do_not_fit(backend: Any) -> None:
    """A receiver that names no type or another is told so; the group goes on."""
    with Group(backend) as group:
        me = group.rank
        value = model_of(0) if me == 0 else None

        def refused(words: str, call: Callable[[], object]) -> None:
            if me == 0:
                call()
            else:
                error = expect(UsageError, call)
                assert words in str(error), error

        refused("type=Model", lambda: group.broadcast_object(value, 0))
        refused("Mode", lambda: group.broadcast_object({"mode": Mode.TEST} if me == 0 else None, 0))
        refused("rank 0", lambda: group.broadcast_object(value, 0, type=(Model, Layer)[me]))
        refused(
            "rank 0", lambda: group.broadcast_object({"mode": "other"} if me == 0 else None, 0, type=(dict, Narrow)[me])
        )
        refused("unknown field", lambda: group.broadcast_object(value, 0, type=(Model, Narrow)[me]))
        # A type without that field leaves it out.
        small = group.broadcast_object({"layers": [], "more": 1} if me == 0 else None, 0, type=(dict, Model)[me])
        assert small == ({"layers": [], "more": 1}, Model([]))[me]
        if me == 0:
            group.send_object(value, 1)
            group.send_object(value, 1)
        else:
            assert "type=Model" in str(expect(UsageError, group.recv_object, 0))
            assert "rank 0" in str(expect(UsageError, group.recv_object, 0, type=Layer))
        for kind in ("Model", 3):
            expect(UsageError, group.all_gather_object, value, type=kind)
        expect(UsageError, group.all_gather_object, model_of(0), type=Model, allow_pickle=True)
        expect(UsageError, group.all_gather_object, {"layers": []}, type=Model)
        # Pickles are as they were: nobody has to name a type.
        modes = group.all_gather_object(Mode.TEST, allow_pickle=True)
        assert modes == [Mode.TEST, Mode.TEST]
