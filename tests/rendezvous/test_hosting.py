"""Rank 0 hosts the directory in a process of its own, or in a thread where there can be no process."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from tests.ports import free_port
from tests.rendezvous.support import (
    FAST,
    LIMIT,
    LOOPBACK,
    TOKEN,
    Job,
    Stranger,
    check,
    directory,
    eventually,
    rank_hello,
    ranks,
)

from phalanx.errors import ConfigError, WorldNotFormed
from phalanx.rendezvous.control_link import READ_SIZE
from phalanx.rendezvous.hosting.process import DirectoryProcess, NotStarted
from phalanx.rendezvous.hosting.service import _Service, _ToHost
from phalanx.rendezvous.hosting.start import HostedDirectory
from phalanx.transports.stream import Stream
from phalanx.types import Address
from phalanx.wire.handshake import Role
from phalanx.wire.hosting import HostReader, Launchers, Log, Ready


def master_job(size: int) -> Job:
    return Job(size, master=Address(LOOPBACK, free_port()))


def host(size: int = 2) -> HostedDirectory:
    return HostedDirectory(size, token=TOKEN, bind=Address(LOOPBACK, 0), options=FAST, rank=0)


def test_it_is_a_process_that_ends_when_it_is_closed() -> None:
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    hosted = host()
    hosted.ready()
    assert hosted.pid is not None
    assert hosted.pid != os.getpid()
    status = Path(f"/proc/{hosted.pid}/status")
    assert int(status.read_text().split("VmRSS:")[1].split()[0]) < 48 << 10, "KiB"
    hosted.close()
    hosted.close()
    eventually(lambda: not status.exists(), "its end")
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_it_takes_as_many_descriptors_as_it_may() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hosted = host()
    try:
        hosted.ready()
        limits = Path(f"/proc/{hosted.pid}/limits").read_text()
        assert limits.split("Max open files")[1].split()[:2] == [str(most), str(most)]
    finally:
        hosted.close()


def test_it_can_be_closed_before_it_serves() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    host().close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_those_who_waited_for_it_are_told_after_it_said_that_it_serves() -> None:
    """A launcher may be let in before the host has heard anything: it took that for a process that is no directory."""
    ours, theirs = socket.socketpair()
    reader, heard = HostReader(), list[object]()
    log = _ToHost(logging.WARNING)
    logging.getLogger("phalanx.rendezvous").warning("written before anybody could read it")
    with ours, theirs, directory(2) as hosted, Stranger(hosted.address) as launcher:
        launcher.shake(rank_hello(1, 2, Role.LAUNCHER), TOKEN)
        eventually(lambda: hosted.launchers, "the launcher")
        _Service(hosted, Stream(theirs), reader, log).start([])
        ours.settimeout(LIMIT)
        while len(heard) < 3:
            heard += reader.feed(ours.recv(READ_SIZE))
        logging.getLogger("phalanx").removeHandler(log)
    early = Log(logging.WARNING, "phalanx.rendezvous", "written before anybody could read it")
    assert heard == [Ready(os.getpid()), early, Launchers(1)]


def test_what_it_has_to_say_is_in_the_log_of_its_host(caplog: pytest.LogCaptureFixture) -> None:
    hosted = host()
    hosted.ready()
    with Stranger(hosted.address) as stranger:
        stranger.send(b"GET / HTTP/1.1\r\n" * 20)
        stranger.dropped()
    eventually(lambda: any("dropped a connection" in record.getMessage() for record in caplog.records), "the log")
    hosted.close()


def no_process(monkeypatch: pytest.MonkeyPatch, folder: Path, why: str) -> None:
    if why == "no interpreter":
        monkeypatch.setattr(sys, "executable", "")
    elif why == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif why == "another program":
        monkeypatch.setattr(sys, "executable", "/usr/bin/editor")
    elif why == "it ends at once":
        program = folder / "python-broken"
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
    else:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize("why", ["no interpreter", "frozen", "another program", "it ends at once", "no process left"])
def test_without_a_process_it_is_a_thread(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    no_process(monkeypatch, tmp_path, why)
    job = master_job(3)
    with ranks() as group:
        for rank in range(3):
            group.start(job.launch(rank))
        check(group)
        assert [backend.control.directory_host for backend in group.world()] == [0, 0, 0]
        meeting = group.world()[0].world.meeting  # type: ignore[union-attr]
        assert meeting.directory is not None
        assert meeting.directory.pid is None
    warnings = [
        record.getMessage() for record in caplog.records if "in a thread of this process" in record.getMessage()
    ]
    assert len(warnings) == 1


def test_a_process_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python-slow"
    program.write_text("#!/bin/sh\nexec sleep 300\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    hosted = host()
    hosted.ready(timeout=0.2)
    assert hosted.pid is None
    hosted.close()


def test_an_address_that_is_taken_is_an_error_of_the_host() -> None:
    hosted = host()
    with pytest.raises(ConfigError, match="cannot listen"):
        HostedDirectory(2, token=TOKEN, bind=hosted.address, options=FAST, rank=0)
    hosted.close()


# -- ranks that end before they join -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", ["after the others came", "before"])
def test_those_who_wait_for_a_rank_that_has_ended_are_told(seen: str) -> None:
    """Also those who come only then: no world will ever form here."""
    with directory(3) as hosted, ranks() as group:
        job = Job(3, directory=hosted.address)
        if seen == "before":
            hosted.rank_exited(2, "exit code 0")
        group.start(job.launch(0))
        if seen != "before":
            eventually(lambda: 0 in hosted._ranks and hosted._ranks[0].member is not None, "rank 0")
            hosted.rank_exited(2, "exit code 0")
        for rank in range(2):
            if rank:
                group.start(job.launch(rank))
            error = group.error(rank)
            assert isinstance(error, WorldNotFormed)
            assert error.missing == (2,)
            assert "rank 2: its process ended before it joined the world (exit code 0)" in str(error)


def test_a_rank_that_ends_after_it_left_harms_nobody() -> None:
    with directory(2) as hosted, ranks() as group:
        job = Job(2, directory=hosted.address)
        for rank in range(2):
            group.start(job.launch(rank))
        group.world()[1].close()
        hosted.rank_exited(1, "exit code 0")
        group.world()[0].close()
        hosted.rank_exited(0, "exit code 0")
        assert hosted._cause is None


def test_a_process_that_does_not_answer_leaves_time_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_never(_process: DirectoryProcess, timeout: float) -> NoReturn:
        time.sleep(timeout)
        raise NotStarted("its process did not answer")

    monkeypatch.setattr(DirectoryProcess, "ready", answer_never)
    with ranks() as group:
        group.start(Job(2, token=None).launch(0), timeout=4.0)
        error = group.error(0)
    assert isinstance(error, WorldNotFormed)
    assert error.missing == (1,), error
