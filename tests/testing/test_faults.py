"""Failures on purpose are what they say: the others see what the failure contract promises."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from tests.lateness import bound

from phalanx import ChannelClosed, Group, PeerLost, Timeout, UsageError
from phalanx.errors import PhalanxError, UnsupportedOp
from phalanx.testing import Died, faults, open_world, run_ranks


def survive(group: Group, victim: int, fault: str) -> tuple[int | None, float]:
    """What a rank sees of another's end, and how soon."""
    start = time.monotonic()
    try:
        group.barrier()  # the victim may be gone before the others have left it
        if group.rank == victim:
            if fault == "kill":
                faults.kill_self()
            faults.exit_self(9)
        group.barrier()
    except PeerLost as error:
        return error.peer, time.monotonic() - start
    return None, 0.0


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fault", ["kill", "exit"])
def test_the_death_of_a_rank(victim: int, fault: str) -> None:
    found = run_ranks(3, survive, victim, fault, backend="mesh", may_die=[victim])
    died = found.pop(victim)
    assert died == (Died(victim, signal=signal.SIGKILL) if fault == "kill" else Died(victim, code=9))
    assert ("SIGKILL" if fault == "kill" else "code 9") in str(died)
    assert [peer for peer, _ in found] == [victim, victim]
    assert all(seconds < bound(10) for _, seconds in found)  # the contract's second is checked where nothing else runs


def test_a_stopped_rank_is_ended_when_the_others_are_done() -> None:
    def wait(group: Group) -> tuple[int, ...]:
        group.barrier()
        if group.rank == 1:
            faults.stop_self()
        with pytest.raises(Timeout) as caught:
            group.barrier(timeout=0.3)
        return caught.value.missing

    found = run_ranks(3, wait, backend="mesh", may_die=[1])
    assert found[1] == Died(1, stopped=True)
    # The first to time out breaks the group, and the other hears it.
    assert 1 in found[0]
    assert 1 in found[2]


def test_a_rank_that_stops_for_a_while_goes_on() -> None:
    def pause(group: Group) -> float:
        group.barrier()
        start = time.monotonic()
        if group.rank == 1:
            faults.stop_self(0.3)
        group.barrier()
        return time.monotonic() - start

    assert all(seconds >= 0.25 for seconds in run_ranks(2, pause, backend="mesh"))


def test_may_die_does_not_mean_must() -> None:
    assert run_ranks(2, lambda group: group.rank, backend="mesh", may_die=[0, 1]) == [0, 1]


@pytest.mark.parametrize("fault", [faults.kill_self, faults.exit_self, faults.stop_self])
def test_threads_cannot_be_killed(fault: object) -> None:
    with pytest.raises(UsageError, match="this rank is a thread"):
        run_ranks(2, lambda _group: fault())  # type: ignore[operator]


def drop(group: Group, everything: bool) -> str:
    try:
        group.barrier()  # the first may be through, and break it, while others are still inside
        if group.rank == 1:
            (faults.cut_off if everything else faults.drop_connections)(group)
        group.barrier(timeout=5)
    except PeerLost as error:
        return f"lost {error.peer}"
    except PhalanxError as error:
        return f"{type(error).__name__} {error.peer}"
    return "nothing"


@pytest.mark.parametrize("backend", ["mesh", "tcp", "mesh-classic"])
def test_broken_connections(backend: str) -> None:
    found = run_ranks(3, drop, False, backend=backend)
    # Both ends of a connection miss the other one, and whoever is first tells the rest.
    assert found[0] in ("lost 1", "lost 2"), found
    assert found[1] in ("lost 0", "lost 2"), found


def test_a_rank_that_is_cut_off_is_lost_to_the_others() -> None:
    found = run_ranks(3, drop, True, backend="mesh")
    assert (found[0], found[2]) == ("lost 1", "lost 1")
    assert found[1] != "nothing"


def test_what_has_no_connections_cannot_lose_them() -> None:
    with open_world(1) as (backend,), Group(backend) as group:
        with pytest.raises(UnsupportedOp, match="SimulatedBackend has no connections"):
            faults.drop_connections(group)
        with pytest.raises(UnsupportedOp):
            faults.cut_off(group)


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
def test_a_slow_rank(backend: str) -> None:
    def slow(group: Group) -> tuple[float, float]:
        group.barrier()
        start = time.monotonic()
        if group.rank == 0:
            with faults.delay(group, 0.2):
                group.send(np.zeros(1), 1)
                group.barrier()
            middle = time.monotonic()
            group.send(np.zeros(1), 1)
        else:
            group.recv(src=0)
            group.barrier()
            middle = time.monotonic()
            group.recv(src=0)
        return middle - start, time.monotonic() - middle

    for delayed, _ in run_ranks(2, slow, backend=backend):
        assert delayed >= 0.35


def test_a_delay_is_taken_back() -> None:
    with open_world(1) as (backend,), Group(backend) as group:
        with faults.delay(group, 0.2):
            start = time.monotonic()
            group.send(np.zeros(1), 0)
            assert time.monotonic() - start >= 0.2
        assert "start_send" not in vars(group._messages)
        with pytest.raises(UsageError, match="seconds=-1"), faults.delay(group, -1):
            pass


def test_a_receiver_in_time_sees_a_slow_rank_as_a_timeout() -> None:
    def impatient(group: Group) -> str:
        if group.rank == 0:
            with faults.delay(group, 0.5):
                group.send(np.array([7]), 1)
            return "sent"
        with pytest.raises(Timeout):
            group.recv(src=0, timeout=0.05)
        return f"then {group.recv(src=0)[0]}"

    assert run_ranks(2, impatient) == ["sent", "then 7"]


def test_an_orderly_goodbye_is_no_loss() -> None:
    def leave(group: Group) -> str:
        group.barrier()
        if group.rank == 1:
            return "left"
        try:
            group.recv(src=1)
        except ChannelClosed as error:
            return f"{error.peer} is gone"
        return "nothing"

    assert run_ranks(2, leave, backend="mesh") == ["1 is gone", "left"]
