"""The slate of a rank: written by the core or by Python, read by others, removed or left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import _native
from phalanx.group.tracking import call_site
from phalanx.operating_system import process_started
from phalanx.seeing.reading import RankSlate
from phalanx.seeing.slates import read_files
from phalanx.slate import files, layout
from phalanx.slate import slate as slate_module
from phalanx.slate.calls import CallCounts
from phalanx.slate.slate import Slate, open_slate
from phalanx.slate.writing import PythonWriter
from phalanx.transports.stream import LinkState

PID_OF_NOBODY = 2**31 - 1


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slates"

    def made() -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    monkeypatch.setattr(files, "memory_dir", made)
    monkeypatch.setattr(slate_module, "_LEFT", {})
    return folder


def opened(job: str = "job", rank: int = 0) -> Slate:
    made = open_slate(job, rank, 2, "host", "id", "127.0.0.1:1", list)
    assert made is not None
    return made


@pytest.mark.parametrize("kind", ["core", "python"])
def test_operations_are_noted(own_folder: Path, kind: str) -> None:
    if kind == "core" and _native.core is None:
        pytest.skip("there is no core")
    path, fd = files.make_file("job", 0)
    writer = PythonWriter(fd) if kind == "python" else _native.core.SlateWriter(fd)
    writer.memory[layout.COUNT_AT + 8] = 1  # as Slate does: the first site stands for all others
    site = call_site.find()
    first = writer.begin(1, "all_reduce", site, -1, 64, 5, 77)
    second = writer.begin(1, "send", site, 1, 32, 0, 0)
    writer.end(second)
    os.close(fd)
    found = RankSlate(path.read_bytes())
    assert found.records["sequence"].tolist() == [5, 0]
    assert found.records["number"].tolist() == [1, 2]
    assert found.records["ended_ns"][0] == 0
    assert found.records["ended_ns"][1] >= found.records["began_ns"][1] > 0
    assert [site.verb for site in found.sites[1:]] == ["all_reduce", "send"]
    assert found.sites[1].where.startswith(f"{Path(__file__).name}:")
    assert found.sites[1].function == "test_operations_are_noted"
    writer.end(first)
    found = RankSlate(path.read_bytes())
    assert found.site_table["count"].tolist() == [0, 1, 1]
    assert found.site_table["bytes"].tolist() == [0, 64, 32]


@pytest.mark.parametrize("kind", ["core", "python"])
def test_a_file_whose_name_is_not_utf8(kind: str) -> None:
    if kind == "core" and _native.core is None:
        pytest.skip("there is no core")
    path, fd = files.make_file("job", 0)
    writer = PythonWriter(fd) if kind == "python" else _native.core.SlateWriter(fd)
    writer.memory[layout.COUNT_AT + 8] = 1
    scope: dict[str, Any] = {"find": call_site.find}
    exec(compile("def main(): return find()", "bad\udcff.py", "exec"), scope)  # as Python names such a file
    writer.begin(1, "all_reduce", scope["main"](), -1, 64, 5, 77)
    os.close(fd)
    assert str(RankSlate(path.read_bytes()).sites[1]) == "all_reduce at bad?.py:1 in main"


@pytest.mark.parametrize("kind", ["core", "python"])
def test_the_ring_goes_round(kind: str) -> None:
    if kind == "core" and _native.core is None:
        pytest.skip("there is no core")
    path, fd = files.make_file("job", 0)
    writer = PythonWriter(fd) if kind == "python" else _native.core.SlateWriter(fd)
    writer.memory[layout.COUNT_AT + 8] = 1
    site = call_site.find()
    old = writer.begin(1, "recv", site, 0, 0, 0, 0)
    for sequence in range(1, layout.RECORDS + 10):
        writer.end(writer.begin(1, "barrier", site, -1, 0, sequence, 1))
    writer.end(old)  # its place is another's by now
    os.close(fd)
    found = RankSlate(path.read_bytes())
    cleared = kind == "core"  # the record after the last one, ahead of time
    assert found.records["sequence"].tolist() == list(range(10 + cleared, layout.RECORDS + 10))
    assert (found.records["ended_ns"] > 0).all()
    assert found.site_table["count"].tolist() == [0, 1, layout.RECORDS + 9]


def test_what_a_slate_says_of_its_rank(own_folder: Path) -> None:
    slate = opened(rank=1)
    slate.watch_program(lambda: "train.py:5 in main")
    number = slate.add_group(b"0123456789abcdef", 1, (0, 1))
    slate._beat()
    [file] = files.listed()
    data = file.read()
    assert data is not None
    found = RankSlate(data)
    assert (found.rank, found.world_size, found.pid) == (1, 2, os.getpid())
    assert found.place == "train.py:5 in main"
    assert found.groups[number].members == (0, 1)
    assert found.text("process_started") == process_started(os.getpid())
    assert found.memory > 1 << 20
    assert file.is_alive
    assert files.text(data, "program") == " ".join(sys.argv)[:511]
    slate.drop_group(number)
    assert number in RankSlate(slate.contents()).groups, "its operations can still be compared"
    slate.close()
    slate.close()
    assert not own_folder.exists(), "the last one takes the folder with it"


def test_the_next_world_of_a_process_goes_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher is still to read the first: it stays, and there is one file for both."""
    monkeypatch.setattr(slate_module, "is_watched", lambda: True)
    link = LinkState(1000, 2000, 30, 4, 50, 0, 7, 1448)
    links = {3: link}
    site = call_site.find()
    groups = []
    for world in range(3):
        slate = open_slate("job", 0, 2, "host", "id", "127.0.0.1:1", lambda: links.items())
        assert slate is not None
        number = slate.add_group(b"0123456789abcdef", 0, (0, 1))
        slate.writer.end(slate.writer.begin(number, "barrier", site, -1, 8, 1, 7))
        slate.writer.begin(number, "recv", site, 1, 8, 0, 0)
        [file] = files.listed()
        assert file.state == layout.RUNNING
        found = RankSlate(file.path.read_bytes())
        groups.append(found.groups[number])
        assert found.began_ns == RankSlate(slate.contents()).began_ns
        links[1] = link
        slate.close()
        assert file.state == layout.CLOSED
        slate.drop_group(number)
        assert int(found.header["count"]) == 2 * world + 2
    found = RankSlate(file.path.read_bytes())
    assert [(place.verb, row["count"]) for place, row in zip(found.sites, found.site_table, strict=True)][1:] == [
        ("barrier", 3),
        ("recv", 0),
    ]
    assert len({group.id for group in groups}) == 3, "operations of two worlds are not compared"
    assert len({group.number for group in groups}) == 3
    assert {int(row["rank"]): int(row["sent"]) for row in found.peers} == {3: 3000, 1: 3000}


