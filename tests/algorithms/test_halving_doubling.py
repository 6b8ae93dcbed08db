from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from phalanx.algorithms import Schedule, halving_doubling

from .simulate import MANY, check_overlap, counts, every_size, integers, simulate, some_sizes, wild_floats

ALL_REDUCES = [halving_doubling.all_reduce, halving_doubling.short_all_reduce]
Make = Callable[[int, int], Schedule]


def rounds(size: int) -> int:
    """log2 of the ranks that take part, and two more where not all do."""
    return size.bit_length() - 1 + (2 if size & (size - 1) else 0)


@every_size
@pytest.mark.parametrize("make", ALL_REDUCES)
def test_all_reduce(make: Make, size: int) -> None:
    schedules = [make(rank, size) for rank in range(size)]
    for schedule in schedules:
        check_overlap(schedule)
    short = make is halving_doubling.short_all_reduce
    for i, count in enumerate(counts(size)):
        for buffered in (False, True):
            buffers = integers(size, count)
            wanted = buffers.sum(axis=0)
            report = simulate(schedules, buffers, buffered=buffered, seed=size + i)
            assert (buffers == wanted).all()
            if short:
                assert report.rounds == rounds(size)
                if size & (size - 1) == 0:
                    assert report.sent == report.received == [rounds(size) * wanted.nbytes] * size
            else:
                assert report.rounds == rounds(size) + size.bit_length() - 1


@some_sizes
@pytest.mark.parametrize("make", ALL_REDUCES)
def test_all_ranks_have_the_same_bits_in_every_run(make: Make, size: int) -> None:
    schedules = [make(rank, size) for rank in range(size)]
    results = set()
    for seed in range(4 if size <= MANY else 2):
        buffers = wild_floats(size, 33)
        simulate(schedules, buffers, buffered=bool(seed % 2), seed=seed)
        results |= {buffer.tobytes() for buffer in buffers}
    assert len(results) == 1


@every_size
def test_a_short_all_reduce_combines_neighbours_in_the_order_of_ranks_everywhere(size: int) -> None:
    # With text there is no way to change the operands' places unseen, as there is not with a NaN or a signed zero.
    buffers = np.array([[f"{rank} "] for rank in range(size)], dtype=object)
    simulate([halving_doubling.short_all_reduce(rank, size) for rank in range(size)], buffers)
    assert [row[0].split() for row in buffers] == [[str(rank) for rank in range(size)]] * size


def test_nans_and_signed_zeros_are_the_same_on_all_ranks() -> None:
    def first_wins(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """As a processor whose minimum of two zeros, or sum of two NaNs, is the first operand."""
        out[...] = np.where(a == b, a, np.minimum(a, b))

    for size in range(1, 17):
        buffers = np.array([[0.0 if rank % 2 else -0.0, float(rank)] for rank in range(size)], dtype=object)
        simulate([halving_doubling.short_all_reduce(r, size) for r in range(size)], buffers, op=first_wins)
        assert {str(row[0]) for row in buffers} == {"-0.0"}
