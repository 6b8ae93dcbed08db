"""Every algorithm of every operation over real channels, forced by the option, with awkward numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.collectives import workers as worker_threads

import phalanx as px
from phalanx.config.algorithms import ALGORITHMS
from phalanx.group.engines.network import NetworkEngine
from phalanx.group.engines.steps import fast_path, run, transfers
from phalanx.testing import open_world

SIZES = [1, 2, 3, 5, 8]
COUNTS = [0, 1, 5, 4099, 300_001]
"""Elements: none, fewer than ranks, more than one piece of a chunk."""


class Workers(worker_threads.Workers):
    """Ranks of a mesh that are told which algorithm to use."""

    def run_with(self, algorithm: str, body: Callable[[px.Group], Any]) -> list[Any]:
        for group in self.groups:
            group._engine = NetworkEngine(group._collectives, is_star=False, algorithm=algorithm)
        return self.run(body)


OPTIONS = px.Options(transport="tcp")
HOW = ["as always", "in Python", "in Python, in odd pieces"]


@pytest.fixture(scope="module", params=[*((HOW[0], size) for size in SIZES), (HOW[1], 7), (HOW[2], 6)])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    how, size = request.param
    with pytest.MonkeyPatch.context() as patch, open_world(size, "mesh", options=OPTIONS) as backends:
        if how != HOW[0]:
            patch.setattr(fast_path, "start", lambda schedule, job: None)
        if how == HOW[2]:  # of which none ends with an element
            patch.setattr(run, "PIECE", 4999)
            patch.setattr(run, "LONG_PIECE", 4999)
            patch.setattr(transfers, "PIECE", 4999)
        groups = [px.Group(backend) for backend in backends]
        yield Workers(groups)
        for group in groups:
            group.close()


def inputs(size: int, count: int) -> list[np.ndarray]:
    """Values whose sum in float32 shows the order in which they were added."""
    rng = np.random.default_rng([size, count])
    return [(rng.uniform(-1, 1, count) * 10.0 ** rng.integers(-8, 8, count)).astype(np.float32) for _ in range(size)]


def same_bits(results: list[Any]) -> bool:
    return len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_all_reduce(workers: Workers, name: str) -> None:
    for count in COUNTS:
        data = inputs(workers.size, count)
        runs = [
            workers.run_with(f"all_reduce={name}", lambda group: group.all_reduce(data[group.rank].copy()))  # noqa: B023
            for _ in range(2)
        ]
        assert same_bits(runs[0] + runs[1])
        np.testing.assert_allclose(runs[0][0], np.sum(data, axis=0, dtype=np.float64), rtol=1e-3, atol=50)
        exact = [np.arange(count) * (rank + 1) for rank in range(workers.size)]
        for op, wanted in (("sum", np.sum(exact, axis=0)), ("max", exact[-1])):
            found = workers.run_with(f"all_reduce={name}", lambda group: group.all_reduce(exact[group.rank].copy(), op))  # noqa: B023
            assert all((result == wanted).all() for result in found)


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("op", ["min", "max", "sum"])
def test_nans_and_signed_zeros_have_the_same_bits_everywhere(workers: Workers, name: str, op: str) -> None:
    def body(group: px.Group) -> Any:
        odd = group.rank % 2
        bits = np.array([0x7FC00000 + group.rank + 1, 0xFFC00000 + group.rank + 1], np.uint32).view(np.float32)
        zeros = np.array([0.0, -0.0] if odd else [-0.0, 0.0], np.float32)
        return group.all_reduce(np.tile(np.concatenate([bits, zeros]), 9), op)

    assert same_bits(workers.run_with(f"all_reduce={name}", body))


@pytest.mark.parametrize("name", ALGORITHMS["reduce"])
def test_reduce(workers: Workers, name: str) -> None:
    for count in COUNTS:
        root = count % workers.size
        data = [np.arange(count) * (rank + 1) for rank in range(workers.size)]
        kept = [x.copy() for x in data]
        workers.run_with(f"reduce={name}", lambda group: group.reduce(data[group.rank], root))  # noqa: B023
        assert (data[root] == np.sum(kept, axis=0)).all()
        others = [rank for rank in range(workers.size) if rank != root]
        assert all((data[rank] == kept[rank]).all() for rank in others), "the other inputs stay as they are"


@pytest.mark.parametrize("name", ALGORITHMS["reduce_scatter"])
def test_reduce_scatter(workers: Workers, name: str) -> None:
    for count in COUNTS:
        data = [np.arange(count * workers.size) * (rank + 1) for rank in range(workers.size)]
        kept = [x.copy() for x in data]
        found = workers.run_with(f"reduce_scatter={name}", lambda group: group.reduce_scatter(data[group.rank]))  # noqa: B023
        assert (np.concatenate(found) == np.sum(kept, axis=0)).all()
        assert all((x == y).all() for x, y in zip(data, kept, strict=True)), "the inputs stay as they are"


@pytest.mark.parametrize("name", ALGORITHMS["all_gather"])
def test_all_gather(workers: Workers, name: str) -> None:
    for count in COUNTS:
        data = inputs(workers.size, count)
        found = workers.run_with(f"all_gather={name}", lambda group: group.all_gather(data[group.rank]))  # noqa: B023
        assert same_bits([*found, np.concatenate(data)])


@pytest.mark.parametrize("name", ALGORITHMS["all_to_all"])
def test_all_to_all(workers: Workers, name: str) -> None:
    size = workers.size
    for count in COUNTS[:4]:
        data = [np.arange(count * size) + 1_000_000 * rank for rank in range(size)]
        found = workers.run_with(f"all_to_all={name}", lambda group: group.all_to_all(data[group.rank]))  # noqa: B023
        for rank, result in enumerate(found):
            assert (result == np.concatenate([x[rank * count : (rank + 1) * count] for x in data])).all()
    counts = np.random.default_rng(size).integers(0, 4, (size, size))

    def uneven(group: px.Group) -> Any:
        mine = np.full(int(counts[group.rank].sum()), group.rank)
        return group.all_to_all(mine, send_counts=counts[group.rank].tolist())

    for rank, result in enumerate(workers.run_with(f"all_to_all={name}", uneven)):
        assert (result == np.repeat(np.arange(size), counts[:, rank])).all()


@pytest.mark.parametrize("name", ALGORITHMS["broadcast"])
def test_broadcast(workers: Workers, name: str) -> None:
    for count in COUNTS:
        for root in {0, workers.size - 1}:
            data = inputs(workers.size, count)
            found = workers.run_with(f"broadcast={name}", lambda group: group.broadcast(data[group.rank].copy(), root))  # noqa: B023
            assert same_bits([*found, data[root]])


@pytest.mark.parametrize("name", ALGORITHMS["barrier"])
def test_barrier(workers: Workers, name: str) -> None:
    arrived: list[int] = []

    def body(group: px.Group) -> int:
        arrived.append(group.rank)
        group.barrier()
        return len(arrived)

    assert workers.run_with(f"barrier={name}", body) == [workers.size] * workers.size
