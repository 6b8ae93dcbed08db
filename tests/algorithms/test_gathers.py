"""Gather, scatter, all_gather, reduce_scatter and all_to_all: one chunk per rank, or per pair of ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from phalanx.algorithms import Schedule, chunk_bounds, linear, pairwise, ring, star, tree

from .simulate import SIZES, Report, check_overlap, counts, integers, simulate, wild_floats


def run(schedules: list[Schedule], count: int, check: Callable[[np.ndarray, np.ndarray], None], *, seed: int) -> Report:
    """Runs the schedules on random buffers and hands the buffers before and after to `check`."""
    for schedule in schedules:
        check_overlap(schedule)
    before = integers(len(schedules), count)
    after = before.copy()
    report = simulate(schedules, after, buffered=bool(seed % 2), seed=seed)
    check(before, after)
    return report


def talks_to_rank_0_only(schedules: list[Schedule]) -> bool:
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            for transfer in (*step.sends, *step.recvs):
                if rank and transfer.peer:
                    return False
    return True


def some_roots(size: int) -> list[int]:
    return sorted({0, 1 % size, size // 2, size - 1})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", [linear, star], ids=["linear", "star"])
def test_gather_and_scatter(algorithm: ModuleType, size: int) -> None:
    for root in some_roots(size):
        gathers = [algorithm.gather(rank, size, root) for rank in range(size)]
        scatters = [algorithm.scatter(rank, size, root) for rank in range(size)]
        if algorithm is star:
            assert talks_to_rank_0_only(gathers)
            assert talks_to_rank_0_only(scatters)
        for i, count in enumerate(counts(size)):
            bounds = chunk_bounds(count, size)

            def gathered(before: np.ndarray, after: np.ndarray, bounds: list = bounds, root: int = root) -> None:
                for rank, (start, stop) in enumerate(bounds):
                    assert (after[root, start:stop] == before[rank, start:stop]).all()

            def scattered(before: np.ndarray, after: np.ndarray, bounds: list = bounds, root: int = root) -> None:
                for rank, (start, stop) in enumerate(bounds):
                    assert (after[rank, start:stop] == before[root, start:stop]).all()

            report = run(gathers, count, gathered, seed=i + size)
            assert report.rounds == (0 if size == 1 else 2 if algorithm is star and root and size > 2 else 1)
            run(scatters, count, scattered, seed=i + size + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", [ring, star], ids=["ring", "star"])
def test_all_gather_and_reduce_scatter(algorithm: ModuleType, size: int) -> None:
    gathers = [algorithm.all_gather(rank, size) for rank in range(size)]
    reductions = [algorithm.reduce_scatter(rank, size) for rank in range(size)]
    if algorithm is star:
        assert talks_to_rank_0_only(gathers)
        assert talks_to_rank_0_only(reductions)
    for i, count in enumerate(counts(size)):
        bounds = chunk_bounds(count, size)

        def gathered(before: np.ndarray, after: np.ndarray, bounds: list = bounds) -> None:
            for rank, (start, stop) in enumerate(bounds):
                assert (after[:, start:stop] == before[rank, start:stop]).all()

        def reduced(before: np.ndarray, after: np.ndarray, bounds: list = bounds) -> None:
            for rank, (start, stop) in enumerate(bounds):
                assert (after[rank, start:stop] == before[:, start:stop].sum(axis=0)).all()

        report = run(gathers, count, gathered, seed=i + size)
        if algorithm is ring:
            assert report.rounds == size - 1
        run(reductions, count, reduced, seed=i + size + 1)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_has_the_same_bits_in_every_run(size: int) -> None:
    for algorithm in (ring, star):
        results = set()
        for seed in range(2):
            buffers = wild_floats(size, 2 * size + 1)
            simulate([algorithm.reduce_scatter(r, size) for r in range(size)], buffers, buffered=bool(seed), seed=seed)
            bounds = chunk_bounds(2 * size + 1, size)
            results.add(b"".join(buffers[rank, start:stop].tobytes() for rank, (start, stop) in enumerate(bounds)))
        assert len(results) == 1


@pytest.mark.parametrize("size", SIZES)
def test_star_reduce(size: int) -> None:
    for root in some_roots(size):
        schedules = [star.reduce(rank, size, root) for rank in range(size)]
        assert talks_to_rank_0_only(schedules)

        def reduced(before: np.ndarray, after: np.ndarray, root: int = root) -> None:
            assert (after[root] == before.sum(axis=0)).all()

        run(schedules, size + 1, reduced, seed=size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64])
@pytest.mark.parametrize("algorithm", [pairwise, star], ids=["pairwise", "star"])
def test_all_to_all(algorithm: ModuleType, size: int) -> None:
    schedules = [algorithm.all_to_all(rank, size) for rank in range(size)]
    if algorithm is star:
        assert talks_to_rank_0_only(schedules)
    for count in (size * size, size * size // 2):

        def exchanged(before: np.ndarray, after: np.ndarray, count: int = count) -> None:
            bounds = chunk_bounds(count, size * size)
            for source in range(size):
                for target in range(size):
                    start, stop = bounds[source * size + target]
                    assert (after[target, start:stop] == before[source, start:stop]).all()

        report = run(schedules, count, exchanged, seed=size)
        assert report.rounds == (size - 1 if algorithm is pairwise else 2 if size > 1 else 0)


def test_tree_reduce_and_ring_agree_with_the_definition_of_all_reduce() -> None:
    size = 6
    buffers = integers(size, 11)
    wanted = buffers.sum(axis=0)
    simulate([tree.reduce(rank, size, 4) for rank in range(size)], buffers)
    assert (buffers[4] == wanted).all()
