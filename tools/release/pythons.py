"""The interpreters of this machine that Phalanx is for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "Python", "find_pythons"]

ROOT = Path(__file__).resolve().parents[2]
_NEWEST = 20
_ASK = "import json, sys; print(json.dumps([*sys.version_info[:2], getattr(sys, '_is_gil_enabled', lambda: True)()]))"


class Python(NamedTuple):
    """An interpreter."""

    version: tuple[int, int]
    path: str

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def find_pythons(named: str = "") -> list[Python]:
    """One interpreter for each version from 3.10 on: those that are named, or those on the PATH and of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = named.split() or [
        sys.executable,
        *filter(None, (shutil.which(f"python3.{minor}") for minor in range(10, _NEWEST))),
        *map(str, sorted(root.glob("*/bin/python"))),
    ]
    found: dict[tuple[int, int], Python] = {}
    for place in places:
        version = _version_of(place)
        if version is not None and version >= (3, 10):
            found.setdefault(version, Python(version, place))
    return [found[version] for version in sorted(found)]


def _version_of(path: str) -> tuple[int, int] | None:
    """None for what does not run (a shim without a version behind it), or has no GIL, which the core relies on."""
    try:
        done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, timeout=20, check=True)
        major, minor, locked = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return (major, minor) if locked else None
