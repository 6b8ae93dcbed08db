"""The program as a person meets it: help, version, errors without tracebacks, commands imported only when used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import phalanx
from phalanx import cli
from phalanx.cli import app
from phalanx.errors import ConfigError

pytestmark = pytest.mark.timeout(60)


def phalanx_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_alone_it_prints_help_with_examples(arguments: list[str]) -> None:
    done = phalanx_command(*arguments)
    assert done.returncode == 0
    assert not done.stderr
    for word in ("run", "top", "doctor", "demo", "bench", "phalanx run -n 4 train.py"):
        assert word in done.stdout


def test_the_version_is_the_packages() -> None:
    done = phalanx_command("--version")
    assert (done.returncode, done.stdout) == (0, f"phalanx {phalanx.__version__}\n")


def test_an_unknown_command_is_refused_with_help() -> None:
    done = phalanx_command("rnu")
    assert done.returncode == 2
    assert "there is no command 'rnu' (did you mean 'run'?)" in done.stderr
    assert "did you mean `phalanx run train.py`?" in phalanx_command("train.py").stderr
    assert "(expected one of run, join, top, doctor, " in phalanx_command("xyzzy").stderr


def test_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom phalanx.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "loaded = [name for name in sys.modules if name.startswith('phalanx.cli.') or name in ('rich', 'torch')]\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["run", "doctor", "demo", "bench"])
def test_every_command_has_help_and_says_in_the_list_what_it_says_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output
    assert name in CliRunner().invoke(app, []).output


def test_an_error_of_phalanx_is_a_message_and_not_a_traceback() -> None:
    done = phalanx_command("doctor", "--master", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("phalanx: --master 'x' is not valid")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "variables"), [(["--debug"], {}), ([], {"PHALANX_LOG": "debug"})])
def test_tracebacks_are_there_for_those_who_ask(arguments: list[str], variables: dict[str, str]) -> None:
    done = phalanx_command(*arguments, "doctor", "--master", "x", **variables)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


def test_errors_that_are_not_phalanxs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.app, "main", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_main_ends_with_1_after_an_error_of_phalanx(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("this cannot work")

    monkeypatch.setattr(cli.app, "main", refuse)
    monkeypatch.delenv("PHALANX_LOG", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "phalanx: this cannot work\n"
