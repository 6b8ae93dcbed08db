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


def test_a_rank_that_failed_in_an_operation_waited_in_it() -> None:
    """As after Ctrl-C or a timeout: nothing runs any more, but #2 did not come to its end."""
    slates = {
        0: slate(0, [Op(1, 0, 1), Op(2, 10, -4_000)], state=layout.FAILED, beat=4_000),
        1: slate(1, [Op(1, 0, 1)], state=layout.FAILED, beat=4_000, place="loop.py:7 in spin"),
    }
    picture = JobWatch(lambda: slates, lambda: NOW).look()
    assert picture is not None
    [found] = picture.findings
    assert (found.kind, found.ranks) == ("blocked", [1])
    assert found.text.startswith("rank 0 waits in all_reduce #2 at train.py:88 in main, because rank 1 has failed")
    assert "at loop.py:7 in spin" in found.text
    assert "for 4.0 s" in str(states_of(slates, NOW)[0])


def test_a_message_that_another_thread_waits_for_is_not_the_rank() -> None:
    recv = "recv\0/home/me/train.py\0serve\x0090"
    busy = {
        0: slate(0, [Op(0, 10, None, recv, peer=1), Op(1, 9_990, 9_995)], beat=9_900, place="train.py:5 in main"),
        1: slate(1, [Op(1, 9_990, 9_995)], beat=9_900),
    }
    state = states_of(busy, NOW)[0]
    assert (state.waits_for, state.site, state.line) == ([], None, "train.py:5 in main")


def test_a_long_wait_in_a_group_without_a_place_is_not_called_calm() -> None:
    slates = {rank: slate(rank, [Op(51, 10, None)], beat=9_900, known_group=False) for rank in (0, 1)}
    picture = JobWatch(lambda: slates, lambda: NOW).look()
    assert picture is not None
    assert [finding.kind for finding in picture.findings] == ["blocked", "blocked"]
    assert "rank 0 is in all_reduce #51 at train.py:88 in main for 10.0 s; its group" in picture.findings[0].text


def test_a_rank_of_which_nothing_is_known() -> None:
    slates = {0: slate(0, [Op(1, 10, None)], beat=9_900)}
    picture = JobWatch(lambda: slates, lambda: NOW).look()
    assert picture is not None
    assert "because nothing is known of rank 1 (it has not started, or does not answer)" in picture.findings[0].text


def test_an_elastic_world_that_grows() -> None:
    slates = {rank: slate(rank, [Op(1, 0, 1)], beat=9_900) for rank in (0, 1)}
    watch = JobWatch(lambda: slates, lambda: NOW)
    assert watch.look() is not None
    del slates[1]
    for rank in (0, 4):
        slates[rank] = slate(rank, [Op(1, 0, 1), Op(2, 5 + rank, 10)], members=(0, 4), beat=9_900)
    picture = watch.look()
    assert picture is not None
    assert [rank.rank for rank in picture.ranks] == [0, 1, 4]
    assert picture.waits[0][4] == 0.004
