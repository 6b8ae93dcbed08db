"""The simulator sees what it is there to see."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.algorithms import Recv, Schedule, Send, Step

from .simulate import Deadlock, Unmatched, check_overlap, simulate, wild_floats


def schedule(*steps: Step) -> Schedule:
    return Schedule(1, steps)


def test_send_before_receive_needs_buffers() -> None:
    worlds = [schedule(Step(sends=(Send(peer, 0),)), Step(recvs=(Recv(peer, 0),))) for peer in (1, 0)]
    buffers = np.array([[1], [2]])
    simulate(worlds, buffers, buffered=True)
    assert buffers.tolist() == [[2], [1]]
    with pytest.raises(Deadlock, match=r"rank 0 in Step\(sends.*rank 1 in Step"):
        simulate(worlds, buffers, buffered=False)


def test_a_receive_that_nobody_serves() -> None:
    for buffered in (False, True):
        with pytest.raises(Deadlock, match="rank 1 in"):
            simulate([schedule(), schedule(Step(recvs=(Recv(0, 0),)))], np.zeros((2, 1)), buffered=buffered)


def test_a_send_that_nobody_receives() -> None:
    worlds = [schedule(Step(sends=(Send(1, 0),))), schedule()]
    with pytest.raises(Unmatched, match="rank 1 never received"):
        simulate(worlds, np.zeros((2, 1)), buffered=True)
    with pytest.raises(Deadlock, match="rank 0 in"):
        simulate(worlds, np.zeros((2, 1)), buffered=False)


def test_a_message_expected_as_another_chunk() -> None:
    worlds = [Schedule(2, (Step(sends=(Send(1, 0),)),)), Schedule(2, (Step(recvs=(Recv(0, 1),)),))]
    with pytest.raises(Unmatched, match="expected"):
        simulate(worlds, np.zeros((2, 2)))


def test_a_result_that_depends_on_the_order_differs_from_seed_to_seed() -> None:
    root = schedule(Step(recvs=tuple(Recv(peer, 0, reduce=True) for peer in range(1, 9))))
    others = [schedule(Step(sends=(Send(0, 0),)))] * 8
    results = set()
    for seed in range(8):
        buffers = wild_floats(9, 20)
        simulate([root, *others], buffers, seed=seed)
        results.add(buffers[0].tobytes())
    assert len(results) > 1
    with pytest.raises(AssertionError):
        check_overlap(root)


def test_a_step_that_sends_what_it_writes() -> None:
    with pytest.raises(AssertionError):
        check_overlap(schedule(Step((Send(1, 0),), (Recv(1, 0),))))


def test_hearsay_does_not_travel_within_a_step() -> None:
    worlds = [
        schedule(Step(sends=(Send(1, 0),))),
        schedule(Step((Send(2, 0),), (Recv(0, 0),))),
        schedule(Step(recvs=(Recv(1, 0),))),
    ]
    for seed in range(4):
        assert simulate(worlds, np.zeros((3, 0)), seed=seed).heard == [0b001, 0b011, 0b110]
