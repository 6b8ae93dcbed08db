"""How a world forms, in any order and again and again; and what every rank says when it cannot."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
from tests.lateness import bound
from tests.ports import free_port
from tests.rendezvous.support import (
    FAST,
    LOOPBACK,
    TOKEN,
    Job,
    Ranks,
    Stranger,
    check,
    directory,
    eventually,
    lines_about,
    open_sockets,
    rank_hello,
    ranks,
)

import phalanx
from phalanx.backends import MeshBackend
from phalanx.errors import AuthenticationFailed, RendezvousError, Timeout, WorldNotFormed
from phalanx.rendezvous import join
from phalanx.rendezvous.directory import Directory
from phalanx.types import Address
from phalanx.wire import control
from phalanx.wire.handshake import Rejected, Role

SLACK = 5.0
"""Seconds beyond its deadline that a rank may take to say so on a machine that is busy with other tests."""


PATIENT = replace(FAST, handshake_timeout=5.0)
"""For tests that read the log: a rank must not give up its handshake while the directory's process starts."""


def master_job(size: int) -> Job:
    return Job(size, master=Address(LOOPBACK, free_port()))


def has_joined(hosted: Directory, rank: int) -> bool:
    return rank in hosted._ranks and hosted._ranks[rank].member is not None


# -- any order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "file"])
def test_ranks_start_in_any_order(order: tuple[int, ...], token: bytes | None) -> None:
    """Also the rank that hosts the directory may be the last."""
    job = master_job(3)
    job.token = token
    with ranks() as group:
        for rank in order:
            group.start(job.launch(rank))
            time.sleep(0.05)
        check(group)
        assert [backend.rank for backend in group.world()] == [0, 1, 2]


def test_sixteen_at_once() -> None:
    with directory(16) as hosted, ranks() as group:
        job = Job(16, directory=hosted.address)
        for rank in reversed(range(16)):
            group.start(job.launch(rank))
        check(group)


def test_a_rank_that_died_while_the_world_was_forming_may_come_again(caplog: pytest.LogCaptureFixture) -> None:
    with directory(2) as hosted, ranks() as group:
        with Stranger(hosted.address) as first_life:
            first_life.shake(rank_hello(1, 2), TOKEN)
            first_life.send(control.pack(control.Join(control.Member(1, "here", "x", 1, LOOPBACK, 1, 1))))
            eventually(lambda: has_joined(hosted, 1), "rank 1")
        job = Job(2, directory=hosted.address)
        group.start(job.launch(1))
        group.start(job.launch(0))
        check(group)
    gone = [
        r.getMessage() for r in caplog.records if "rank 1 went away before the world was complete" in r.getMessage()
    ]
    assert len(gone) == 1


# -- again and again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launcher", "master", "file", "master and file"])
def test_one_world_after_another(where: str) -> None:
    """The same ranks form world after world; each closes and goes on as soon as it is done."""
    rounds, size = 12, 3
    with directory(size) as hosted:
        job = Job(size, directory=hosted.address) if where == "launcher" else Job(size)
        if "master" in where:
            job.master = Address(LOOPBACK, free_port())
        if "file" in where:
            job.token = None
        failures: list[BaseException] = []

        def live(rank: int) -> None:
            try:
                for number in range(rounds):
                    backend = MeshBackend.from_launch(job.launch(rank), auth="token", timeout=30, options=FAST)
                    backend.barrier()
                    if number % size == rank:
                        time.sleep(0.02)  # not always the same one is late
                    backend.close()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []


