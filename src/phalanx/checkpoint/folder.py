"""Folders with several checkpoints: the latest, those that are too many, and what killed saves left behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .index import INDEX, Index, read_index

__all__ = ["checkpoints", "latest", "prune", "remove_leftovers"]

_OURS = re.compile(rf"rank-\d{{5,}}-[0-9a-f]{{12}}\.safetensors|\.{re.escape(INDEX)}\.[0-9a-f]{{12}}")
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
    """Removes the oldest checkpoints until `keep` are left, and folders with nothing but the files of killed saves.

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
        yield from (path for path in folder.iterdir() if (path / INDEX).is_file() and not path.name.endswith(_GOING))


def _incomplete(folder: Path) -> list[Path]:
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and not path.name.endswith(_GOING):
            names = [inside.name for inside in path.iterdir()]
            if names and all(_OURS.fullmatch(name) for name in names):
                found.append(path)
    return found
