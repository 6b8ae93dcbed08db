"""The private file through which ranks of one host share a token: who may read it, when it counts, when it goes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.lateness import bound
from tests.ports import free_port
from tests.rendezvous.support import LOOPBACK, Job, check, eventually, ranks

from phalanx.deadline import Deadline
from phalanx.errors import ConfigError, RendezvousError, WorldNotFormed
from phalanx.operating_system import process_started
from phalanx.rendezvous import token_file
from phalanx.rendezvous.host import host_id
from phalanx.rendezvous.token_file import JobFile, new_token, publish, wait_for
from phalanx.types import Address

JOB = "0123456789abcdef"


def path_of(runtime: Path, job: str = JOB) -> Path:
    return runtime / f"job-{job}.token"


def content(**changes: object) -> bytes:
    alive = JobFile(b"token", os.getpid(), process_started(os.getpid()), host_id(), None)
    return msgspec.json.encode(msgspec.structs.replace(alive, **changes))


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def look() -> JobFile:
    return wait_for(JOB, Deadline(0.1), rank=1)


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_this_user_can_read_it(runtime: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = publish(JOB, b"the token", Address(LOOPBACK, 1234))
    finally:
        os.umask(before)
    assert path == path_of(runtime)
    status = path.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert [p.name for p in runtime.iterdir()] == [path.name]
    found = look()
    assert (found.token, found.directory) == (b"the token", "127.0.0.1:1234")
    path.unlink()


def test_tokens_are_long_and_fresh() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {64}


def test_it_is_never_seen_half_written(runtime: Path) -> None:
    """A reader sees the old file or the new one, never a part."""
    stop = threading.Event()

    def write_on() -> None:
        while not stop.is_set():
            publish(JOB, b"x" * 2000, None)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for _ in range(300):
            assert len(wait_for(JOB, Deadline(10), rank=1).token) == 2000
    finally:
        stop.set()
        writer.join()
    path_of(runtime).unlink()


def test_what_a_crash_left_is_replaced(runtime: Path) -> None:
    write(path_of(runtime), content(pid=2**22 + 1), 0o644)
    write(runtime / f".job-{JOB}.token.{os.getpid()}", b"half")
    path = publish(JOB, b"new", None)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert look().token == b"new"
    path.unlink()


def test_a_link_at_its_place_is_replaced_and_not_followed(runtime: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "precious", b"precious", 0o644)
    path_of(runtime).symlink_to(target)
    (runtime / f".job-{JOB}.token.{os.getpid()}").symlink_to(target)
    path = publish(JOB, b"new", None)
    assert not path.is_symlink()
    assert target.read_bytes() == b"precious"
    path.unlink()


def test_a_place_that_cannot_be_written(runtime: Path) -> None:
    """Nothing of the token is left beside it."""
    path_of(runtime).mkdir()
    with pytest.raises(RendezvousError, match=r"cannot write .*or set PHALANX_TOKEN"):
        publish(JOB, b"new", None)
    assert [path.name for path in runtime.iterdir()] == [path_of(runtime).name]
    path_of(runtime).rmdir()


def test_rank_0_gives_everything_back_when_it_cannot_be_written(runtime: Path) -> None:
    job = Job(2, token=None)
    path_of(runtime, job.name).mkdir()
    with ranks() as group:
        group.start(job.launch(0), timeout=5)
        assert isinstance(group.error(0), RendezvousError)
    path_of(runtime, job.name).rmdir()


def test_no_folder_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    with ranks() as group:
        group.start(Job(2, token=None).launch(0), timeout=5)
        error = group.error(0)
    assert isinstance(error, ConfigError)
    assert "XDG_RUNTIME_DIR" in str(error)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o606, 0o666, 0o644, 0o601])
def test_a_file_that_others_can_read_or_write_is_refused(runtime: Path, mode: int) -> None:
    path = write(path_of(runtime), content(), mode)
    with pytest.raises(RendezvousError, match=f"not private to this user .*mode {mode:o}.*remove it"):
        look()
    path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_file_of_another_user_is_refused(runtime: Path) -> None:
    path = write(path_of(runtime), content())
    os.chown(path, 65534, 65534)
    with pytest.raises(RendezvousError, match="not private to this user .owner 65534"):
        look()
    path.unlink()


@pytest.mark.parametrize("target", ["private", "nowhere"])
def test_a_link_is_refused(runtime: Path, tmp_path: Path, target: str) -> None:
    write(tmp_path / "private", content())
    path_of(runtime).symlink_to(tmp_path / target)
    with pytest.raises(RendezvousError, match="cannot read the job's token file"):
        look()
    path_of(runtime).unlink()


def test_a_folder_is_refused(runtime: Path) -> None:
    path_of(runtime).mkdir(mode=0o700)
    with pytest.raises(RendezvousError):
        look()
    path_of(runtime).rmdir()


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(runtime: Path) -> None:
    os.mkfifo(path_of(runtime), 0o600)
    with pytest.raises(RendezvousError, match="not private"):
        look()
    path_of(runtime).unlink()


def dead_process() -> tuple[int, str | None]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(child.pid)
    child.communicate(b"\n")
    return child.pid, started


def stale() -> dict[str, dict[str, object]]:
    pid, started = dead_process()
    return {
        "dead writer": {"pid": pid, "started": started},
        "reused pid": {"started": "1"},
        "another machine": {"host_id": "elsewhere/1"},
    }


@pytest.mark.parametrize("kind", ["dead writer", "reused pid", "another machine"])
def test_a_stale_file_counts_as_absent(runtime: Path, kind: str) -> None:
    path = write(path_of(runtime), content(**stale()[kind]))
    with pytest.raises(WorldNotFormed) as caught:
        look()
    assert caught.value.missing == (0,)
    assert str(path) in str(caught.value)
    path.unlink()


@pytest.mark.parametrize("data", [b"", b"junk", b"{}", b'{"token":1}', b"[" * 5000, b"\xff" * 5000])
def test_junk_counts_as_absent(runtime: Path, data: bytes) -> None:
    path = write(path_of(runtime), data)
    with pytest.raises(WorldNotFormed):
        look()
    path.unlink()


def test_the_file_of_another_job_is_not_looked_at(runtime: Path) -> None:
    path = publish("another", b"another", None)
    with pytest.raises(WorldNotFormed):
        look()
    path.unlink()


def test_the_deadline_is_kept() -> None:
    started = time.monotonic()
    with pytest.raises(WorldNotFormed):
        wait_for(JOB, Deadline(0.3), rank=1)
    assert time.monotonic() - started < bound(5)


# -- in a world --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [True, False])
def test_a_world_over_a_stale_file(runtime: Path, master: bool) -> None:
    job = Job(3, token=None, master=Address(LOOPBACK, free_port()) if master else None)
    write(path_of(runtime, job.name), content(**stale()["dead writer"], directory=f"{LOOPBACK}:1"))
    with ranks() as group:
        group.start(job.launch(2))
        group.start(job.launch(1))
        time.sleep(0.1)
        group.start(job.launch(0))
        check(group)


def test_it_is_gone_once_the_world_has_formed(runtime: Path) -> None:
    job = Job(2, token=None)
    with ranks() as group:
        group.start(job.launch(0))
        eventually(path_of(runtime, job.name).exists, "the file")
        group.start(job.launch(1))
        group.outcome(1)
        assert list(runtime.iterdir()) == []
        check(group)


def test_it_is_gone_when_the_world_did_not_form(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bool] = []

    def note(*arguments: Any) -> Path:
        path = publish(*arguments)
        written.append(path.exists())
        return path

    monkeypatch.setattr(token_file, "publish", note)
    with ranks() as group:
        group.start(Job(2, token=None).launch(0), timeout=0.5)
        assert isinstance(group.error(0), WorldNotFormed)
    assert written == [True]
    assert list(runtime.iterdir()) == []


def test_two_jobs_at_once(runtime: Path) -> None:
    jobs = [Job(2, token=None), Job(2, token=None)]
    with ranks() as one, ranks() as other:
        for rank in range(2):
            one.start(jobs[0].launch(rank))
            other.start(jobs[1].launch(rank))
        check(one)
        check(other)


def test_the_token_is_in_no_log_and_no_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(0)
    monkeypatch.setattr(token_file, "new_token", lambda: b"never to be seen")
    job = Job(2, token=None)
    with ranks() as group:
        group.start(job.launch(0), timeout=1.0)
        group.start(job.launch(1, world_size=3), timeout=1.0)
        errors = [group.error(0), group.error(1)]
    assert "never to be seen" not in caplog.text + repr(errors) + repr([job.launch(0, token=b"never to be seen")])
