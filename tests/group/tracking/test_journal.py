"""What a rank did last: the words in the errors of others."""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from phalanx import Group, Options, Timeout
from phalanx.group.tracking.call import CollectiveCall
from phalanx.group.tracking.journal import KEPT, Journal, describe
from phalanx.testing import open_world, run_ranks


def line() -> int:
    return sys._getframe(1).f_lineno


def test_nothing_has_happened_yet() -> None:
    status = Journal().status()
    assert status.operation == ""
    assert (status.sequence, status.fingerprint, status.running) == (0, 0, False)
    assert describe(status).startswith("has not called any operation of this group; it is at test_journal.py:")
    assert describe(None) == "has not called any operation of this group"


def test_an_operation_that_runs() -> None:
    journal = Journal()
    entry = journal.issue(CollectiveCall("barrier"))
    entry.fingerprint = 77
    time.sleep(0.01)
    status = journal.status()
    assert (status.operation, status.sequence, status.fingerprint, status.running) == ("barrier #1", 1, 77, True)
    assert status.seconds >= 0.01
    assert describe(status).startswith("is in barrier #1 at test_journal.py:")


def test_an_operation_that_has_ended() -> None:
    journal = Journal()
    journal.begin("recv(src=0)").end()
    status = journal.status()
    assert not status.running
    assert describe(status).startswith("is in no operation; it finished recv(src=0) at test_journal.py:")
    assert re.search(r"s ago; it is at test_journal.py:\d+ in test_an_operation_that_has_ended$", describe(status))


def test_an_operation_that_has_failed() -> None:
    journal = Journal()
    journal.begin("recv(src=0)").end(failed=True)
    assert describe(journal.status()).startswith("is in no operation; its recv(src=0) at test_journal.py:")
    assert " failed 0.0 s ago; it is at " in describe(journal.status())


def test_the_oldest_that_runs_is_told_else_the_last_that_ended() -> None:
    journal = Journal()
    first, second, third = (journal.begin(name) for name in ("first", "second", "third"))
    second.end()
    assert journal.status().operation == "first"
    first.end()
    assert journal.status().operation == "third"
    third.end()
    assert journal.status().operation == "third"


def test_only_collectives_are_counted() -> None:
    journal = Journal()
    for collective in (True, False, True, False, True):
        (journal.issue(CollectiveCall("x")) if collective else journal.begin("x")).end()
    assert journal.sequence == 3
    assert [entry.name for entry in journal.recent()] == ["x #1", "x", "x #2", "x", "x #3"]


def test_others_compare_what_has_begun_to_run_and_not_what_was_issued() -> None:
    journal = Journal()
    first = journal.issue(CollectiveCall("all_reduce", reduction="sum"))
    second = journal.issue(CollectiveCall("barrier"))
    assert journal.status().sequence == 0
    first.fingerprint = 11
    assert (journal.status().sequence, journal.status().fingerprint) == (1, 11)
    assert journal.at(1) is first
    assert journal.at(2) is None
    asked = journal.status(1)
    assert (asked.operation, asked.fingerprint) == ("all_reduce(op=sum) #1", 11)
    first.end()
    second.fingerprint = 22
    other = Journal()
    entry = other.issue(CollectiveCall("broadcast", root=0))
    entry.fingerprint = 33
    assert journal.contradicts(other.status())
    entry.fingerprint = 11
    assert not journal.contradicts(other.status())


def test_it_forgets_the_old() -> None:
    journal = Journal()
    for number in range(KEPT + 10):
        journal.begin(f"op{number}").end()
    kept = journal.recent()
    assert len(kept) == KEPT
    assert kept[-1].operation == f"op{KEPT + 9}"


def test_messages_do_not_push_out_a_collective() -> None:
    journal = Journal()
    journal.issue(CollectiveCall("barrier")).start()
    for number in range(KEPT + 10):
        journal.begin(f"op{number}").end()
    assert journal.at(1) is not None
    assert journal.status().operation == "barrier #1"


def test_collectives_that_have_not_ended_are_kept() -> None:
    journal = Journal()
    issued = [journal.issue(CollectiveCall("barrier")) for _ in range(2 * KEPT)]
    issued[0].start()
    assert journal.at(1) is issued[0]
    for entry in issued:
        entry.end()
    journal.issue(CollectiveCall("barrier"))
    assert len(journal.recent()) == KEPT


def talk_while_one_is_late(group: Group) -> tuple[list[int], list[int]]:
    """Ranks 0 and 1 exchange messages in a thread, while they wait for rank 2 in a collective."""
    group.barrier()
    if group.rank == 2:
        with pytest.raises(Timeout):
            group.recv(src=0, tag=1, timeout=1.5)
        return [], []

    def talk() -> None:
        for _ in range(2 * KEPT):
            group.sendrecv(np.ones(2), 1 - group.rank, None, 1 - group.rank)
            group.send(np.ones(2), 1 - group.rank)
            group.recv(src=1 - group.rank)

    thread = threading.Thread(target=talk)
    thread.start()
    with pytest.raises(Timeout) as late:
        group.all_reduce(np.ones(5), timeout=1)
    thread.join()
    return list(late.value.arrived), list(late.value.missing)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_who_talks_in_another_thread_has_come(transport: Any) -> None:
    found = run_ranks(3, talk_while_one_is_late, backend="mesh", options=Options(transport=transport))
    assert found[:2] == [([0, 1], [2])] * 2


@pytest.mark.parametrize("verb", ["send", "recv", "isend", "sendrecv", "barrier", "broadcast", "all_reduce"])
def test_the_place_is_the_users_line(verb: str) -> None:
    calls = {
        "send": lambda group: group.send(np.zeros(1), 0),
        "isend": lambda group: group.isend(np.zeros(1), 0).wait(),
        "sendrecv": lambda group: group.sendrecv(np.zeros(1), 0, None, 0),
        "recv": lambda group: (group.send(np.zeros(1), 0), group.recv(src=0)),
        "barrier": lambda group: group.barrier(),
        "broadcast": lambda group: group.broadcast(np.zeros(1), 0),
        "all_reduce": lambda group: group.all_reduce(np.zeros(1)),
    }
    with open_world(1) as (backend,), Group(backend) as group:
        calls[verb](group)
        entries = group._journal.recent()
    code = calls[verb].__code__
    assert entries
    assert all(entry.site == f"test_journal.py:{code.co_firstlineno} in <lambda>" for entry in entries)


def test_a_timeout_says_what_the_missing_rank_does() -> None:
    def body(group: Group) -> str:
        group.barrier()
        if group.rank == 1:
            try:
                group.recv(src=0, tag=5, timeout=20)
            except Exception as error:
                return type(error).__name__
            return "nothing"
        from phalanx import Timeout

        time.sleep(0.1)
        with pytest.raises(Timeout) as caught:
            group.all_reduce(np.zeros(2), timeout=0.3)
        return str(caught.value)

    told, other = run_ranks(2, body)
    assert "all_reduce(op=sum) #2 at test_journal.py:" in told
    assert "arrived: 0; missing: 1" in told
    assert "rank 1 is in recv(src=0, tag=5) at test_journal.py:" in told
    assert other == "Timeout", "the group is broken for both"
