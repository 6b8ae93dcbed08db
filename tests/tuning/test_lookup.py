"""Where the settings of a process come from: the environment, a file, a measurement; and when none of them works."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.testing import run_ranks
from phalanx.tuning import DEFAULTS, NEVER, Tuning, current, lookup, store
from phalanx.tuning.decide import Decision
from phalanx.tuning.measure import Measured

needs_core = pytest.mark.skipif(not _native.available, reason="there is nothing to tune without the core")
OTHER = Tuning(reduced_by_all=4096, spins=3000)
DECISIONS = [Decision("reduced_by_all", 16384, 4096, "it is faster"), Decision("spins", 2000, 3000, "so it is")]
PLENTY = 60.0


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_known", [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of our own, and no choice of the user's."""
    monkeypatch.delenv("PHALANX_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "phalanx"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Made-up measurements, one item for each."""
    found: list[int] = []

    def measure(core: object) -> Measured:
        found.append(1)
        return Measured()

    monkeypatch.setattr(lookup, "measure", measure)
    monkeypatch.setattr(lookup, "decide", lambda measured: DECISIONS)
    monkeypatch.setattr(lookup, "running_tasks", lambda: 1)
    return found


def forget() -> None:
    """As a new process."""
    lookup._known.clear()


@needs_core
def test_what_a_busy_machine_has_shown_is_measured_again_when_it_is_at_rest(
    folder: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for running, seen in ((1000, 1), (1000, 1), (1, 2), (1000, 2), (1, 3), (1000, 3), (1, 3)):
        monkeypatch.setattr(lookup, "running_tasks", lambda running=running: running)
        assert current(PLENTY) == OTHER
        assert len(measurements) == seen
        forget()


@needs_core
def test_what_is_provisional_counts_where_there_is_no_time(
    folder: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "running_tasks", lambda: 1000)
    current(PLENTY)
    forget()
    monkeypatch.setattr(lookup, "running_tasks", lambda: 1)
    assert current(0.1) == OTHER
    assert len(measurements) == 1


@needs_core
@pytest.mark.parametrize(
    ("found", "measured"),
    [
        ([NEVER, 4 << 20, 4 << 20], 3),
        ([4 << 20, NEVER, 4 << 20], 3),
        ([NEVER, 4 << 20, NEVER], 3),
        ([NEVER, NEVER], 2),
        ([4 << 20, 8 << 20], 2),
    ],
)
def test_two_of_three_measurements_decide_how_long_arrays_are_copied(
    folder: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch, found: list[int], measured: int
) -> None:
    def decide(_: Measured) -> list[Decision]:
        return [*DECISIONS, Decision("ahead_from", NEVER, found[len(measurements) - 1], "so it was")]

    monkeypatch.setattr(lookup, "decide", decide)
    for _ in range(5):
        last = current(PLENTY)
        forget()
    assert len(measurements) == measured
    assert last.ahead_from == found[-1]


def test_tests_use_the_constants() -> None:
    assert os.environ["PHALANX_TUNING"] == "off"
    assert current(PLENTY) == DEFAULTS


@needs_core
def test_a_machine_is_measured_by_two_programs_if_they_agree(folder: Path, measurements: list[int]) -> None:
    for seen in (1, 2, 2, 2):
        assert current(PLENTY) == OTHER
        assert current(PLENTY) == OTHER
        assert len(measurements) == seen
        forget()
    (path,) = folder.iterdir()
    assert path == lookup.kept_in()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["reasons"]["spins"] == "so it is"


@needs_core
def test_another_machine_is_measured_for_itself(
    folder: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    current(PLENTY)
    forget()
    monkeypatch.setattr(lookup, "cpu_model", lambda: "another")
    current(PLENTY)
    assert len(measurements) == len(list(folder.iterdir())) == 2


def test_the_name_of_a_file_tells_machines_apart() -> None:
    names = {
        store.file_name("Intel(R) Xeon(R)", 2, "6.1", 5),
        store.file_name("Intel R Xeon R", 2, "6.1", 5),
        store.file_name("Intel(R) Xeon(R)", 4, "6.1", 5),
        store.file_name("Intel(R) Xeon(R)", 2, "6.2", 5),
        store.file_name("Intel(R) Xeon(R)", 2, "6.1", 6),
        store.file_name("../../" + "x" * 300, 2, "6.1", 5),
    }
    assert len(names) == 6
    assert all(len(name) < 128 and "/" not in name and name.startswith("tuning-") for name in names)


@needs_core
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"format": 1, "settings": {}}',
        b'{"format": 2}',
        b'{"format": 2, "settings": {"spins": 7}}',
        b'{"format": 2, "settings": {"colour": 7}}',
        b"[" * 60_000,
        b" " * 100_000,
    ],
)
def test_a_file_that_holds_no_settings_is_replaced(
    folder: Path, measurements: list[int], caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = lookup.kept_in()
    assert path is not None
    path.write_bytes(content)
    assert current(PLENTY) == OTHER
    assert "is not used" in caplog.text
    assert store.load(path) == OTHER


@needs_core
@pytest.mark.parametrize("kind", ["foreign", "writable", "folder", "pipe"])
def test_a_file_that_others_may_have_written_is_not_used(
    folder: Path, measurements: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = lookup.kept_in()
    assert path is not None
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        store.save(path, [Decision("spins", 2000, 9999, "")])
    if kind == "writable":
        path.chmod(0o666)
    elif kind == "foreign":
        monkeypatch.setattr(store.os, "geteuid", lambda: os.getuid() + 1)
        if os.getuid() == 0:
            os.chown(path, 12345, -1)
    assert current(PLENTY) == OTHER
    assert "is not used" in caplog.text


@needs_core
def test_a_home_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured is kept beside the user's private files then, until the machine is started again."""
    monkeypatch.delenv("PHALANX_TUNING")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    assert current(PLENTY) == OTHER
    assert [path.name.startswith("tuning-") for path in private.iterdir()] == [True]


@needs_core
def test_no_folder_at_all_is_no_error(tmp_path: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_TUNING")
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, "/dev/null/nowhere")
    assert current(PLENTY) == OTHER
    assert lookup.kept_in() is None


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    store.save(path, DECISIONS)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(store.json, "dump", fail)
    store.save(path, [Decision("spins", 2000, 9999, "")])
    assert store.load(path) == OTHER
    assert list(tmp_path.iterdir()) == [path]


@needs_core
def test_who_has_little_time_does_not_measure(folder: Path, measurements: list[int]) -> None:
    assert current(0.5) == DEFAULTS
    assert not measurements
    assert current(PLENTY) == OTHER, "the next one does"


@needs_core
def test_a_measurement_that_fails_leaves_the_constants(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(core: object) -> Measured:
        raise MemoryError

    monkeypatch.setattr(lookup, "measure", fail)
    assert current(PLENTY) == DEFAULTS
    assert "its constants are used" in caplog.text


@needs_core
def test_nobody_waits_for_another_thread_that_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor, in a process that was forked meanwhile, for one that does not exist."""
    began, may_end = threading.Event(), threading.Event()

    def measure(core: object) -> Measured:
        began.set()
        assert may_end.wait(PLENTY)
        return Measured()

    monkeypatch.setattr(lookup, "measure", measure)
    thread = threading.Thread(target=current, args=(PLENTY,))
    thread.start()
    try:
        assert began.wait(PLENTY)
        assert current(PLENTY) == DEFAULTS
    finally:
        may_end.set()
        thread.join()


@needs_core
def test_the_user_has_the_last_word(
    folder: Path, measurements: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = tmp_path / "mine.json"
    store.save(named, [Decision("spins", 2000, 7777, "")])
    for choice, wanted, measured in (
        ("off", DEFAULTS, 0),
        ("OFF", DEFAULTS, 0),
        (str(named), Tuning(spins=7777), 0),
        ("fresh", OTHER, 1),
        ("Fresh", OTHER, 2),
        ("", OTHER, 2),
    ):
        monkeypatch.setenv("PHALANX_TUNING", choice)
        forget()
        assert (current(PLENTY), len(measurements)) == (wanted, measured), choice


@needs_core
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_named_file_that_is_none_leaves_the_constants(
    content: str | None,
    measurements: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    assert current(PLENTY) == DEFAULTS
    assert not measurements
    assert f"PHALANX_TUNING={path} is not used" in caplog.text


@needs_core
def test_all_ranks_use_the_settings_of_the_one_that_makes_the_segment(tmp_path: Path) -> None:
    """Others have other files. With different settings two ranks would meet at different steps, and never end."""

    def program(world: px.Group, files: list[str]) -> list[float]:
        os.environ["PHALANX_TUNING"] = files[world.rank]
        forget()
        sums = []
        for count in (100, 500, 2000, 3000, 5000, 50_000):
            x = np.full(count, world.rank + 1.0, np.float32)
            world.all_reduce(x)
            sums.append(float(x.sum()) / count)
        return sums

    files = []
    for rank, size in enumerate((1024, 65536, 16384)):
        path = tmp_path / f"{rank}.json"
        store.save(path, [Decision("reduced_by_all", 16384, size, "")])
        files.append(str(path))
    assert run_ranks(3, program, files, backend="mesh") == [[6.0] * 6] * 3


@needs_core
def test_the_core_measures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it comes to an end, and that what it finds can be used; not what it is."""
    measured, decisions = lookup.calibrate()
    assert measured.look is None or measured.look > 0
    assert all(seconds > 0 for seconds in (*measured.by_all.values(), *measured.by_parts.values()))
    assert [decision.setting for decision in decisions] == [
        "reduced_by_all",
        "spins",
        "copy_once_from",
        "ahead_from",
        "past_from",
    ]
    path = lookup.kept_in()
    assert path is not None
    assert store.load(path) is not None


@needs_core
@pytest.mark.parametrize("mover", range(5))
def test_the_core_moves_bytes(mover: int) -> None:
    assert _native.core is not None
    assert _native.core.time_movement(100_000, 1, 1, False, mover, 2, 2, 0.01) > 0
    assert _native.core.time_movement(100_000, 3, 3, True, mover, 2, 2, 0.01) > 0


@needs_core
@pytest.mark.parametrize("arguments", [(0, 1, 1, False, 0, 1), (8, 0, 1, False, 0, 1), (8, 1, 1, False, 9, 1)])
def test_the_core_refuses_what_cannot_be_measured(arguments: tuple[Any, ...]) -> None:
    assert _native.core is not None
    with pytest.raises(ValueError, match="does not exist"):
        _native.core.time_movement(*arguments, 1, 0.01)
