"""Programs of the recipes, run as a user runs them, with real ranks on loopback.

`make test-recipes` has an environment with all clients. A client that is not there is a test that is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from tests.launchers.processes import Jobs

__all__ = ["PROGRAMS", "ROOT", "Client", "recipe", "said"]

LIMIT = 280.0
"""Seconds for one program: on a busy machine, importing transformers or starting Ray alone takes half a minute."""
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "recipes"

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def recipe(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of a file of tests: not for `make test`, and only where these packages are."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    why = f"{', '.join(missing)} not installed (make test-recipes has an environment with it)"
    return [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(missing), reason=why)]


class Client:
    """Runs programs of this environment in a folder of its own, without anything from the network."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def run(self, *command: str | Path, env: dict[str, str] | None = None, fails: bool = False) -> str:
        """Runs a command to its end; its standard output, or standard error if it is meant to fail."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(self._jobs.folder), **_QUIET}
        job = self._jobs.start(*command, env={**own, **(env or {})})
        code = job.finish(LIMIT)
        assert (code != 0) == fails, job.out + job.err
        return job.err if fails else job.out

    def changed(self, program: str, old: str, new: str) -> Path:
        """A copy of a program in which one place is another."""
        text = (PROGRAMS / program).read_text(encoding="utf-8")
        assert text.count(old) == 1
        copy = self._jobs.folder / f"changed_{program}"
        copy.write_text(text.replace(old, new), encoding="utf-8")
        return copy


def said(output: str, *, but: str = "ranks on") -> list[str]:
    """The lines of a program without the rank that a launcher puts in front, and without the line that differs."""
    lines = [re.sub(r"^\[\d+\] ", "", line).strip() for line in output.splitlines()]
    return [line for line in lines if line and but not in line]
