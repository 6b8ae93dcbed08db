"""Type checkers on a user's script: mypy and pyright find the errors in it that they should, and no others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("script.py")
WANTED = {
    number for number, line in enumerate(SCRIPT.read_text(encoding="utf-8").splitlines(), 1) if line.endswith("# error")
}


def differences(found: dict[int, str]) -> list[str]:
    """The lines on which a checker and the script disagree."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    missed = [f"line {number}, no error: {lines[number - 1].strip()}" for number in sorted(WANTED - found.keys())]
    others = [f"line {number}: {found[number]}" for number in sorted(found.keys() - WANTED)]
    return missed + others


def test_the_script_has_lines_of_both_kinds() -> None:
    assert len(WANTED) > 20
    assert SCRIPT.read_text(encoding="utf-8").count("assert_type(") > 40


@pytest.mark.timeout(300)
def test_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    settings = tmp_path / "mypy.ini"  # a user's, not ours
    settings.write_text(f"[mypy]\nstrict = true\nmypy_path = {ROOT / 'src'}\n", encoding="utf-8")
    cache = ROOT / ".mypy_cache" / "user"
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(cache), str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    found = re.findall(r"script\.py:(\d+): error: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    assert not differences({int(line): words for line, words in found})
    assert all("script.py:" in line for line in done.stdout.splitlines() if ": error:" in line)


def pyright() -> list[str] | None:
    """The command, where it is installed."""
    beside = Path(sys.executable).with_name("pyright")
    found = str(beside) if beside.exists() else shutil.which("pyright")
    return None if found is None else [found]


@pytest.mark.timeout(300)
def test_pyright(tmp_path: Path) -> None:
    command = pyright()
    if command is None:
        pytest.skip("pyright is not installed (pip install pyright)")
    shutil.copy(SCRIPT, tmp_path)  # it takes no files outside of its project
    settings = {"include": [SCRIPT.name], "extraPaths": [str(ROOT / "src")], "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command += ["--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    quiet = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=quiet)
    if not done.stdout.startswith("{"):  # it fetches itself when it is first used
        pytest.skip(f"pyright does not start here: {(done.stderr or done.stdout).strip()[-200:]}")
    report = json.loads(done.stdout)
    errors = [one for one in report["generalDiagnostics"] if one["severity"] == "error"]
    assert report["summary"]["filesAnalyzed"] == 1
    assert all(Path(one["file"]).name == SCRIPT.name for one in errors)
    assert not differences({one["range"]["start"]["line"] + 1: one["message"] for one in errors})
