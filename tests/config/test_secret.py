"""The token: where it comes from, and that nothing ever shows it."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path

import pytest

from phalanx.config import detect, snapshot
from phalanx.errors import ConfigError

SECRET = "correct-horse-battery"


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("argument", "env", "expected"),
    [
        (None, {}, None),
        ("a", {}, b"a"),
        (b"\x00\xff", {}, b"\x00\xff"),
        ("grüße", {}, "grüße".encode()),
        (None, {"PHALANX_TOKEN": "e"}, b"e"),
        ("a", {"PHALANX_TOKEN": "e"}, b"a"),
        (None, {"PHALANX_TOKEN": "\udcff"}, b"\xff"),
        (None, {"PHALANX_TOKEN": "e", "PHALANX_TOKEN_FILE": "/does/not/exist"}, b"e"),
        ("a", {"PHALANX_TOKEN": "", "PHALANX_TOKEN_FILE": "/does/not/exist"}, b"a"),
    ],
)
def test_the_first_source_wins(argument: str | bytes | None, env: dict[str, str], expected: bytes | None) -> None:
    assert detect(token=argument, env=env).token == expected


@pytest.mark.parametrize("content", [b"from-file", b"from-file\n", b"from-file\r\n"])
def test_a_token_file_without_its_line_end(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "token", content, 0o400)
    assert detect(env={"PHALANX_TOKEN_FILE": str(path)}).token == b"from-file"


def test_a_link_to_a_private_file_is_fine(tmp_path: Path) -> None:
    write(tmp_path / "token", b"t")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    assert detect(env={"PHALANX_TOKEN_FILE": str(tmp_path / "link")}).token == b"t"


@pytest.mark.parametrize(
    ("argument", "env", "source"),
    [
        ("", {}, "token"),
        (b"", {}, "token"),
        ("  ", {}, "token"),
        (None, {"PHALANX_TOKEN": ""}, "PHALANX_TOKEN"),
        (None, {"PHALANX_TOKEN": " \n"}, "PHALANX_TOKEN"),
    ],
)
def test_an_empty_token_is_refused(argument: str | bytes | None, env: dict[str, str], source: str) -> None:
    with pytest.raises(ConfigError, match=f"^{source} holds an empty token"):
        detect(token=argument, env=env)


def test_a_token_of_another_type_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="expected str or bytes, got list") as caught:
        detect(token=[SECRET], env={})  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)


def test_a_token_that_is_far_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 4096 bytes"):
        detect(token=b"x" * 5000, env={})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "token", SECRET.encode(), mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o} .*chmod 600") as caught:
        detect(env={"PHALANX_TOKEN_FILE": str(path)})
    assert SECRET not in str(caught.value)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "token", b"t")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(ConfigError, match=r"belongs to user .*expected a file of user 4242"):
        detect(env={"PHALANX_TOKEN_FILE": str(path)})


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    write(tmp_path / "empty", b"\n")
    write(tmp_path / "long", b"x" * 5000)
    for name, words in {
        "pipe": "is not a file",
        "missing": "cannot be read: No such file",
        "empty": "empty token",
        "long": "more than 4096 bytes",
    }.items():
        with pytest.raises(ConfigError, match=words) as caught:
            detect(env={"PHALANX_TOKEN_FILE": str(tmp_path / name)})
        assert str(tmp_path / name) in str(caught.value)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PHALANX_TOKEN_FILE=.* cannot be read"):
        detect(env={"PHALANX_TOKEN_FILE": str(tmp_path)})


def test_nothing_shows_the_token(caplog: pytest.LogCaptureFixture) -> None:
    env = {"PHALANX_TOKEN": SECRET, "SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "1"}
    with caplog.at_level(logging.DEBUG):
        launch = detect(env=env)
        shown = snapshot(env)
    assert launch.token == SECRET.encode()
    assert shown["PHALANX_TOKEN"] == f"set ({len(SECRET)} characters)"
    for text in (repr(launch), str(launch), f"{launch}", caplog.text, repr(shown)):
        assert SECRET not in text
    with pytest.raises(ConfigError) as caught:
        detect(env={**env, "RANK": "7"})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
