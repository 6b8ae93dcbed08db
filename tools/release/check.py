"""Looks at what was built, and tries it where nothing else is installed."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

from .pythons import ROOT, Python

__all__ = ["Tried", "contents_of", "faults", "fits", "look", "metadata_of", "try_out"]

_SMOKE = ROOT / "tools" / "release" / "smoke.py"
_NOTICES = ("LICENSE", "licenses/nanobind.txt", "licenses/robin_map.txt")


class Tried(NamedTuple):
    """A wheel that was installed and run by one Python."""

    python: Python
    install: float
    """Seconds, with everything that it needs."""
    smoke: float


def contents_of(path: Path) -> list[str]:
    """The files in a wheel or an sdist; those of an sdist without its folder."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.namelist()
    with tarfile.open(path) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def metadata_of(path: Path) -> Message:
    """The metadata in a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(wheel.read(name))
    with tarfile.open(path) as archive:
        name = next(name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        file = archive.extractfile(name)
        assert file is not None
        return email.message_from_bytes(file.read())


def faults(path: Path) -> list[str]:
    """What is wrong with the files inside, in words."""
    names = contents_of(path)
    found = []
    if path.suffix == ".whl":
        inside = [name for name in names if ".dist-info/" not in name]
        found += [f"{name} is not Phalanx's" for name in inside if not name.startswith("phalanx/")]
        found += [
            f"the notice {notice} is missing"
            for notice in _NOTICES
            if not any(f"/licenses/{notice}" in n for n in names)
        ]
        cores = [name for name in inside if name.startswith("phalanx/_core") and name.endswith(".so")]
        wanted = 0 if path.name.endswith("-py3-none-any.whl") else 1
        if len(cores) != wanted:
            found.append(f"it has {len(cores)} cores (expected {wanted})")
    else:
        for needed in ("CMakeLists.txt", "cpp/bindings/module.cpp", "pyproject.toml", "PKG-INFO", *_NOTICES):
            if needed not in names:
                found.append(f"{needed} is missing")
    found += [
        f"{name} does not belong there" for name in names if re.search(r"__pycache__|\.pyc$|^build/|^\.venv", name)
    ]
    if path.suffix != ".whl":
        found += [f"{name} does not belong there" for name in names if name.endswith(".so")]
    return found


def look(paths: list[Path]) -> None:
    """Checks names, metadata and contents; ends with an error at the first fault."""
    for path in paths:
        for fault in faults(path):
            sys.exit(f"{path.name}: {fault}")
    files = [str(path) for path in paths]
    wheels = [name for name in files if name.endswith(".whl")]
    stable = [name for name in wheels if "-abi3-" in name]
    _tool("twine", "check", "--strict", *files)
    if wheels:
        _tool("check_wheel_contents", *wheels)
    if stable:
        _tool("abi3audit", "--strict", *stable)


def _tool(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        sys.exit(f"{module} {arguments[0]}:\n{done.stdout}{done.stderr}")


def fits(wheel: Path, python: Python) -> bool:
    """Whether this Python can install the wheel, as far as its version goes."""
    tag, abi = wheel.stem.split("-")[-3:-1]
    if tag == "py3":
        return True
    version = (int(tag[2]), int(tag[3:]))
    return python.version >= version if abi == "abi3" else python.version == version


def try_out(wheel: Path, python: Python) -> Tried:
    """Installs a wheel into an empty environment, where no compiler can be found, and runs the smoke tests from it."""
    kind = "--pure" if wheel.name.endswith("-py3-none-any.whl") else "--core"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python.path, "-m", "venv", folder], check=True)
        own = f"{folder}/bin/python"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PHALANX_", "PYTHON"))}
        bare = {**kept, "PATH": f"{folder}/bin", "CC": "/nonexistent", "CXX": "/nonexistent"}
        began = time.monotonic()
        pip = [own, "-m", "pip", "--disable-pip-version-check"]
        _quiet([*pip, "install", "--only-binary", ":all:", str(wheel)], bare, folder)
        installed = time.monotonic()
        _quiet([own, str(_SMOKE), kind], bare, folder)
        return Tried(python, installed - began, time.monotonic() - installed)


def _quiet(command: list[str], env: dict[str, str], folder: str) -> None:
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
