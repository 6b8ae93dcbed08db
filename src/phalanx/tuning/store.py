"""The file in which the settings of a machine are kept, one for each kind of machine, in the user's cache folder.

No trouble with it is an error: what cannot be read is measured anew, and what cannot be written is measured next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

from ..operating_system import processor_lines
from .decide import Decision
from .values import Tuning

__all__ = ["Unusable", "cpu_model", "file_name", "is_provisional", "load", "save", "times_measured"]

logger = logging.getLogger("phalanx.tuning")

_FORMAT = 2
"""Counts up with every new setting, so that machines that are known are measured for it."""
_LARGEST = 64 << 10
"""Bytes that such a file has at most."""
_ARM = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}


class Unusable(Exception):
    """The file holds no settings that can be used; the text says why."""


def cpu_model() -> str:
    """The name of the processor, with its architecture."""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in processor_lines())}
    name = fields.get("model name") or _ARM.get(fields.get("CPU part", ""), "")
    return f"{name} ({platform.machine()})" if name else platform.machine()


def file_name(model: str, cores: int, kernel: str, abi: int) -> str:
    """The name for a machine: readable, and different for machines whose names differ in other characters only."""
    key = f"{model}, {cores} cores, Linux {kernel}, core {abi}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    words = re.sub(r"[^a-z0-9.]+", "-", f"{model} {cores} {kernel}".lower()).strip("-.")[:80]
    return f"tuning-{words}-{digest}.json"


def load(path: Path) -> Tuning | None:
    """The settings in a file; None if there is no such file.

    Raises:
        Unusable: It cannot be read, belongs to another user, or holds something else.
    """
    try:
        data = _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(error.strerror or str(error)) from error
    try:
        found: Any = json.loads(data)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"it is not of format {_FORMAT}")
        return Tuning.of(found.get("settings"))
    except (ValueError, RecursionError) as error:
        raise Unusable(str(error) or type(error).__name__) from error


def _read(path: Path) -> bytes:
    # Not blocked by a pipe of that name; a link is followed, because home folders are often made of them.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable("it is not a file")
        if status.st_uid not in (os.geteuid(), 0):
            raise Unusable(f"it belongs to user {status.st_uid}, this is user {os.geteuid()}")
        if status.st_mode & 0o022:
            raise Unusable(f"other users can write it (mode {stat.S_IMODE(status.st_mode):04o})")
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise Unusable(f"it is longer than {_LARGEST} bytes")
    return data


def is_provisional(path: Path) -> bool:
    """Whether the settings in a file are to be measured again when the machine is at rest. `load` has accepted it."""
    return _field(path, "provisional") is True


def times_measured(path: Path) -> int:
    """How often the machine was at rest when it was measured for a file. `load` has accepted it."""
    found = _field(path, "times")
    return found if type(found) is int and found > 0 else 0


def _field(path: Path, name: str) -> Any:
    try:
        return json.loads(_read(path)).get(name)
    except (OSError, Unusable, ValueError, AttributeError):  # changed since
        return None


def save(path: Path, decisions: list[Decision], *, provisional: bool = False, times: int = 0) -> None:
    """Keeps settings, with the reasons for a person who looks. A folder that cannot be written to is left alone.

    Args:
        provisional: They are to be measured again when the machine is at rest.
        times: How often it was at rest when it was measured.
    """
    content = {
        "format": _FORMAT,
        "provisional": provisional,
        "times": times,
        "settings": {decision.setting: decision.chosen for decision in decisions},
        "reasons": {decision.setting: decision.reason for decision in decisions},
    }
    temporary = ""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another process reads the old file or the new one, never half of one.
        fd, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        logger.info("the tuning of this machine cannot be kept in %s: %s", path, error)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
