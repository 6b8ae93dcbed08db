"""A plugin of pytest: writes down what was tested on which machine, for the table of docs/compatibility.md.

`--record whole` names the part that is run: `whole` for all tests, `torch` for the plug-in's, `some of torch` for a few
of them. The record goes to `build/tested`; `python -m docs.compatibility` takes it into the page. A run of chosen tests
(`-k`, `-x`, files that the user names) is not recorded.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "tested"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="PART", help="write what was tested, and with what, to build/tested")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """At the end of a run. xdist's workers have no terminal, so that the controller alone writes."""
    part = config.getoption("record")
    if part and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and not _chosen(config, part):
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "skipped", "failed", "error")}
        write(part, counts, FOLDER)


def _chosen(config: pytest.Config, part: str) -> bool:
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return bool(config.option.keyword or config.option.maxfail or (named and part == "whole"))


def write(part: str, counts: dict[str, int], folder: Path) -> Path:
    """The record of a run, in a file of its own for each machine, Python, torch and part."""
    try:
        torch = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    record = {
        "part": part,
        "python": platform.python_version(),
        "torch": torch,
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _commit(),
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "failed": counts["failed"] + counts["error"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{platform.machine()}-{record['python']}-{torch or 'none'}-{part.replace(' ', '-')}.json"
    path = folder / name
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def _commit() -> str:
    """The commit of the checkout; empty for one that is none, with a plus for one that was changed."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
