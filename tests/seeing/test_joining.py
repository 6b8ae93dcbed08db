from __future__ import annotations

import numpy as np

from phalanx.seeing.joining import join
from phalanx.seeing.reading import RankSlate
from phalanx.slate import layout

from .support import MS, START, Op, slate


def test_the_last_to_arrive_made_the_others_wait() -> None:
    slates = {
        0: slate(0, [Op(1, 0, 10), Op(2, 20, 31)], members=(0, 1, 2)),
        1: slate(1, [Op(1, 2, 10), Op(2, 25, 31)], members=(0, 1, 2)),
        2: slate(2, [Op(1, 9, 10), Op(2, 21, 31)], members=(0, 1, 2)),
    }
    [joined] = join(slates, {})
    assert joined.last.tolist() == [2, 1]
    assert (joined.waited / MS).tolist() == [[9, 7, 0], [5, 0, 4]]
    assert (joined.late / MS).tolist() == [[0, 0, 0], [0, 4, 0]], (
        "later than the one in the middle; of the first who knows"
    )
    assert (joined.moved / MS).tolist() == [[1, 1, 1], [6, 6, 6]]
    assert joined.sites[0].where == "train.py:88 in main"
    assert joined.share == 1.0


def test_operations_that_run_somewhere_or_were_joined_before_are_left_out() -> None:
    slates = {
        0: slate(0, [Op(1, 0, 1), Op(2, 2, 3), Op(3, 4, None)]),
        1: slate(1, [Op(1, 0, 1), Op(2, 2, 3), Op(3, 4, 5)]),
    }
    [joined] = join(slates, {99: 1})
    assert joined.sequence.tolist() == [2]
    assert join(slates, {99: 2}) == []


def test_a_rank_that_was_held_up_is_not_to_blame() -> None:
    """Rank 2 gets its part of the first operation later, over a slow link, and so comes late to the second."""
    slates = {
        0: slate(0, [Op(1, 0, 10), Op(2, 12, 31)], members=(0, 1, 2)),
        1: slate(1, [Op(1, 0, 10), Op(2, 12, 31)], members=(0, 1, 2)),
        2: slate(2, [Op(1, 0, 20), Op(2, 22, 31)], members=(0, 1, 2)),
    }
    [joined] = join(slates, {})
    assert (joined.waited / MS).tolist()[1] == [10, 10, 0]
    assert not joined.late.any()


def test_neither_is_one_that_waited_in_another_operation() -> None:
    recv = "recv\0/home/me/train.py\0main\x0090"
    slates = {
        0: slate(0, [Op(1, 0, 10), Op(2, 12, 31)], members=(0, 1, 2)),
        1: slate(1, [Op(1, 0, 10), Op(2, 12, 31)], members=(0, 1, 2)),
        2: slate(2, [Op(1, 0, 10), Op(0, 11, 26, recv, peer=0), Op(2, 30, 31)], members=(0, 1, 2)),
    }
    [joined] = join(slates, {})
    assert (joined.late / MS).tolist()[1] == [0, 0, 3], "5 ms of its own, where the others had 2"


def test_neither_is_one_that_had_no_processor() -> None:
    slates = {
        0: slate(0, [Op(1, 0, 10), Op(2, 12, 31)], members=(0, 1, 2)),
        1: slate(1, [Op(1, 0, 10), Op(2, 12, 31)], members=(0, 1, 2)),
        2: slate(2, [Op(1, 0, 10), Op(2, 30, 31, starved=13)], members=(0, 1, 2)),
    }
    [joined] = join(slates, {})
    assert (joined.waited / MS).tolist()[1] == [18, 18, 0]
    assert (joined.late / MS).tolist()[1] == [0, 0, 5], "of 20 ms, 13 without a processor; the others had 2"


