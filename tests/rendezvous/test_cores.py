"""How many cores ranks of a host have between them, whether they are bound to some or not."""

from __future__ import annotations

import os

import pytest

from phalanx import operating_system
from phalanx.operating_system import LINUX
from phalanx.rendezvous.cores import MOST_CORES, cores_between, own_cores


def mask(*cores: int) -> str:
    return f"{sum(1 << core for core in cores):x}"


ALL = mask(*range(16))


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "core_quota", lambda: None)


@pytest.mark.parametrize(
    ("ranks", "cores"),
    [
        ([ALL, ALL], 16),
        ([ALL] * 20, 16),
        ([mask(0), mask(1)], 2),  # bound to a core each, as by mpirun
        ([mask(3), mask(3)], 1),
        ([mask(0, 1), mask(2, 3), mask(4, 5)], 6),
        ([mask(0, 1)] * 3 + [mask(2, 3)], 3),  # three on two cores, one on two others
        ([mask(7), ALL], 16),
        ([mask(7), mask(7), ALL], 2),
        ([mask(0), mask(1), mask(0, 1)], 2),
        ([mask(MOST_CORES - 1), mask(0)], 2),
    ],
)
def test_cores_are_counted_together(ranks: list[str], cores: int) -> None:
    assert cores_between(ranks) == cores


@pytest.mark.parametrize("word", ["", "0", "-1", "x", "1g", "\0", mask(MOST_CORES), "f" * 100_000])
def test_who_does_not_say_has_those_of_this_process(word: str) -> None:
    assert cores_between([word]) == operating_system.cores_of_set()


def test_where_no_process_can_tell_all_cores_are_shared_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "core_mask", lambda: 0)
    monkeypatch.setattr("phalanx.rendezvous.cores.core_mask", lambda: 0)
    assert own_cores() == ""
    assert cores_between(["", ""]) == os.cpu_count()


def test_a_quota_holds_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "core_quota", lambda: 2.5)
    assert cores_between([mask(0, 1), mask(2, 3), mask(4, 5)]) == 2


@pytest.mark.skipif(not LINUX, reason="the cores of a process are known on Linux only")
def test_own_cores_are_those_of_the_affinity() -> None:
    assert own_cores() == mask(*os.sched_getaffinity(0))
