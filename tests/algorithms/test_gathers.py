"""Gather, scatter, all_gather, reduce_scatter and all_to_all: one chunk per rank, or per pair of ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from phalanx.algorithms import (
    Schedule,
    Step,
    bruck,
    chunk_bounds,
    halving_doubling,
    linear,
    pairwise,
    ring,
    star,
    telling,
    tree,
)

from .simulate import Report, check_overlap, counts, every_size, integers, simulate, some_sizes, wild_floats


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


@every_size
@pytest.mark.parametrize("algorithm", [tree, linear], ids=["tree", "linear"])
def test_a_scatter_with_a_slot(algorithm: ModuleType, size: int) -> None:
    """Everybody hears the slot once, and passes it on with what else it sends; the scatter itself is as without."""
    for root in some_roots(size):
        hears, whole = [], []
        for rank in range(size):
            heard = telling.hear(rank, size, root)
            alone = algorithm.scatter(rank, size, root)
            with_slot = telling.with_slot(alone, rank, size, root)
            passed_on = telling.pass_on(rank, size, root)
            sends = [send for step in passed_on.steps for send in step.sends]
            without = [Step(tuple(s for s in step.sends if s.chunk != size), step.recvs) for step in with_slot.steps]
            assert Schedule.of(without, parts=size) == alone
            assert [send for step in with_slot.steps for send in step.sends if send.chunk == size] == sends
            for step in with_slot.steps:  # to each rank the slot comes first
                for send in sends:
                    to_it = [other.chunk for other in step.sends if other.peer == send.peer]
                    assert size not in to_it[1:]
            assert len(heard.steps) == (rank != root)
            hears.append(heard)
            whole.append(Schedule(size + 1, (*heard.steps, *with_slot.steps)))

        def scattered(before: np.ndarray, after: np.ndarray, root: int = root) -> None:
            for rank in range(size):
                assert after[rank, rank] == before[root, rank]
                assert after[rank, size] == before[root, size]

        run(whole, size + 1, scattered, seed=size)


@every_size
def test_what_a_scatter_takes_through_a_rank(size: int) -> None:
    for root in some_roots(size):
        for rank in range(size):
            below = tree.below(rank, size, root)
            steps = tree.scatter(rank, size, root).steps
            received = [recv.chunk for step in steps for recv in step.recvs]
            assert received == ([] if rank == root else [rank, *below])
            assert sorted(send.chunk for step in steps for send in step.sends) == sorted(below)
        assert len(tree.below(root, size, root)) == size - 1


@every_size
def test_a_scatter_along_the_tree(size: int) -> None:
    for root in some_roots(size):
        for i, count in enumerate(counts(size)):
            bounds = chunk_bounds(count, size)

            def scattered(before: np.ndarray, after: np.ndarray, bounds: list = bounds, root: int = root) -> None:
                for rank, (start, stop) in enumerate(bounds):
                    assert (after[rank, start:stop] == before[root, start:stop]).all()

            report = run([tree.scatter(rank, size, root) for rank in range(size)], count, scattered, seed=i + size)
            assert report.rounds == max(v.bit_count() for v in range(size))


@every_size
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


def log2_up(size: int) -> int:
    return (size - 1).bit_length()


ROUNDS: dict[ModuleType, Callable[[int], int]] = {
    ring: lambda size: size - 1,
    star: lambda size: 2 if size > 2 else size - 1,
    linear: lambda size: min(size - 1, 1),
    bruck: log2_up,
    halving_doubling: lambda size: size.bit_length() - 1 + (2 if size & (size - 1) else 0),
}
"""Messages one after another, of an all_gather or reduce_scatter."""


@every_size
@pytest.mark.parametrize("algorithm", ROUNDS, ids=lambda module: module.__name__.split(".")[-1])
def test_all_gather(algorithm: ModuleType, size: int) -> None:
    schedules = [algorithm.all_gather(rank, size) for rank in range(size)]
    if algorithm is star:
        assert talks_to_rank_0_only(schedules)
    for i, count in enumerate(counts(size)):
        bounds = chunk_bounds(count, size)

        def gathered(before: np.ndarray, after: np.ndarray, bounds: list = bounds) -> None:
            for rank, (start, stop) in enumerate(bounds):
                assert (after[:, start:stop] == before[rank, start:stop]).all()

        report = run(schedules, count, gathered, seed=i + size)
        if algorithm is not star:
            assert report.rounds == ROUNDS[algorithm](size)


@every_size
@pytest.mark.parametrize("algorithm", [ring, star, halving_doubling], ids=["ring", "star", "halving_doubling"])
def test_reduce_scatter(algorithm: ModuleType, size: int) -> None:
    schedules = [algorithm.reduce_scatter(rank, size) for rank in range(size)]
    if algorithm is star:
        assert talks_to_rank_0_only(schedules)
    for i, count in enumerate(counts(size)):
        bounds = chunk_bounds(count, size)

        def reduced(before: np.ndarray, after: np.ndarray, bounds: list = bounds) -> None:
            for rank, (start, stop) in enumerate(bounds):
                assert (after[rank, start:stop] == before[:, start:stop].sum(axis=0)).all()

        report = run(schedules, count, reduced, seed=i + size + 1)
        if algorithm is not star:
            assert report.rounds == ROUNDS[algorithm](size)


@pytest.mark.parametrize("size", [2**i for i in range(7)])
def test_halving_and_doubling_move_as_few_bytes_as_the_ring(size: int) -> None:
    for verb in ("all_gather", "reduce_scatter", "all_reduce"):
        moved = []
        for algorithm in (ring, halving_doubling):
            schedules = [getattr(algorithm, verb)(rank, size) for rank in range(size)]
            report = simulate(schedules, integers(size, 3 * size))
            moved.append((report.sent, report.received))
        assert moved[0] == moved[1]


@some_sizes
def test_reduce_scatter_has_the_same_bits_in_every_run(size: int) -> None:
    for algorithm in (ring, star, halving_doubling):
        results = set()
        for seed in range(2):
            buffers = wild_floats(size, 2 * size + 1)
            simulate([algorithm.reduce_scatter(r, size) for r in range(size)], buffers, buffered=bool(seed), seed=seed)
            bounds = chunk_bounds(2 * size + 1, size)
            results.add(b"".join(buffers[rank, start:stop].tobytes() for rank, (start, stop) in enumerate(bounds)))
        assert len(results) == 1


@every_size
def test_star_reduce(size: int) -> None:
    for root in some_roots(size):
        schedules = [star.reduce(rank, size, root) for rank in range(size)]
        assert talks_to_rank_0_only(schedules)

        def reduced(before: np.ndarray, after: np.ndarray, root: int = root) -> None:
            assert (after[root] == before.sum(axis=0)).all()

        run(schedules, size + 1, reduced, seed=size)


@every_size
@pytest.mark.parametrize("algorithm", [pairwise, star, bruck, linear], ids=["pairwise", "star", "bruck", "linear"])
def test_all_to_all(algorithm: ModuleType, size: int) -> None:
    schedules = [algorithm.all_to_all(rank, size) for rank in range(size)]
    if algorithm is star:
        assert talks_to_rank_0_only(schedules)
    for count in (size * size, size * size // 2) if size <= 16 else (size * size // 2,):

        def exchanged(before: np.ndarray, after: np.ndarray, count: int = count) -> None:
            lengths = [stop - start for start, stop in chunk_bounds(count, size * size)]
            source, target = np.divmod(np.repeat(np.arange(size * size), lengths), size)
            elements = np.arange(count)
            assert (after[target, elements] == before[source, elements]).all()

        report = run(schedules, count, exchanged, seed=size)
        rounds = {pairwise: size - 1, bruck: log2_up(size), linear: min(size - 1, 1), star: 2 if size > 1 else 0}
        assert report.rounds == rounds[algorithm]


@every_size
def test_what_bruck_takes_through_a_rank(size: int) -> None:
    for rank in range(size):
        held = {rank * size + peer for peer in range(size)} | bruck.passing(rank, size)
        for step in bruck.all_to_all(rank, size).steps:
            assert len(step.sends) <= -(-size // 2)
            assert {send.chunk for send in step.sends} <= held
            held |= {recv.chunk for recv in step.recvs}
        assert {peer * size + rank for peer in range(size)} <= held
        assert not any(chunk // size == rank or chunk % size == rank for chunk in bruck.passing(rank, size))


def test_tree_reduce_and_ring_agree_with_the_definition_of_all_reduce() -> None:
    size = 6
    buffers = integers(size, 11)
    wanted = buffers.sum(axis=0)
    simulate([tree.reduce(rank, size, 4) for rank in range(size)], buffers)
    assert (buffers[4] == wanted).all()
