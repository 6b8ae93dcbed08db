"""Folders with several checkpoints: the latest, those that are too many, and what killed saves left behind."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .index import INDEX, Index, read_index

__all__ = ["checkpoints", "latest", "prune", "remove_leftovers"]

_OURS = re.compile(rf"rank-\d{{5,}}-[0-9a-f]{{12}}\.safetensors|\.{re.escape(INDEX)}\.[0-9a-f]{{12}}")
_ABANDONED = 3600.0
"""Seconds without a write after which a save without an index is taken for a killed one, and not for another job's."""
_GOING = ".going"
"""The end of the name of a checkpoint that is being removed: no checkpoint any more, whatever happens then."""


def checkpoints(folder: str | os.PathLike[str]) -> list[tuple[Path, Index]]:
    """The checkpoints in a folder, the oldest first. What is none, or is damaged, is left out."""
    found = []
    for path in _folders(Path(folder)):
        try:
            found.append((path, read_index(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda item: (item[1].saved, item[0].name))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in a folder that was saved last; None if there is none.

    ```python
    path = px.checkpoint.latest("runs/gpt")
    if path is not None:
        state = px.checkpoint.load(path, world, like=state)
    ```
    """
    found = checkpoints(folder)
    return found[-1][0] if found else None


def prune(folder: Path, keep: int, *, newest: Path) -> None:
    """Removes the oldest checkpoints until `keep` are left, and what saves that were killed an hour ago have left.

    `newest` stays, whatever the clock says.
    """
    for path in _incomplete(folder):
        path.rename(path.with_name(f".{path.name}{_GOING}"))
    others = [path for path, _ in checkpoints(folder) if path.resolve() != newest.resolve()]
    for path in others[: max(0, len(others) - keep + 1)]:
        path.rename(path.with_name(f".{path.name}{_GOING}"))
    for path in Path(folder).glob(f".*{_GOING}"):
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(folder: Path, files: set[str]) -> None:
    """Removes the files of saves that did not come to an end, and of the checkpoint that this one replaces."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in files:
            path.unlink(missing_ok=True)


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in folder.iterdir():
            if not path.is_symlink() and (path / INDEX).is_file() and not path.name.endswith(_GOING):
                yield path


def _incomplete(folder: Path) -> list[Path]:
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and not path.name.endswith(_GOING):
            inside = list(path.iterdir())
            begun = max((file.stat().st_mtime for file in inside), default=math.inf)
            if time.time() - begun > _ABANDONED and all(_OURS.fullmatch(file.name) for file in inside):
                found.append(path)
    return found