def test_groups_beyond_the_table_are_not_shown() -> None:
    slate = opened()
    numbers = [slate.add_group(bytes([n]) * 16, 0, (0, 1)) for n in range(1, layout.GROUPS + 3)]
    assert numbers[:-3] == list(range(1, layout.GROUPS))
    assert numbers[-3:] == [0, 0, 0]
    slate.drop_group(5)
    assert slate.add_group(b"x" * 16, 0, (0, 1)) == 5
    slate.close()


def test_remote_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = CallCounts()
    monkeypatch.setattr(slate_module, "CALLS", counts)
    slate = opened()
    counts.add("add", 1, True, 0.5)
    counts.add("add", 1, False, 0.25)
    counts.add("add", -1, True, 0.625, queue=0.125, handler=0.5)
    slate._beat()
    found = RankSlate(slate.contents()).calls
    assert [(bytes(row["name"]), row["peer"], row["count"], row["failed"]) for row in found] == [
        (b"add", 1, 2, 1),
        (b"add", -1, 1, 0),
    ]
    assert found["total_ns"].tolist() == [750_000_000, 625_000_000]
    assert found["queue_ns"].tolist() == [0, 125_000_000]
    for number in range(200):
        counts.add(f"f{number}", 0, True, 0.1)
    slate._beat()
    found = RankSlate(slate.contents()).calls
    assert len(found) == layout.CALLS
    assert bytes(found[-1]["name"]) == b"others"
    assert found[-1]["count"] == 139
    slate.close()


def test_a_slate_that_is_just_being_made_is_left_alone(own_folder: Path) -> None:
    path, fd = files.make_file("new", 0)
    os.close(fd)
    files.tidy(but="other")
    assert path.exists()
    gone = path.rename(own_folder / f"old.0.{PID_OF_NOBODY}")
    long_ago = time.time() - 2 * files.SILENCE
    os.utime(gone, (long_ago, long_ago))
    files.tidy(but="other")
    assert not gone.exists()


def test_a_slate_of_a_container_lives_by_its_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has another number here, or none."""
    monkeypatch.setattr(slate_module, "memory_namespace", lambda: 7)
    monkeypatch.setattr(slate_module, "process_started", lambda pid: "1")
    slate = opened("contained")
    [file] = files.listed()
    assert file.is_alive
    assert read_files("contained", ended=False).keys() == {0}
    now = time.monotonic_ns()
    monkeypatch.setattr(files.time, "monotonic_ns", lambda: now + int(2 * files.SILENCE * 1e9))
    assert not file.is_alive
    slate.close()


def test_other_files_in_the_folder_are_no_slates(own_folder: Path) -> None:
    opened().close()
    own_folder.mkdir(mode=0o700)
    for name in ("x.\N{SUPERSCRIPT TWO}0.1", "x", "x.y.z", "a.1"):
        (own_folder / name).touch()
    assert list(files.listed()) == []


def test_a_job_that_failed_later_is_kept(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slate_module, "is_watched", lambda: True)
    monkeypatch.setattr(files, "is_written", lambda data: False)
    for job in ("well", "failed"):
        opened(job).close()
    [failed] = [file for file in files.listed() if file.job == "failed"]
    failed.note_failure("rank 0 failed: exit code 3")
    files.tidy()
    assert [file.job for file in files.listed()] == ["failed"]
    assert RankSlate(failed.path.read_bytes()).text("failure") == "rank 0 failed: exit code 3"


def test_calls_of_two_long_names_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be one series of the metrics twice."""
    counts = CallCounts()
    monkeypatch.setattr(slate_module, "CALLS", counts)
    slate = opened()
    for end in "xy":
        counts.add("a" * 60 + end, 2, True, 0.5)
    slate._beat()
    [row] = RankSlate(slate.contents()).calls
    assert (bytes(row["name"]), row["count"], row["total_ns"]) == (b"a" * 55, 2, 1_000_000_000)
    slate.close()


