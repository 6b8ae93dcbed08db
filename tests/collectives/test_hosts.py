"""Groups over several hosts: a segment inside each, the network between them.

Real processes, segments and sockets; only who counts as a neighbour is said by the test. tests/hosts has real hosts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.errors import Desync, PhalanxError
from phalanx.group.engines.hosts import HostEngine
from phalanx.testing import run_ranks

LAYOUTS = ["0011", "0101", "00011", "0110", "012", "011", "00122", "0001110"]


def place(world: px.Group, layout: str) -> px.Group:
    """The whole world as a new group, in which the digits of `layout` say who is on which host."""
    world.backend.memory_ids = tuple(layout)
    return world.subgroup(range(world.world_size))


def everything(world: px.Group, layout: str) -> dict[str, Any]:
    group = place(world, layout)
    n, rank = group.world_size, group.rank
    found: dict[str, Any] = {}
    for count in (0, 1, 5, 100, 40_000):
        x = np.arange(count, dtype=np.int64) * 7 + rank
        y = group.all_reduce(x.copy())
        found[f"all_reduce {count}"] = y
        found[f"mean {count}"] = group.all_reduce(x.astype(np.float32), op="mean")
        for root in {0, n - 1}:
            found[f"broadcast {count} {root}"] = group.broadcast(x.copy(), root)
            z = x.copy()
            found[f"reduce {count} {root}"] = group.reduce(z, root, op="max")
            found[f"gather {count} {root}"] = group.gather(x, root)
            parts = np.arange(n * count, dtype=np.int64) * (1 + root)
            found[f"scatter {count} {root}"] = group.scatter(parts if rank == root else None, root)
        found[f"all_gather {count}"] = group.all_gather(x)
        rows = np.arange(n * count, dtype=np.int64).reshape(n, count) + 1000 * rank
        found[f"reduce_scatter {count}"] = group.reduce_scatter(rows)
        found[f"reduce_scatter mean {count}"] = group.reduce_scatter(rows.astype(np.float64), op="mean")
        found[f"all_to_all {count}"] = group.all_to_all(rows)
    found["objects"] = group.all_gather_object({"rank": rank, "words": ["x"] * rank})
    group.barrier()
    found["engine"] = type(group._engine).__name__
    group.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation(layout: str) -> None:
    n = len(layout)
    results = run_ranks(n, everything, layout, backend="mesh")
    hosts = {layout.count(digit) for digit in layout}
    shares = max(hosts) > 1 and _native.available
    assert {found["engine"] for found in results} == {"HostEngine" if shares else "NetworkEngine"}
    for count in (0, 1, 5, 100, 40_000):
        base = np.arange(count, dtype=np.int64) * 7
        stacked = np.concatenate([base + rank for rank in range(n)])
        for rank, found in enumerate(results):
            np.testing.assert_array_equal(found[f"all_reduce {count}"], base * n + n * (n - 1) // 2)
            np.testing.assert_allclose(found[f"mean {count}"], base + (n - 1) / 2, rtol=1e-6)
            np.testing.assert_array_equal(found[f"mean {count}"], results[0][f"mean {count}"])
            for root in {0, n - 1}:
                np.testing.assert_array_equal(found[f"broadcast {count} {root}"], base + root)
                expected = base + (n - 1 if rank == root else rank)
                np.testing.assert_array_equal(found[f"reduce {count} {root}"], expected)
                gathered = found[f"gather {count} {root}"]
                assert (gathered is None) == (rank != root)
                if gathered is not None:
                    np.testing.assert_array_equal(gathered, stacked)
                parts = np.arange(n * count, dtype=np.int64) * (1 + root)
                np.testing.assert_array_equal(found[f"scatter {count} {root}"].reshape(-1), np.split(parts, n)[rank])
            np.testing.assert_array_equal(found[f"all_gather {count}"], stacked)
            rows = np.arange(n * count, dtype=np.int64).reshape(n, count)
            total = rows[rank] * n + 1000 * n * (n - 1) // 2
            np.testing.assert_array_equal(found[f"reduce_scatter {count}"].reshape(-1), total)
            np.testing.assert_allclose(found[f"reduce_scatter mean {count}"].reshape(-1), total / n)
            columns = np.stack([rows[rank] + 1000 * other for other in range(n)])
            np.testing.assert_array_equal(found[f"all_to_all {count}"], columns)
    for found in results:
        assert found["objects"] == [{"rank": rank, "words": ["x"] * rank} for rank in range(n)]


def differ(world: px.Group, odd: int) -> str:
    group = place(world, "0011")
    assert group.barrier() is None
    assert isinstance(group._engine, HostEngine) == _native.available
    try:
        if world.rank == odd:
            group.all_reduce(np.ones(10), timeout=10.0)
        else:
            group.all_reduce(np.ones(20), timeout=10.0)
    except PhalanxError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("odd", [0, 3])
def test_a_mismatch_is_found_on_all_hosts(odd: int) -> None:
    assert run_ranks(4, differ, odd, backend="mesh") == [Desync.__name__] * 4
