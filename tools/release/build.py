"""Builds: the sdist from the checkout, and every wheel from the sdist, so that the sdist is known to build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from .pythons import ROOT, Python

__all__ = ["Built", "in_containers", "on_this_machine", "pure", "sdist"]

_STABLE = (3, 12)
"""The Python whose wheel is for all that follow: `wheel.py-api` in pyproject.toml."""


class Built(NamedTuple):
    """A file, and the seconds that it took."""

    path: Path
    seconds: float


def sdist(folder: Path) -> Built:
    """The sdist of this checkout."""
    return _build(sys.executable, ["--sdist", str(ROOT)], folder, {})


def pure(source: Path, folder: Path) -> Built:
    """The wheel without the core, which every Python on every system can install."""
    return _build(sys.executable, ["--wheel", str(source)], folder, {"PHALANX_BUILD_CORE": "0"})


def on_this_machine(source: Path, pythons: list[Python], folder: Path) -> list[Built]:
    """Wheels by this machine's compiler: for its kind of Linux, and glibc from its own on."""
    built = []
    oldest_stable = min((python.version for python in pythons if python.version >= _STABLE), default=None)
    for python in pythons:
        if python.version > _STABLE and python.version != oldest_stable:
            continue  # it has the wheel of an older one
        with tempfile.TemporaryDirectory() as raw:
            wheel = _build(python.path, ["--wheel", str(source)], Path(raw), {})
            _run([sys.executable, "-m", "auditwheel", "repair", "-w", str(folder), str(wheel.path)])
        newest = max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)
        built.append(Built(newest, wheel.seconds))
    return built


def in_containers(source: Path, folder: Path) -> list[Built]:
    """Wheels for all Linux machines, as `tool.cibuildwheel` in pyproject.toml says. Needs Docker or Podman."""
    before, began = set(folder.iterdir()), time.monotonic()
    _run([sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(folder), str(source)])
    fresh = sorted(set(folder.iterdir()) - before)
    return [Built(path, (time.monotonic() - began) / len(fresh)) for path in fresh]


def _build(python: str, what: list[str], folder: Path, env: dict[str, str]) -> Built:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        # The Python that builds need not have `build`: an environment of its own does.
        if python != sys.executable:
            _run([python, "-m", "venv", scratch])
            python = f"{scratch}/bin/python"
            _run([python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "build"])
        if what[0] == "--wheel":
            unpacked = Path(scratch) / "source"
            shutil.unpack_archive(what[1], unpacked)
            what = [what[0], str(next(unpacked.iterdir()))]
        before = set(folder.iterdir())
        _run([python, "-m", "build", "--outdir", str(folder), *what], env=env)
    return Built(next(iter(set(folder.iterdir()) - before)), time.monotonic() - began)


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)} failed with exit code {done.returncode}")
