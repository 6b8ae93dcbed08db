"""Collectives on objects of any length, on the core's fast path and beside it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.group.verbs.objects import HEADER, LONG_BLOCK, SHORT_BLOCK
from phalanx.testing import run_ranks

EDGES = (SHORT_BLOCK - HEADER.size, LONG_BLOCK - HEADER.size)


@dataclasses.dataclass
class Config:
    depth: int


def an_object(chosen: random.Random) -> Any:
    """Of any length; those that just fit a block, or just do not, among them."""
    kind = chosen.randrange(6)
    if kind == 0:
        return {"loss": chosen.random(), "step": chosen.randrange(1000)}
    if kind == 1:
        return "x" * (chosen.choice(EDGES) + chosen.randrange(-6, 3))
    if kind == 2:
        return np.arange(chosen.randrange(40), dtype=np.int16)
    if kind == 3:
        return [np.ones(chosen.randrange(300_000), np.float32), "and more"]
    return None if kind == 4 else (chosen.randrange(9), {1, 2})


def as_text(obj: Any) -> str:
    if isinstance(obj, np.ndarray):
        return f"{obj.dtype}{obj.shape}{obj.tobytes()[:100]!r}{obj.sum()}"
    return str([as_text(one) for one in obj]) if isinstance(obj, list) else repr(obj)


def all_verbs(group: px.Group, turns: int, seed: int, general: bool) -> list[str]:
    """What is wrong."""
    chosen = random.Random(seed)
    rank, size = group.rank, group.world_size
    wrong: list[str] = []
    for turn in range(turns):
        objects = [an_object(chosen) for _ in range(size)]
        root, verb = chosen.randrange(size), chosen.randrange(4)
        later = general and (turn + rank) % 3 == 0  # not on all ranks

        def done(result: Any, waits: bool = later) -> Any:
            return result.wait() if waits else result

        if verb == 0:
            got = done(group.broadcast_object(objects[root] if rank == root else "not looked at", root, async_op=later))
            right = as_text(got) == as_text(objects[root])
        elif verb == 1:
            got = done(group.all_gather_object(objects[rank], async_op=later))
            right = list(map(as_text, got)) == list(map(as_text, objects))
        elif verb == 2:
            got = done(group.gather_object(objects[rank], root, async_op=later))
            right = got is None if rank != root else list(map(as_text, got)) == list(map(as_text, objects))
        else:
            got = done(group.scatter_object(objects if rank == root else None, root, async_op=later))
            right = as_text(got) == as_text(objects[rank])
        if not right:
            wrong.append(f"turn {turn}, verb {verb}: {as_text(got)[:100]}")
    return wrong


@pytest.mark.parametrize("general", [False, True], ids=["fast", "some asynchronous"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_lengths_arrive(n: int, general: bool) -> None:
    assert run_ranks(n, all_verbs, 120, 7 * n + general, general, backend="mesh") == [[]] * n


def by_the_core(group: px.Group) -> list[Any]:
    group.barrier()

    def refuse_general_way(*_: Any, **__: Any) -> Any:
        raise AssertionError("not on the fast path")

    group._run = refuse_general_way  # type: ignore[method-assign]
    rank, long = group.rank, "y" * 5000
    return [
        group.broadcast_object(long if rank == 0 else None, 0, timeout=20) == long,
        group.all_gather_object({"rank": rank}),
        group.gather_object(rank, 1),
        group.scatter_object(["a", long], 0) if rank == 0 else group.scatter_object(None, 0) == long,
    ]


@pytest.mark.skipif(not _native.available, reason="the fast path needs the core (PHALANX_PURE is set)")
def test_the_core_takes_all_of_them() -> None:
    ranks = [{"rank": 0}, {"rank": 1}]
    assert run_ranks(2, by_the_core, backend="mesh") == [[True, ranks, None, "a"], [True, ranks, [0, 1], True]]


def typed(group: px.Group) -> list[Any]:
    given = Config(3) if group.rank == 0 else None
    if group.rank == 0:
        group.broadcast_object(given, 0)
    else:
        with pytest.raises(px.UsageError, match="type=Config"):
            group.broadcast_object(given, 0)
    return group.all_gather_object(Config(group.rank), type=Config)


def test_one_that_is_refused_breaks_nothing() -> None:
    assert run_ranks(2, typed, backend="mesh") == [[Config(0), Config(1)]] * 2


def differ(group: px.Group) -> str:
    group.barrier()
    verb: Any = group.all_gather_object if group.rank == 0 else group.all_gather
    with pytest.raises(px.Desync) as failed:
        verb("an object" if group.rank == 0 else np.zeros(4), timeout=10)
    return str(failed.value)


def test_a_verb_for_arrays_does_not_meet_one_for_objects() -> None:
    said = run_ranks(2, differ, backend="mesh")
    assert all("all_gather_object" in words for words in said)
