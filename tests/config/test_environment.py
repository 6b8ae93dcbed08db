"""The small readers, and the folder for private files."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections import Counter
from pathlib import Path

import pytest

from phalanx.config import environment, inherited, log_level, memory_dir, pure, runtime_dir, snapshot, unknown_variables
from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, False) for text in (None, "", "0", "false", "No", "off")),
        *((text, True) for text in ("1", "true", "YES", "on", " 1 ")),
    ],
)
def test_pure(text: str | None, expected: bool) -> None:
    assert pure({} if text is None else {"PHALANX_PURE": text}) is expected


def test_pure_that_is_neither() -> None:
    with pytest.raises(ConfigError, match="PHALANX_PURE='2' is not valid"):
        pure({"PHALANX_PURE": "2"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", None),
        ("debug", logging.DEBUG),
        ("INFO", logging.INFO),
        ("Warning", logging.WARNING),
        ("error", logging.ERROR),
        ("critical", logging.CRITICAL),
    ],
)
def test_log_level(text: str | None, expected: int | None) -> None:
    assert log_level({} if text is None else {"PHALANX_LOG": text}) == expected


def test_log_level_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"PHALANX_LOG='loud' is not valid \(expected debug, info"):
        log_level({"PHALANX_LOG": "loud"})


def test_snapshot_shows_what_is_set_in_the_tables_order() -> None:
    env = {"TMPDIR": "/t", "RANK": "1", "HOME": "/root", "PHALANX_TOKEN": "12345", "SLURM_PROCID": ""}
    assert list(snapshot(env).items()) == [
        ("PHALANX_TOKEN", "set (5 characters)"),
        ("RANK", "1"),
        ("SLURM_PROCID", ""),
        ("TMPDIR", "/t"),
    ]


def test_unknown_variables_are_named_without_their_values() -> None:
    env = {"PHALANX_TOKN": "secret", "PHALANX_HEARTBEAT": "1", "RANK": "0", "PHALANX_A": ""}
    assert unknown_variables(env) == ["PHALANX_A", "PHALANX_TOKN"]


def test_inherited_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LOG", "info")
    copy = inherited()
    assert copy == dict(os.environ)
    copy["PHALANX_LOG"] = "debug"
    assert os.environ["PHALANX_LOG"] == "info"
    assert inherited({"A": "b"}) == {"A": "b"}


# -- runtime_dir -----------------------------------------------------------------------------------------------------


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A stand-in for /tmp: open for all, and sticky."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def ours(parent: Path) -> Path:
    return parent / f"phalanx-{os.geteuid()}"


def private(path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def test_the_users_runtime_folder_is_preferred(tmp_path: Path, parent: Path) -> None:
    folder = private(tmp_path / "run")
    assert runtime_dir({"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(parent)}) == folder
    assert not any(parent.iterdir())


def test_a_runtime_folder_that_is_unfit_is_passed_over(tmp_path: Path, parent: Path) -> None:
    good = private(tmp_path / "good")
    (tmp_path / "link").symlink_to(good)
    (tmp_path / "file").touch(0o600)
    unfit = [tmp_path / "missing", tmp_path / "link", tmp_path / "file", Path("relative")]
    unfit += [private(tmp_path / f"mode{mode:o}", mode) for mode in (0o755, 0o710, 0o701, 0o500)]
    for folder in unfit:
        assert runtime_dir({"XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(parent)}) == ours(parent), folder


def test_a_private_folder_is_made_and_found_again(parent: Path) -> None:
    old = os.umask(0)
    try:
        folder = runtime_dir({"TMPDIR": str(parent)})
    finally:
        os.umask(old)
    assert folder == ours(parent)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "kept").touch()
    assert runtime_dir({"TMPDIR": str(parent)}) == folder
    assert (folder / "kept").exists()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o702, 0o777])
def test_a_folder_that_lets_others_in_is_refused(parent: Path, mode: int) -> None:
    private(ours(parent), mode)
    with pytest.raises(ConfigError, match=f"mode is {mode:04o}, which lets other users in") as caught:
        runtime_dir({"TMPDIR": str(parent)})
    assert str(ours(parent)) in str(caught.value)
    assert "XDG_RUNTIME_DIR" in str(caught.value)


def test_a_folder_without_rights_for_ourselves_is_refused(parent: Path) -> None:
    private(ours(parent), 0o500)
    with pytest.raises(ConfigError, match="cannot write to it"):
        runtime_dir({"TMPDIR": str(parent)})


def test_a_link_is_refused(tmp_path: Path, parent: Path) -> None:
    ours(parent).symlink_to(private(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="symbolic link"):
        runtime_dir({"TMPDIR": str(parent)})


def test_a_dangling_link_is_refused_and_not_followed(tmp_path: Path, parent: Path) -> None:
    ours(parent).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        runtime_dir({"TMPDIR": str(parent)})
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_its_place_is_refused(parent: Path) -> None:
    ours(parent).touch(0o600)
    with pytest.raises(ConfigError, match=r"cannot make"):
        runtime_dir({"TMPDIR": str(parent)})


def test_a_folder_of_another_user_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    private(ours(parent))
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, this is user {owner + 1}"):
        runtime_dir({"TMPDIR": str(parent)})


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_parent_in_which_others_could_replace_it_is_refused(parent: Path, mode: int) -> None:
    parent.chmod(mode)
    with pytest.raises(ConfigError, match="not sticky"):
        runtime_dir({"TMPDIR": str(parent)})


def test_a_parent_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot make .*No such file"):
        runtime_dir({"TMPDIR": str(tmp_path / "missing")})


# -- memory_dir ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["chosen", "shared memory", "without shared memory"])
def slates(
    request: pytest.FixtureRequest, tmp_path: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, str]]:
    """The folder of the slates, and the environment for which it is that one."""
    if request.param == "chosen":
        return tmp_path / "slates", {"PHALANX_SLATE_DIR": str(tmp_path / "slates")}
    env = {"XDG_RUNTIME_DIR": str(private(tmp_path / "run"))}
    shared = parent if request.param == "shared memory" else tmp_path / "missing"
    monkeypatch.setattr(environment, "SHARED_MEMORY", str(shared))
    return (ours(parent) if shared == parent else tmp_path / "run" / "phalanx-slates"), env


def test_a_folder_that_vanishes_after_a_look_at_it_is_made_again(
    slates: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, env = slates
    look, left = Path.lstat, 3

    def remove_after(path: Path) -> os.stat_result:
        nonlocal left
        found = look(path)
        if path == folder and left:
            left -= 1
            path.rmdir()  # as another process does that has taken the last file out of it
        return found

    monkeypatch.setattr(Path, "lstat", remove_after)
    assert memory_dir(env) == folder
    assert folder.is_dir()
    assert not left


def test_a_folder_may_vanish_at_any_moment(
    slates: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, env = slates
    look = environment._unfit
    faults: Counter[str | None] = Counter()
    over = threading.Event()

    def noted(path: Path) -> str | None:
        fault = look(path)
        faults[fault] += 1
        return fault

    def remove() -> None:
        while not over.wait(20e-6):  # not in step with whoever makes it
            with contextlib.suppress(OSError):
                folder.rmdir()

    monkeypatch.setattr(environment, "_unfit", noted)
    thread = threading.Thread(target=remove)
    thread.start()
    try:
        found = {memory_dir(env) for _ in range(1000)}
    finally:
        over.set()
        thread.join()
    assert found == {folder}, faults


def test_a_file_in_the_place_of_the_chosen_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(ConfigError, match="PHALANX_SLATE_DIR=.*file cannot hold private files: it is not a folder"):
        memory_dir({"PHALANX_SLATE_DIR": str(tmp_path / "file")})
