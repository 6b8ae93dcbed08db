from __future__ import annotations

import numpy as np
import pytest

from phalanx.algorithms import bruck

from .simulate import every_size, simulate


@every_size
@pytest.mark.parametrize("buffered", [False, True])
def test_barrier(size: int, buffered: bool) -> None:
    schedules = [bruck.barrier(rank, size) for rank in range(size)]
    report = simulate(schedules, np.zeros((size, 0)), buffered=buffered, seed=size)
    assert report.heard == [(1 << size) - 1] * size
    rounds = (size - 1).bit_length()
    assert report.rounds == rounds
    assert report.messages == [rounds] * size
    assert {len(schedule.steps) for schedule in schedules} == {rounds}


@every_size
def test_an_all_gather_sends_no_byte_twice(size: int) -> None:
    schedules = [bruck.all_gather(rank, size) for rank in range(size)]
    report = simulate(schedules, np.zeros((size, 3 * size)))
    assert report.sent == report.received == [(size - 1) * 3 * 8] * size