@pytest.mark.parametrize("hosted_by", ["launcher", "rank 0"])
def test_a_rank_that_is_early_for_the_next_world_waits(
    hosted_by: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left, the others are still busy, longer than a rank insists on a place that is taken."""
    monkeypatch.setattr(join, "TAKEN_GRACE", 0.2)
    with directory(2) as hosted, ranks() as first, ranks() as second:
        job = Job(2, directory=hosted.address) if hosted_by == "launcher" else master_job(2)
        for rank in range(2):
            first.start(job.launch(rank), options=PATIENT)
        early, busy = first.world()[1], first.world()[0]
        early.close()
        second.start(job.launch(1), options=PATIENT)
        time.sleep(0.6)
        assert not second.joined(1)
        busy.close()
        second.start(job.launch(0))
        check(second)
    # It may be back before the directory has heard that it left.
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "refused: the rank is taken (it says it is rank 1)" not in text] == []
    assert len(said) <= 1


# -- it cannot form ----------------------------------------------------------------------------------------------------


def assert_missing(error: BaseException, rank: int, missing: tuple[int, ...]) -> None:
    assert isinstance(error, WorldNotFormed), error
    assert isinstance(error, RendezvousError)
    assert isinstance(error, Timeout)
    assert error.missing == missing
    assert error.rank == rank


@pytest.mark.parametrize("hosted_by", ["launcher", "rank 0", "file"])
def test_every_rank_says_who_is_missing(hosted_by: str) -> None:
    with directory(5) as hosted, ranks() as group:
        job = Job(5, directory=hosted.address) if hosted_by == "launcher" else Job(5)
        if hosted_by == "rank 0":
            job.master = Address(LOOPBACK, free_port())
        started = time.monotonic()
        for rank in (0, 2, 4):
            group.start(job.launch(rank), timeout=1.0)
        for rank in (0, 2, 4):
            assert_missing(group.error(rank), rank, (1, 3))
            assert "ranks 1, 3" in str(group.error(rank))
        assert 0.9 < time.monotonic() - started < bound(1.0 + SLACK)


def test_the_rank_that_hosts_the_directory_gives_up_first() -> None:
    """The others hear who was missing, long before their own deadline."""
    job = master_job(3)
    with ranks() as group:
        started = time.monotonic()
        group.start(job.launch(1), timeout=60.0)
        group.start(job.launch(0), timeout=3.0)  # rank 1 has been there by then, also on a busy machine
        assert_missing(group.error(0), 0, (2,))
        assert_missing(group.error(1), 1, (2,))
        assert time.monotonic() - started < bound(3.0 + SLACK)


def test_nobody_hosts_the_directory() -> None:
    job = master_job(2)
    with ranks() as group:
        started = time.monotonic()
        group.start(job.launch(1), timeout=0.7)
        error = group.error(1)
        assert_missing(error, 1, (0,))
        assert str(job.master) in str(error)
        assert time.monotonic() - started < bound(0.7 + SLACK)


def test_nobody_writes_the_file() -> None:
    with ranks() as group:
        group.start(Job(2, token=None).launch(1), timeout=0.7)
        error = group.error(1)
        assert_missing(error, 1, (0,))
        assert "PHALANX_TOKEN" in str(error)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4])
def test_something_else_listens_at_the_master(answer: bytes) -> None:
    with socket.create_server((LOOPBACK, 0)) as server, ranks() as group:
        server.settimeout(10)
        job = Job(2, master=Address(LOOPBACK, server.getsockname()[1]))
        group.start(job.launch(1), timeout=1.0)
        visits = []
        while not group.joined(1):
            try:
                server.settimeout(0.1)
                visits.append(server.accept()[0])
            except TimeoutError:
                continue
            visits[-1].sendall(answer)
        error = group.error(1)
        assert_missing(error, 1, (0,))
        assert ("not a Phalanx server" if answer else "no answer") in str(error)
        for visit in visits:
            visit.close()


# -- one rank is wrong -------------------------------------------------------------------------------------------------


def test_a_rank_with_another_token(caplog: pytest.LogCaptureFixture) -> None:
    with directory(3) as hosted, ranks() as group:
        job = Job(3, directory=hosted.address)
        started = time.monotonic()
        group.start(job.launch(2, token=b"another"), timeout=60)
        for rank in (0, 1):
            group.start(job.launch(rank), timeout=1.5)
        error = group.error(2)
        assert isinstance(error, AuthenticationFailed)
        assert "PHALANX_TOKEN must be the same on all ranks" in str(error)
        assert error.rank == 2
        for rank in (0, 1):
            assert_missing(group.error(rank), rank, (2,))
        assert time.monotonic() - started < bound(1.5 + SLACK)
    refused = [r.getMessage() for r in caplog.records if "does not know the job's token" in r.getMessage()]
    assert len(refused) == 1
    assert "another" not in caplog.text


@pytest.mark.parametrize(("mine", "theirs"), [("none", "token"), ("token", "none")])
def test_a_rank_without_a_token(mine: str, theirs: str) -> None:
    with ranks() as group, directory(2, token=TOKEN if theirs == "token" else None) as hosted:
        job = Job(2, directory=hosted.address)
        group.start(job.launch(1), auth=mine, timeout=5)  # type: ignore[arg-type]
        error = group.error(1)
        assert isinstance(error, AuthenticationFailed)
        assert "auth='none'" in str(error)


@pytest.mark.parametrize("where", ["launcher", "master", "file"])
def test_a_world_without_tokens_is_made_by_name(where: str) -> None:
    with ranks() as group, directory(2, token=None) as hosted:
        job = Job(2, directory=hosted.address if where == "launcher" else None, token=None)
        if where == "master":
            job.master = Address(LOOPBACK, free_port())
        for rank in range(2):
            group.start(job.launch(rank), auth="none")
        check(group)


def test_a_rank_of_another_world_size() -> None:
    with directory(2) as hosted, ranks() as group:
        job = Job(2, directory=hosted.address)
        group.start(job.launch(1, world_size=3), timeout=60)
        error = group.error(1)
        assert isinstance(error, RendezvousError)
        assert "WORLD_SIZE must be the same" in str(error)


def test_a_rank_that_is_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one hears that its place is taken; the world goes on without a word of it."""
    assert join.TAKEN_GRACE < 5
    monkeypatch.setattr(join, "TAKEN_GRACE", 0.5)
    with directory(2) as hosted, ranks() as group, ranks() as twin:
        job = Job(2, directory=hosted.address)
        group.start(job.launch(0))
        eventually(lambda: has_joined(hosted, 0), "rank 0")
        started = time.monotonic()
        twin.start(job.launch(0), timeout=60)
        error = twin.error(0)
        assert isinstance(error, RendezvousError)
        assert "rank 0 is already taken by another process" in str(error)
        assert 0.5 < time.monotonic() - started < bound(0.5 + SLACK)
        group.start(job.launch(1))
        check(group)


def test_the_place_of_a_formed_world_is_taken() -> None:
    with directory(1) as hosted, ranks() as group:
        group.start(Job(1, directory=hosted.address).launch(0))
        check_alone(group)
        with Stranger(hosted.address) as twin, pytest.raises(Rejected, match="taken"):
            twin.shake(rank_hello(0, 1), TOKEN)
        check_alone(group)


def check_alone(group: Ranks) -> None:
    group.world()[0].barrier()


def test_a_rank_that_is_admitted_but_never_says_where_it_is() -> None:
    with directory(2) as hosted, ranks() as group, Stranger(hosted.address) as silent:
        silent.shake(rank_hello(1, 2), TOKEN)
        group.start(Job(2, directory=hosted.address).launch(0), timeout=0.8)
        assert_missing(group.error(0), 0, (1,))


def test_a_rank_that_speaks_for_another() -> None:
    """It has proved to be rank 1, so it cannot join as rank 0."""
    with directory(2) as hosted, ranks() as group, Stranger(hosted.address) as liar:
        liar.shake(rank_hello(1, 2), TOKEN)
        liar.send(control.pack(control.Join(control.Member(0, "here", "x", 1, LOOPBACK, 1, 0))))
        group.start(Job(2, directory=hosted.address).launch(0), timeout=0.8)
        assert_missing(group.error(0), 0, (1,))


def test_strangers_as_launchers(caplog: pytest.LogCaptureFixture) -> None:
    with directory(2) as hosted:
        with Stranger(hosted.address) as watcher:
            watcher.shake(rank_hello(0, 2, Role.LAUNCHER), TOKEN)
            eventually(lambda: hosted.launchers == 1, "the launcher")
            with Stranger(hosted.address) as stranger, pytest.raises(AuthenticationFailed):
                stranger.shake(rank_hello(0, 2, Role.LAUNCHER), b"wrong")
            eventually(lambda: lines_about(caplog, stranger.name), "the log line")
            assert hosted.launchers == 1
        eventually(lambda: hosted.launchers == 0, "the launcher to go")


# -- a world of one ----------------------------------------------------------------------------------------------------


def test_a_world_of_one_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = open_sockets(), set(threading.enumerate())

    class NoSocket(socket.socket):
        def __init__(self, *_: object, **__: object) -> None:
            raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", NoSocket)
    descriptors = len(os.listdir("/proc/self/fd"))
    with phalanx.init() as world:
        assert (world.rank, world.world_size) == (0, 1)
        world.barrier()
        assert open_sockets() == before
        assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the waker of this thread stays with it
