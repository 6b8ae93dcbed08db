from __future__ import annotations

from phalanx.seeing.blocking import root_causes, states_of
from phalanx.seeing.watch import JobWatch
from phalanx.slate import layout

from .support import MS, START, Op, slate

NOW = START + 10_000 * MS


def test_a_rank_in_a_loop_is_named_with_its_line() -> None:
    slates = {
        0: slate(0, [Op(1, 0, 1), Op(2, 10, None)], members=(0, 1, 2), beat=9_900),
        1: slate(1, [Op(1, 0, 1), Op(2, 12, None)], members=(0, 1, 2), beat=9_900),
        2: slate(2, [Op(1, 0, 1)], members=(0, 1, 2), place="loop.py:7 in spin", beat=9_900),
    }
    states = states_of(slates, NOW)
    assert states[0].waits_for == states[1].waits_for == [2]
    assert root_causes(states) == ([2], [])
    picture = JobWatch(lambda: slates, lambda: NOW).look()
    assert picture is not None
    [found] = picture.findings
    assert (found.kind, found.ranks, found.where) == ("blocked", [2], "loop.py:7 in spin")
    assert found.text == (
        "ranks 0, 1 wait in all_reduce #2 at train.py:88 in main, because rank 2 is at loop.py:7 in spin, in no "
        "operation for 10.0 s"
    )


def test_a_chain_is_followed_to_its_end() -> None:
    """Rank 0 waits for 1 in a collective, and 1 for a message of 2, which took another branch."""
    recv = "recv\0/home/me/train.py\0main\x0090"
    slates = {
        0: slate(0, [Op(1, 10, None)], members=(0, 1, 2), beat=9_900),
        1: slate(1, [Op(0, 12, None, recv, peer=2)], members=(0, 1, 2), beat=9_900),
        2: slate(2, [], members=(0, 1, 2), place="other.py:3 in branch", beat=9_900),
    }
    states = states_of(slates, NOW)
    assert states[0].waits_for == [1, 2]
    assert states[1].waits_for == [2]
    assert root_causes(states) == ([2], [])


def test_two_that_wait_for_each_other() -> None:
    recv = "recv\0/home/me/train.py\0main\x0090"
    slates = {
        0: slate(0, [Op(0, 10, None, recv, peer=1)], beat=9_900),
        1: slate(1, [Op(0, 10, None, recv, peer=0)], beat=9_900),
    }
    assert root_causes(states_of(slates, NOW)) == ([], [0, 1])
    picture = JobWatch(lambda: slates, lambda: NOW).look()
    assert picture is not None
    assert "waiting for rank 1" in picture.findings[0].text
    assert "waiting for rank 0" in picture.findings[0].text


def test_what_became_of_a_rank() -> None:
    made = {
        0: slate(0, [Op(1, 0, 1)], beat=1_000, alive=False),
        1: slate(1, [Op(1, 0, 1)], beat=1_000, state=layout.CLOSED),
        2: slate(2, [Op(1, 0, 1)], beat=1_000, place="train.py:1 in f"),
        3: slate(3, [Op(1, 0, 1)], beat=9_900),
    }
    states = states_of(made, NOW)
    assert [states[rank].state for rank in range(4)] == ["lost", "closed", "silent", "running"]
    assert "does not answer" in states[2].doing
    assert states[0].seconds == (1_000 - 1) / 1e3, "of one that is gone, when it was last seen"


def test_different_operations_under_one_number() -> None:
    barrier = "barrier\0/home/me/train.py\0main\x0091"
    slates = {
        0: slate(0, [Op(1, 10, None, fingerprint=1)], beat=9_900),
        1: slate(1, [Op(1, 10, None, barrier, fingerprint=2)], beat=9_900),
    }
    picture = JobWatch(lambda: slates, lambda: NOW).look()
    assert picture is not None
    [found] = picture.findings
    assert found.kind == "mismatch"
    assert "all_reduce #1" in found.text
    assert "barrier #1" in found.text