def test_what_was_lost_before_a_broadcast_shows_after_it() -> None:
    """Rank 1 is late to a broadcast of rank 0, which waits for nobody, and so all meet later."""
    site = "broadcast\0/home/me/train.py\0main\x0012"
    slates = {
        0: slate(0, [Op(1, 0, 1), Op(2, 11, 12, site, peer=0), Op(3, 12, 33)]),
        1: slate(1, [Op(1, 0, 1), Op(2, 31, 32, site, peer=0), Op(3, 32, 33)]),
    }
    [joined] = join(slates, {})
    assert (joined.late / MS).tolist() == [[0, 0], [0, 0], [0, 20]]
    [joined] = join(slates, {99: 2})
    assert (joined.late / MS).tolist() == [[0, 20]], "also if the broadcast was seen before"


def test_the_next_to_meet_pays_only_what_is_left() -> None:
    """Rank 1 loses 20 ms, then waits for 15 of them in a broadcast of rank 0, which is later still."""
    site = "broadcast\0/home/me/train.py\0main\x0012"
    slates = {
        0: slate(0, [Op(1, 0, 1), Op(2, 46, 47, site, peer=0), Op(3, 48, 55)]),
        1: slate(1, [Op(1, 0, 1), Op(2, 31, 46, site, peer=0), Op(3, 54, 55)]),
    }
    [joined] = join(slates, {})
    assert (joined.late / MS).tolist() == [[0, 0], [15, 0], [0, 6]]


def test_an_operation_that_differs_adds_nothing() -> None:
    slates = {rank: slate(rank, [Op(1, 0, 1), Op(2, 2, 3, fingerprint=7 + rank)], members=(0, 1)) for rank in (0, 1)}
    assert join(slates, {99: 1}) == []


def test_a_root_that_did_not_wait_is_not_kept_waiting() -> None:
    """The root of a broadcast goes on at once: one that comes late to it delays nobody."""
    site = "broadcast\0/home/me/train.py\0main\x0012"
    slates = {
        0: slate(0, [Op(1, 0, 1, site, peer=0)], members=(0, 1, 2)),
        1: slate(1, [Op(1, 5, 6, site, peer=0)], members=(0, 1, 2)),
        2: slate(2, [Op(1, 50, 51, site, peer=0)], members=(0, 1, 2)),
    }
    [joined] = join(slates, {})
    assert joined.last.tolist() == [0]
    assert not joined.waited.any()
    assert not joined.late.any()


def test_the_share_that_was_not_overtaken_is_known() -> None:
    slates = {rank: slate(rank, [Op(n, n, n + 0.5) for n in (8, 9, 10)]) for rank in (0, 1)}
    [joined] = join(slates, {99: 4})
    assert joined.share == 0.5


def test_what_an_earlier_group_did_in_the_same_place_is_not_its_own() -> None:
    old = [Op(n, n, n + 0.5) for n in (1, 2, 3)]
    slates = {rank: slate(rank, [*old, Op(1, 50 + rank, 60)], since=3) for rank in (0, 1)}
    [joined] = join(slates, {})
    assert joined.sequence.tolist() == [1]
    assert (joined.waited / MS).tolist() == [[1, 0]]


def test_different_operations_under_one_number_are_not_compared() -> None:
    slates = {0: slate(0, [Op(1, 0, 1, fingerprint=1)]), 1: slate(1, [Op(1, 0, 1, fingerprint=2)])}
    assert join(slates, {}) == []


def test_clocks_of_other_hosts_are_put_right() -> None:
    slates = {0: slate(0, [Op(1, 0, 10)]), 1: slate(1, [Op(1, 1004, 1010)], offset_ns=-1000 * MS)}
    [joined] = join(slates, {})
    assert (joined.waited / MS).tolist() == [[4, 0]]


def test_a_record_that_is_being_written_is_not_read() -> None:
    made = slate(0, [Op(1, 0, 1), Op(2, 2, 3), Op(3, 4, 5)])
    data = bytearray(made.data)
    records = np.frombuffer(data, layout.RECORD, layout.RECORDS, layout.RECORDS_AT)
    records[2]["number"] = 0
    assert RankSlate(bytes(data)).records["sequence"].tolist() == [1, 3]
    # The writer has gone round since: the number is there, but of a place that belongs to another by now.
    records[2]["number"] = 2
    header = np.frombuffer(data, layout.HEADER, 1)[0]
    header["count"] = layout.RECORDS + 2
    assert RankSlate(bytes(data)).records["sequence"].tolist() == [3]
    assert START
