"""The parts of `phalanx run` that decide and speak, without ranks."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import threading
import time
from typing import NoReturn

import pytest
from tests.cli.run.support import LIMIT, wait_for

from phalanx.cli.run.ending import NOTICE, SETTLE, Ending, Reason
from phalanx.cli.run.processes import LocalRank
from phalanx.cli.run.report import TRACEBACK_LINES, JobFailure, describe_status, failure_report, last_words, list_ranks
from phalanx.cli.run.world import WatchedWorld, WorldEnd
from phalanx.cli.run.writer import HIGH, OutputWriter
from phalanx.config import Options
from phalanx.launching.guardian import MARK, end_all, processes, relatives
from phalanx.rendezvous import join
from phalanx.types import Address

TERM, KILL, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT


def rank(number: int, status: int | None = None) -> LocalRank:
    return LocalRank(number, 1000 + number, -1, -1, status)


# -- how a job ends ----------------------------------------------------------------------------------------------------


def test_nothing_to_do_while_all_is_well() -> None:
    ending = Ending(5.0)
    ending.rank_ended(rank(0, 0), 10.0)
    assert ending.reason is None
    assert ending.next_step() == math.inf
    assert ending.take_step(1e9) is None


def test_failure_waits_a_moment_for_the_directory() -> None:
    ending = Ending(5.0)
    failed = rank(1, 3)
    ending.rank_ended(failed, 10.0)
    assert ending.reason is Reason.FAILURE
    assert ending.steps == [(10.0 + SETTLE, TERM), (10.0 + SETTLE + 5.0, KILL)]
    assert ending.take_step(10.0) is None
    assert ending.take_step(10.0 + SETTLE) == TERM
    ending.rank_ended(rank(0, -15), 11.0)
    assert ending.failed == [failed], "what ended after SIGTERM did not fail"
    assert ending.culprit([rank(0), failed]) is failed


def test_the_directory_knows_better_than_the_order_of_exits() -> None:
    ending = Ending(5.0)
    root, victim = rank(2), rank(0, 1)
    ending.rank_ended(victim, 10.0)
    assert ending.world_ended(WorldEnd(2, "it raised ValueError"), 10.1, root)
    assert ending.steps == [(10.1 + NOTICE, TERM), (10.1 + NOTICE + 5.0, KILL)]
    assert ending.culprit([victim, root]) is root
    assert not ending.world_ended(WorldEnd(1, "too late"), 10.2, rank(1))
    assert ending.culprit([victim, root]) is root


def test_what_the_directory_says_after_the_first_signal_is_our_own_doing() -> None:
    ending = Ending(5.0)
    failed = rank(1, 3)
    ending.rank_ended(failed, 10.0)
    assert ending.take_step(11.0) == TERM
    assert not ending.world_ended(WorldEnd(0, "lost", aborted=False), 11.0, rank(0, -15))
    assert ending.culprit([rank(0), failed]) is failed


@pytest.mark.parametrize("exit_first", [True, False])
def test_a_rank_that_was_done_is_no_failure(exit_first: bool) -> None:
    ending = Ending(5.0)
    done = rank(2, 0 if exit_first else None)
    news = ending.world_ended(WorldEnd(2, "the connection was closed", aborted=False), 10.0, done)
    assert news is not exit_first
    done.status = 0
    ending.rank_ended(done, 10.01)
    assert ending.reason is None
    ending.rank_ended(rank(0, 1), 12.0)
    assert ending.reason is Reason.FAILURE
    assert ending.culprit([rank(0, 1), done]) is done, "those who needed it failed because of it"


def test_abort_is_a_failure_whatever_the_exit_code() -> None:
    ending = Ending(5.0)
    done = rank(2, 0)
    assert ending.world_ended(WorldEnd(2, "enough"), 10.0, done)
    ending.rank_ended(done, 10.0)
    assert ending.reason is Reason.FAILURE


def test_all_ended_by_themselves() -> None:
    ending = Ending(5.0)
    ending.rank_ended(rank(0, 1), 10.0)
    ending.ranks_are_gone(10.0)
    assert ending.steps == [(10.0, TERM), (15.0, KILL)], "what they started still gets the grace period"
    ending = Ending(5.0)
    ending.rank_ended(rank(0, 1), 10.0)
    ending.rank_ended(rank(1, 1), 10.0)
    ending.ranks_are_gone(10.0)
    assert ending.next_step() == 10.0 + SETTLE, "two at once: the directory may know which was first"


def test_ctrl_c_and_again() -> None:
    ending = Ending(4.0)
    ending.told(INT, 10.0)
    assert ending.steps == [(10.0, INT), (12.0, TERM), (14.0, KILL)]
    assert ending.take_step(10.0) == INT
    ending.told(INT, 10.5)
    assert ending.take_step(10.5) == KILL
    assert (ending.reason, ending.signal) == (Reason.SIGNAL, INT)


def test_told_while_a_failure_is_being_dealt_with() -> None:
    ending = Ending(4.0)
    ending.rank_ended(rank(0, 1), 10.0)
    ending.told(TERM, 10.1)
    assert ending.reason is Reason.FAILURE
    assert ending.steps[-1][0] <= 14.1
    ending.told(INT, 10.2)
    assert ending.take_step(10.2) == KILL


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([3, 0], "ranks 0 and 3"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([7, 5, 4, 3, 0], "ranks 0, 3 to 5 and 7"),
    ],
)
def test_list_of_ranks(ranks: list[int], text: str) -> None:
    assert list_ranks(ranks) == text


def test_status() -> None:
    assert describe_status(3) == "exit code 3"
    assert describe_status(-11) == "killed by SIGSEGV"
    assert describe_status(-9).startswith("killed by SIGKILL")
    assert describe_status(-63) == "killed by signal 63"


FIRST = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: 1\n'
SECOND = 'Traceback (most recent call last):\n  File "b.py", line 2, in <module>\nValueError: 2\n'
LINK = "\nDuring handling of the above exception, another exception occurred:\n\n"


def test_last_words_are_the_last_traceback_with_its_chain() -> None:
    title, lines = last_words(f"noise\n{FIRST}more noise\n{SECOND}".encode())
    assert (title, lines) == ("its traceback", SECOND.splitlines())
    _, lines = last_words(f"noise\n{FIRST}{LINK}{SECOND}after\n".encode())
    assert lines == f"{FIRST}{LINK}{SECOND}after".splitlines()


def test_last_words_without_a_traceback() -> None:
    title, lines = last_words(b"one\rtwo\nthree\n\n")
    assert (title, lines) == ("what it wrote last", ["two", "three"])
    assert last_words(b"", b"only out\n") == ("what it wrote last", ["only out"])
    assert last_words(b"", b"") == ("it wrote nothing", [])
    title, lines = last_words(f"{FIRST}later\n".encode(), failed=False)
    assert title == "what it wrote last", "a killed rank did not die of an exception that it wrote about before"
    assert lines[-1] == "later"


def test_endless_traceback_is_cut_in_the_middle() -> None:
    text = "Traceback (most recent call last):\n" + "  frame\n" * 5000 + "RecursionError: deep\n"
    _, lines = last_words(text.encode())
    assert len(lines) == TRACEBACK_LINES + 1
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "RecursionError: deep"


def test_report_ends_with_the_rank_s_own_words() -> None:
    failure = JobFailure(3, "exit code 1", "host", 42, stderr=b"\xff" + SECOND.encode())
    text = failure_report(failure, ["a note"], colour=False)
    assert text.splitlines()[-1] == "ValueError: 2"
    assert "rank 3 failed: exit code 1" in text
    assert "on host, process 42" in text
    assert "a note" in text
    assert "\x1b[" not in text
    assert "\x1b[" in failure_report(failure, [], colour=True)


# -- the writer --------------------------------------------------------------------------------------------------------


def test_writer_keeps_the_order_and_says_when_it_is_full() -> None:
    reading, writing = os.pipe()
    woken = threading.Event()
    writer = OutputWriter(woken.set)
    try:
        block = bytes(range(256)) * 256
        blocks = 0
        while not writer.full:
            writer.put(writing, block)
            blocks += 1
        assert blocks * len(block) <= HIGH + 3 * len(block)
        assert not writer.drained(0.05)
        data = b""
        while len(data) < blocks * len(block):
            data += os.read(reading, 1 << 20)
        assert data == block * blocks
        assert writer.drained(LIMIT)
        assert woken.wait(LIMIT)
        assert not writer.full
    finally:
        writer.close()
        os.close(reading)
        os.close(writing)


def test_writer_survives_a_reader_that_is_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    woken = threading.Event()
    writer = OutputWriter(woken.set)
    try:
        writer.put(writing, b"to nobody")
        assert woken.wait(LIMIT)
        ((descriptor, error),) = writer.failures()
        assert descriptor == writing
        assert isinstance(error, BrokenPipeError)
        writer.put(writing, b"more")
        assert writer.drained(LIMIT)
        assert writer.failures() == []
    finally:
        writer.close()
        os.close(writing)


def test_writer_waits_for_a_descriptor_that_somebody_made_non_blocking() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = OutputWriter(lambda: None)
    try:
        writer.put(writing, b"x" * 500_000)
        time.sleep(0.05)
        data = b""
        while len(data) < 500_000:
            data += os.read(reading, 1 << 16)
        assert writer.drained(LIMIT)
        assert writer.failures() == []
    finally:
        writer.close()
        os.close(reading)
        os.close(writing)


# -- who belongs to a job ----------------------------------------------------------------------------------------------


def test_relatives() -> None:
    def sleeper(run_id: str, *command: str, **settings: bool) -> subprocess.Popen[bytes]:
        env = {"PATH": os.environ["PATH"], MARK: run_id} if run_id else {"PATH": os.environ["PATH"]}
        return subprocess.Popen(command or ("sleep", "300"), env=env, **settings)  # type: ignore[call-overload, no-any-return]

    # The one in the middle has no mark, but it descends from one that has.
    tree = ("sh", "-c", "env -i setsid sleep 300 & wait")
    mine = [sleeper("job"), sleeper("job.inner"), sleeper("job", start_new_session=True), sleeper("job", *tree)]
    others = [sleeper(""), sleeper("job2"), sleeper("other.job"), sleeper("ob")]
    try:
        wait_for(lambda: len(relatives("job") - {p.pid for p in mine}) == 1, "the grandchild")
        found = relatives("job")
        assert {p.pid for p in mine} < found
        assert not {p.pid for p in others} & found
        grandchild = found - {p.pid for p in mine}
        assert {p.parent for p in processes() if p.pid in grandchild} == {mine[-1].pid}
        assert relatives("job", spare=[mine[0].pid]) == found - {mine[0].pid}
        assert others[0].pid in relatives("job", roots=[others[0].pid])

        def reap() -> None:
            for process in mine:
                process.poll()

        assert end_all(lambda: relatives("job"), reap) == set()
        assert all(process.wait(LIMIT) == -KILL for process in mine[:-1])
        mine[-1].wait(LIMIT)  # it may have ended by itself, when its child was killed
        assert all(process.poll() is None for process in others)
    finally:
        for process in mine + others:
            process.kill()
            process.wait(LIMIT)


# -- the launcher of another node --------------------------------------------------------------------------------------


def test_a_launcher_that_cannot_watch_the_first_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(join, "watch_directory", fail)
    ends: list[WorldEnd] = []
    world = WatchedWorld(
        2, address=Address("127.0.0.1", 1), node=1, token=b"token", options=Options(), on_end=ends.append
    )
    wait_for(lambda: ends, "the end")
    world.close()
    assert [(end.rank, end.reason) for end in ends] == [
        (None, "the first node's launcher cannot be watched: OSError: [Errno 24] Too many open files")
    ]
