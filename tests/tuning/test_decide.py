"""From a measurement to settings. All measurements are made up: no test depends on the machine or its clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx.tuning import DEFAULTS, Tuning
from phalanx.tuning.decide import decide, tuning_of
from phalanx.tuning.measure import BUDGET, COPIED_SIZES, LONG_SIZES, REDUCED_SIZES, Copies, Measured, measure
from phalanx.tuning.values import BOUNDS, NEVER, RARELY


def ways(parts: dict[int, float], *, ranks: int = 2) -> Measured:
    """A machine on which every rank reducing everything takes 1 µs for each size, and reducing parts what is given."""
    sizes = {(ranks, size): 1e-6 for size in REDUCED_SIZES}
    return Measured(dict(sizes), {(ranks, size): parts.get(size, 1.0) * 1e-6 for size in REDUCED_SIZES})


def chosen(measured: Measured) -> Tuning:
    return tuning_of(decide(measured))


def test_nothing_measured_changes_nothing() -> None:
    assert chosen(Measured()) == DEFAULTS
    assert {decision.reason for decision in decide(Measured())} == {"nothing was measured"}


def test_a_clear_gain_is_taken() -> None:
    assert chosen(ways({4096: 0.8, 8192: 0.7, 16384: 0.7})).reduced_by_all == 2048
    assert chosen(ways({16384: 0.7})).reduced_by_all == 8192
    later = {size: 2.0 for size in REDUCED_SIZES if size <= 65536} | {131072: 0.5}
    assert chosen(ways(later)).reduced_by_all == 65536


def test_of_several_gains_the_largest_is_taken() -> None:
    """Not the one that is largest in a single cell."""
    assert chosen(ways({8192: 0.6, 16384: 0.5})).reduced_by_all == 4096


@pytest.mark.parametrize("ratio", [0.92, 1.0, 1.08, 0.99])
def test_what_may_be_noise_is_not(ratio: float) -> None:
    assert chosen(ways(dict.fromkeys(REDUCED_SIZES, ratio))) == DEFAULTS


def test_a_gain_for_some_is_not_bought_with_a_loss_for_others() -> None:
    both = ways({16384: 0.5})
    crowd = ways({16384: 1.2}, ranks=8)
    measured = Measured(both.by_all | crowd.by_all, both.by_parts | crowd.by_parts)
    assert chosen(measured) == DEFAULTS


def test_a_measurement_that_did_not_end_counts_for_nothing() -> None:
    assert chosen(ways({16384: math.inf})) == DEFAULTS
    assert chosen(ways({4096: 0.5, 8192: 0.5, 16384: math.inf})) == DEFAULTS
    assert chosen(Measured(look=1e-8, wake_up=math.inf)) == DEFAULTS


def test_a_slow_wake_up_makes_ranks_more_patient() -> None:
    assert chosen(Measured(look=50e-9, wake_up=100e-6)).spins == 4000
    assert chosen(Measured(look=50e-9, wake_up=1.0)).spins == BOUNDS["spins"][1]


def test_a_quick_wake_up_makes_nobody_less_patient() -> None:
    """A shorter wait could only be slower than today's."""
    assert chosen(Measured(look=50e-9, wake_up=1e-6)).spins == DEFAULTS.spins
    assert chosen(Measured(look=50e-9, wake_up=52e-6)).spins == DEFAULTS.spins, "hardly more"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"reduced_by_all": 0}, "reduced_by_all is 0"),
        ({"reduced_by_all": 2**40}, "expected a whole number from 1024"),
        ({"spins": 2000.0}, "spins is 2000.0"),
        ({"spins": True}, "spins is True"),
        ({"patience": 3}, "patience is no setting"),
        ([], "not a mapping"),
        (None, "not a mapping"),
    ],
)
def test_settings_that_cannot_be(values: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Tuning.of(values)


def copies(by_address: dict[int, float]) -> Measured:
    """A machine on which every gather through shared memory takes 1 µs, and one by address what is given."""
    return Measured(
        by_address={size: by_address.get(size, 1.0) * 1e-6 for size in COPIED_SIZES},
        through=dict.fromkeys(COPIED_SIZES, 1e-6),
    )


def test_long_arrays_are_copied_once_from_where_that_is_faster() -> None:
    assert chosen(copies({})).copy_once_from == DEFAULTS.copy_once_from
    assert chosen(copies({16 << 10: 0.5})).copy_once_from == 16 << 10
    assert chosen(copies({64 << 10: 1.5})).copy_once_from == 256 << 10
    assert chosen(copies({64 << 10: 1.5, 256 << 10: 1.5, 1 << 20: 0.5, 4 << 20: 0.5})).copy_once_from == 1 << 20
    assert chosen(copies(dict.fromkeys(COPIED_SIZES, 1.5))).copy_once_from == RARELY
    assert chosen(copies(dict.fromkeys(COPIED_SIZES, math.inf))) == DEFAULTS, "it is not permitted here"


def long_copies(ahead: tuple[float, ...] = (1.0,) * 3, past: tuple[float, ...] = (1.0,) * 3) -> Measured:
    """A machine on which memcpy takes 1 µs for each size, and the other ways what is given for each."""
    times = zip(LONG_SIZES, ahead, past, strict=True)
    return Measured(
        copies={size: Copies(1e-6, one * 1e-6, other * 1e-6, 1e-6, one * 1e-6) for size, one, other in times}
    )


def test_long_copies_go_another_way_from_where_that_is_faster() -> None:
    assert chosen(long_copies()) == DEFAULTS
    assert DEFAULTS.ahead_from == DEFAULTS.past_from == NEVER
    gains = chosen(long_copies(ahead=(1.4, 1.1, 0.6)))
    assert (gains.ahead_from, gains.past_from) == (4 * (8 << 20), NEVER), "two ranks, which read and write as much each"
    gains = chosen(long_copies(past=(3.0, 0.8, 0.7)))
    assert (gains.ahead_from, gains.past_from) == (NEVER, 2 << 20)
    assert chosen(long_copies(past=(3.0, 2.0, 0.95))) == DEFAULTS, "no clear gain"
    both = chosen(long_copies(ahead=(1.0, 0.9, 0.8), past=(2.0, 0.7, 0.6)))
    assert (both.ahead_from, both.past_from) == (NEVER, 2 << 20), "the better one of the two"
    assert chosen(long_copies(ahead=(math.inf,) * 3)) == DEFAULTS
    of_its_own = Measured(copies={size: Copies(1e-6, 0.5e-6, 2e-6, 1e-6, 1e-6) for size in LONG_SIZES})
    assert chosen(of_its_own).ahead_from == NEVER, "what counts is what another rank has written"


class FakeCore:
    """Measures by a clock of its own, which each measurement moves on."""

    def __init__(self, cost: float = 0.0) -> None:
        self.now, self.cost, self.calls = 0.0, cost, 0

    def clock(self) -> float:
        return self.now

    def _spend(self) -> float:
        self.now += self.cost
        self.calls += 1
        return self.calls * 1e-6

    def time_look(self, rounds: int, budget: float) -> float:
        return self._spend()

    def time_wake_up(self, times: int, budget: float) -> float:
        return self._spend()

    def time_gather(self, size: int, ranks: int, *settings: float) -> float:
        return self._spend()

    def time_copies(self, size: int, threads: int, *settings: float) -> tuple[float, float, float, float, float]:
        return self._spend(), 1.0, 1.0, 1.0, 1.0

    def time_all_reduce(self, size: int, ranks: int, *settings: float) -> float:
        return self._spend()


def test_all_is_measured_on_two_and_on_many_ranks_and_the_best_turn_counts() -> None:
    core = FakeCore()
    found = measure(core, cores=16, clock=core.clock)
    assert set(found.by_all) == set(found.by_parts) == {(ranks, size) for ranks in (2, 8) for size in REDUCED_SIZES}
    assert set(found.by_address) == set(found.through) == set(COPIED_SIZES)
    assert found.by_all[2, 4096] == pytest.approx(6e-6), "the first turn, which was faster than the second"


def test_one_core_is_not_measured() -> None:
    core = FakeCore()
    assert measure(core, cores=1, clock=core.clock) == Measured()
    assert core.calls == 0


def test_the_measurement_ends_when_its_time_is_over() -> None:
    core = FakeCore(cost=0.04)
    found = measure(core, cores=2, clock=core.clock)
    assert core.now <= BUDGET + core.cost
    assert len(found.by_all) < len(REDUCED_SIZES)
    assert chosen(found).reduced_by_all == DEFAULTS.reduced_by_all, "half a measurement decides nothing"
