"""Prefix reductions, for every number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.algorithms import scan

from .simulate import every_size, simulate


@every_size
@pytest.mark.parametrize("buffered", [False, True])
def test_inclusive(size: int, buffered: bool) -> None:
    buffers = np.random.default_rng(size).integers(0, 100, (size, 3)).astype(np.float64)
    wanted = np.cumsum(buffers, axis=0)
    report = simulate([scan.inclusive(rank, size) for rank in range(size)], buffers, buffered=buffered, seed=size)
    assert (buffers == wanted).all()
    assert report.rounds == (size - 1).bit_length()
    assert max(report.sent) <= 24 * (size - 1).bit_length()


@every_size
def test_the_ranks_below_the_first_have_nothing_to_do(size: int) -> None:
    buffers = np.arange(1.0, size + 1)[:, None]
    wanted = np.concatenate([buffers[:1], np.cumsum(buffers[1:], axis=0)])
    report = simulate([scan.inclusive(rank, size, 1) for rank in range(size)], buffers, seed=size)
    assert (buffers == wanted).all()
    assert report.messages[0] == 0
    assert report.rounds == max(0, size - 2).bit_length()


@every_size
def test_operands_are_combined_in_the_order_of_ranks(size: int) -> None:
    # The first of two is an operation whose result shows the order: rank r ends with the value of rank 0.
    buffers = np.arange(1.0, size + 1)[:, None]
    simulate([scan.inclusive(rank, size) for rank in range(size)], buffers, op=_first, seed=size)
    assert (buffers == 1).all()


def _first(mine: np.ndarray, received: np.ndarray, out: np.ndarray) -> None:
    out[...] = mine


@every_size
def test_pass_on(size: int) -> None:
    buffers = np.zeros((size, size))
    np.fill_diagonal(buffers, np.arange(1, size + 1))
    report = simulate([scan.pass_on(rank, size) for rank in range(size)], buffers, seed=size)
    assert [buffers[rank, rank - 1] for rank in range(1, size)] == list(range(1, size))
    assert report.messages == [1] * (size - 1) + [0]
