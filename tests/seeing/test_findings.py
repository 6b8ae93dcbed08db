from __future__ import annotations

import numpy as np
import pytest

from phalanx.seeing.findings import links_found, stragglers_found
from phalanx.seeing.lateness import LatenessTable
from phalanx.seeing.picture import LinkPicture

WHERE = {rank: f"all_reduce at train.py:{rank}" for rank in range(8)}


def parts(rng: np.random.Generator, ranks: int, count: int, noise: float) -> np.ndarray:
    return rng.exponential(noise, (count, ranks)) * rng.integers(0, 2, (count, ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_named(ranks: int, seed: int) -> None:
    table = parts(np.random.default_rng(seed), ranks, 60, 0.01)
    assert stragglers_found(table, 3.0, WHERE) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_is_always_late_is_named_in_noise(ranks: int, seed: int) -> None:
    table = parts(np.random.default_rng(seed), ranks, 60, 0.01)
    table[:, ranks - 1] += 0.012
    [found] = stragglers_found(table, 3.0, WHERE)
    assert found.kind == "straggler"
    assert found.ranks == [ranks - 1]
    assert f"rank {ranks - 1} made the others wait" in found.text
    assert found.text.endswith(f"all_reduce at train.py:{ranks - 1}")


def test_two_stragglers_are_both_named() -> None:
    table = parts(np.random.default_rng(1), 8, 60, 0.005)
    table[:, 2] += 0.02
    table[:, 5] += 0.03
    found = stragglers_found(table, 5.0, WHERE)
    assert [finding.ranks for finding in found] == [[5], [2]]


def test_a_rank_that_was_late_once_is_not_called_a_straggler() -> None:
    table = parts(np.random.default_rng(1), 4, 60, 0.002)
    table[30, 1] += 2.5
    [found] = stragglers_found(table, 20.0, WHERE)
    assert (found.kind, found.ranks) == ("once", [1])
    assert "was late once, by 2.5 s" in found.text


def ddp(rng: np.random.Generator, steps: int, late: int | None) -> np.ndarray:
    """Steps of two buckets on four ranks, as they were seen on two crowded cores: of ten operations four have somebody
    late, by a millisecond or so. A straggler is late by 5 ms in one of the two, if the others are not later still."""
    table = rng.exponential(0.0012, (2 * steps, 4)) * (rng.random((2 * steps, 4)) < 0.13)
    if late is not None:
        slow = table[1::2, late]
        slow[rng.random(steps) < 0.8] += 0.0045
    return table


@pytest.mark.parametrize("seed", range(20))
def test_five_milliseconds_inside_backward_are_named_within_fifty_steps(seed: int) -> None:
    late = seed % 4
    for steps, active in ((50, 1.5), (500, 15.0)):
        found = stragglers_found(ddp(np.random.default_rng(seed), steps, late), active, WHERE)
        assert [(finding.kind, finding.ranks) for finding in found] == [("straggler", [late])]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_job_names_nobody_at_any_look(seed: int) -> None:
    table = ddp(np.random.default_rng(seed), 500, None)
    for operations in range(8, 1000, 40):
        assert stragglers_found(table[:operations], operations * 0.01, WHERE) == []


@pytest.mark.parametrize("slow_start", [0, 2])
def test_the_first_step_of_another_rank_does_not_hide_a_straggler(slow_start: int) -> None:
    """As it was seen: a rank that was late twice, by 60 ms each, while it loaded its libraries."""
    table = np.zeros((112, 4))
    table[12::2, 3] = 0.0048
    table[[2, 5], slow_start] += 0.06
    assert [f.ranks for f in stragglers_found(table, 1.7, WHERE)] == [[3]]


def test_two_ranks_that_are_late_together_are_both_named() -> None:
    table = parts(np.random.default_rng(1), 8, 60, 0.005)
    table[:, 2] += 0.02
    table[:, 5] += 0.02
    assert sorted(f.ranks for f in stragglers_found(table, 5.0, WHERE)) == [[2], [5]]


def test_microseconds_are_the_scheduler() -> None:
    table = LatenessTable(2)
    table.add(np.tile([0.0, 50e-6], (500, 1)))
    assert stragglers_found(table.parts, 0.05, WHERE) == []


def test_days_of_operations_are_kept_in_few_parts() -> None:
    table = LatenessTable(2)
    for _ in range(20):
        table.add(np.tile([0.0, 0.001], (1111, 1)))
    table.add(np.tile([0.0, 0.001], (1, 1)), scale=2.0)
    assert len(table.parts) <= 4096
    assert table.parts[:-1, 0].max() == 0
    assert table.parts.sum() == pytest.approx(22.22, abs=0.02), "but for a part that is not whole yet"
    assert table.parts[:, 1].max() == table.parts[0, 1] == pytest.approx(0.008)


def link(source: int, target: int, rate: float, busy: float, filled: float = 1.0) -> LinkPicture:
    return LinkPicture(source, target, rate * busy, busy, rate, 1e-4, 0, filled)


def test_a_link_far_below_the_others_is_named() -> None:
    links = [link(0, 1, 2e9, 0.2), link(1, 2, 1e7, 0.9), link(2, 3, 2e9, 0.2), link(3, 0, 2.1e9, 0.2)]
    [found] = links_found(links, 10.0, 0.8)
    assert (found.kind, found.ranks) == ("link", [1, 2])
    assert "10 MB/s, others 2 GB/s" in found.text
    assert links_found(links, 10.0, 0.1) == [], "nobody waits for the data"
    assert links_found(links, 1e-4, 0.8) == [], "too little was sent to know"


def test_the_only_link_is_named_if_it_is_slow_and_busy() -> None:
    both = [link(0, 1, 1.2e7, 0.95), link(1, 0, 1.2e7, 0.95)]
    [found] = links_found(both, 10.0, 0.9)
    assert set(found.ranks) == {0, 1}
    assert links_found([link(0, 1, 1e10, 0.95), link(1, 0, 1e10, 0.95)], 10.0, 0.9) == []


def test_short_messages_do_not_make_a_link_slow() -> None:
    assert links_found([link(0, 1, 1.2e7, 0.95, 0.01), link(1, 0, 1.2e7, 0.95, 0.01)], 10.0, 0.9) == []
    [found] = links_found([link(0, 1, 1.2e7, 0.95, 0.01), link(1, 2, 1.2e7, 0.95, 0.9)], 10.0, 0.9)
    assert found.ranks == [1, 2]


def test_the_way_back_of_a_slow_link_is_no_other_link() -> None:
    links = [link(0, 1, 1.2e7, 0.95), link(1, 0, 1.1e7, 0.4), link(1, 2, 1.2e7, 0.95), link(2, 1, 1.1e7, 0.4)]
    [found] = links_found(links, 10.0, 0.9)
    assert "0-1, 1-2 are slow" in found.text
    assert "others" not in found.text
