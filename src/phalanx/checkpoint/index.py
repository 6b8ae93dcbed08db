"""The index of a checkpoint: the tree that was saved, and where each piece of each tensor lies."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CheckpointError, CheckpointNotFound
from .dtypes import FILE_DTYPES
from .regions import Region
from .tensors_file import Written

__all__ = ["INDEX", "Index", "PieceEntry", "TensorEntry", "read_index", "write_index"]

INDEX = "index.json"
"""The name of its file. A folder is a checkpoint if this is in it: it comes last, by a rename."""
_FORMAT = "phalanx checkpoint"
_VERSION = 1


class PieceEntry(msgspec.Struct, frozen=True):
    """A part of a tensor, in one file."""

    file: str
    offset: list[int]
    shape: list[int]
    start: int
    checksums: list[int]

    @property
    def region(self) -> Region:
        """Its place in the tensor."""
        return Region(tuple(self.offset), tuple(self.shape))

    @property
    def written(self) -> Written:
        """Its place in the file."""
        return Written(self.start, self.checksums)


class TensorEntry(msgspec.Struct):
    """A tensor: all of it, whoever held which part."""

    dtype: str
    shape: list[int]
    pieces: list[PieceEntry]
    axes: dict[str, str] = {}
    """The axis of the mesh that each dim was cut along, where the program said so. JSON has no numbers for keys."""


class Index(msgspec.Struct):
    """All that a checkpoint is, but for the bytes of its tensors."""

    tree: Any
    tensors: dict[str, TensorEntry]
    world_size: int
    saved: float
    """Seconds since 1970."""
    per_rank: dict[str, list[Any]] = {}
    """The values that each rank had for itself, by name."""

    @property
    def files(self) -> set[str]:
        """The names of the files beside the index."""
        return {piece.file for tensor in self.tensors.values() for piece in tensor.pieces}


def write_index(folder: Path, index: Index) -> None:
    """Makes the folder a checkpoint, or the new one instead of the old one: at once, or not at all.

    Raises:
        CheckpointError: The index could not be written. What was there before is still there.
    """
    body = msgspec.to_builtins(index)
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "checksum": _checksum(body), "body": body})
    draft = folder / f".{INDEX}.{secrets.token_hex(6)}"
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)  # the names of the files of tensors, before the index says that they are there
        draft.replace(folder / INDEX)
        sync_folder(folder)
        sync_folder(folder.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {folder / INDEX}: {error.strerror or error}", path=str(folder / INDEX)
        ) from error


def read_index(folder: Path) -> Index:
    """Reads the index of a checkpoint.

    Raises:
        CheckpointNotFound: The folder is not a checkpoint.
        CheckpointError: The index is damaged, or of a version that this Phalanx does not know.
    """
    path = folder / INDEX
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        words = f"is not a checkpoint (it has no {INDEX})" if folder.exists() else "does not exist"
        raise CheckpointNotFound(f"{folder} {words}", path=str(folder)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})", path=str(path)) from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not the index of a checkpoint of Phalanx", path=str(path))
    if found.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} is of version {found.get('version')} (this Phalanx reads version {_VERSION})", path=str(path)
        )
    if found.get("checksum") != _checksum(found.get("body")):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit", path=str(path))
    return checked(found["body"], path)


def checked(body: Any, path: Path) -> Index:
    """An index of plain data.

    Raises:
        CheckpointError: It does not have the form of one.
    """
    try:
        index = msgspec.convert(body, Index)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged ({error})", path=str(path)) from None
    for name, tensor in index.tensors.items():
        pieces_fit = all(piece.region.within(tuple(tensor.shape)) for piece in tensor.pieces)
        inside = all(Path(piece.file).name == piece.file for piece in tensor.pieces)
        if tensor.dtype not in FILE_DTYPES or not pieces_fit or not inside:
            raise CheckpointError(f"{path} is damaged (the entry of {name!r})", path=str(path), tensor=name)
    return index


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
