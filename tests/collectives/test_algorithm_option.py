"""The option `algorithm` in real processes: each algorithm, with numbers of ranks that are no power of two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.config.algorithms import ALGORITHMS
from phalanx.testing import run_ranks

TURNS = max(map(len, ALGORITHMS.values()))


def everything(group: px.Group, count: int) -> list[Any]:
    n, rank = group.world_size, group.rank
    row = np.arange(count * n, dtype=np.float32) + rank
    group.barrier()
    found = [
        group.all_reduce(row.copy()),
        group.reduce_scatter(row),
        group.all_gather(row[:count]),
        group.all_to_all(row),
        group.broadcast(row.copy(), n - 1),
    ]
    return [result.tolist() for result in found]


def wanted(n: int, rank: int, count: int) -> list[Any]:
    rows = [np.arange(count * n, dtype=np.float32) + r for r in range(n)]
    total = np.sum(rows, axis=0)
    mine = slice(rank * count, (rank + 1) * count)
    found = [
        total,
        total[mine],
        np.concatenate([row[:count] for row in rows]),
        np.concatenate([row[mine] for row in rows]),
        rows[-1],
    ]
    return [result.tolist() for result in found]


@pytest.mark.parametrize(("turn", "n"), list(enumerate([3, 5, 6, 7][:TURNS])))
def test_each_algorithm(turn: int, n: int) -> None:
    # In as many turns as an operation has algorithms at most, each has had its turn.
    chosen = ",".join(f"{operation}={names[turn % len(names)]}" for operation, names in ALGORITHMS.items())
    env = {"PHALANX_ALGORITHM": chosen, "PHALANX_TRANSPORT": "tcp"}
    for count in (0, 1, 1000):
        assert run_ranks(n, everything, count, backend="mesh", env=env) == [wanted(n, r, count) for r in range(n)]


def test_ranks_that_were_told_to_use_different_ones() -> None:
    def body(group: px.Group) -> str:
        from phalanx.group.engines.network import NetworkEngine

        name = "ring" if group.rank else "halving_doubling"
        group._engine = NetworkEngine(group._collectives, is_star=False, algorithm=f"all_reduce={name}")
        with pytest.raises(px.Desync):
            group.all_reduce(np.ones(8), timeout=20)
        return "told"

    assert run_ranks(2, body, backend="mesh", env={"PHALANX_TRANSPORT": "tcp"}) == ["told"] * 2


def test_a_wrong_one_is_refused_before_anything_else() -> None:
    with pytest.raises(px.ConfigError, match=r"PHALANX_ALGORITHM.*all_reduce=doubling\|halving_doubling\|ring"):
        px.Options.from_env({"PHALANX_ALGORITHM": "all_reduce=fast"})