def test_a_failed_rank_leaves_its_slate(own_folder: Path) -> None:
    slate = opened()
    slate.fail()
    slate.close()
    [file] = files.listed()
    assert file.state == layout.FAILED


def test_only_the_last_failure_is_kept(own_folder: Path) -> None:
    own_folder.mkdir()
    for number, (job, state) in enumerate([("old", 2), ("fine", 1), ("new", 2), ("mine", 0)]):
        path = own_folder / f"{job}.0.999999{number}"
        data = bytearray(layout.SIZE)
        header = np.frombuffer(data, layout.HEADER, 1)[0]
        header["magic"], header["version"], header["state"] = layout.MAGIC, layout.VERSION, state
        header["process_started"], header["identity"] = b"gone", layout.identity_of(bytes(data))
        path.write_bytes(data)
        os.utime(path, (number, number))
    files.tidy(but="mine")
    assert sorted(file.job for file in files.listed()) == ["mine", "new"]


def test_a_stranger_is_not_read(own_folder: Path) -> None:
    own_folder.mkdir()
    (own_folder / "job.0.1").write_bytes(b"x" * layout.SIZE)
    (own_folder / "job.1.1").write_bytes(b"short")
    (own_folder / "job.2.1").symlink_to("/etc/passwd")
    (own_folder / "job.3.1").mkdir()
    os.mkfifo(own_folder / "job.4.1")
    assert [file.read() for file in files.listed()] == [None] * 5


@pytest.mark.parametrize("field", ["world_size", "rank", "pid", "size", "version", "job"])
def test_a_damaged_slate_is_not_read(field: str) -> None:
    slate = opened()
    [file] = files.listed()
    assert read_files("job").keys() == {0}
    at = layout.HEADER.fields[field][1]  # type: ignore[index]
    with file.path.open("r+b") as damaged:
        damaged.seek(at + 2)
        damaged.write(b"\x7f")
    assert file.read() is None
    assert read_files("job") == {}
    slate.close()


def test_room_for_slates(own_folder: Path) -> None:
    assert files.why_no_room(1) == ""
    assert not own_folder.exists()
    found = files.why_no_room(1 << 40)
    assert found.startswith(f"{own_folder} has room for ")
    assert found.endswith(f" KiB, and they need {(layout.SIZE << 40) >> 10}")


@pytest.mark.parametrize("kind", ["core", "python"])
def test_time_without_a_processor_is_noted(kind: str) -> None:
    """Two processes on one core: each has it for half of the time."""
    if kind == "core" and _native.core is None:
        pytest.skip("there is no core")
    if not hasattr(os, "sched_setaffinity") or not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not count it")
    path, fd = files.make_file("job", 0)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        busy = os.fork()
        if busy == 0:
            end = time.monotonic() + 10
            while time.monotonic() < end and os.getppid() != 1:
                pass
            os._exit(0)
        # A process of its own: what is counted is that of its main thread.
        writer = PythonWriter(fd) if kind == "python" else _native.core.SlateWriter(fd)
        site = call_site.find()
        for wait in (False, True):
            began = time.monotonic()
            while wait and time.monotonic() < began + 0.5:
                pass
            writer.end(writer.begin(1, "barrier", site, -1, 8, 1, 7))
        os.kill(busy, signal.SIGKILL)
        os.waitpid(busy, 0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(fd)
    first, second = RankSlate(path.read_bytes()).records["starved_us"].tolist()
    assert first == 0
    assert 50_000 < second < 1e6 * (time.monotonic() - began)


def test_no_room_is_no_failure(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "reserve", full)
    assert open_slate("job", 0, 2, "host", "id", "", list) is None
    assert list(files.listed()) == []


def test_a_forked_child_leaves_it_alone() -> None:
    slate = opened()
    child = os.fork()
    if child == 0:
        slate.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(files.listed())) == 1
    slate.close()


FAILS = """
import numpy as np
import phalanx as px
from phalanx.seeing.reading import RankSlate

world = px.init()
for _ in range(3):
    world.all_reduce(np.ones(8))
if world.rank == 0:
    try:
        world.all_reduce(np.ones(8), timeout=0.3)
    except px.Timeout:
        pass
    records = RankSlate(world.backend.world.slate.contents()).records
    ends = records[records["sequence"] > 0]["ended_ns"]
    print("signs", *np.sign(ends[-4:]), flush=True)
else:
    import time

    time.sleep(2)
world.close()
"""


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_an_operation_that_fails_is_noted_as_such(tmp_path: Path, transport: str) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    environment = {**os.environ, "PHALANX_TRANSPORT": transport}
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", "--no-prefix", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "signs 1 1 1 -1" in done.stdout, done.stderr
