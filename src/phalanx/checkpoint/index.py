"""The index of a checkpoint: the tree that was saved, and where each piece of each tensor lies."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CheckpointError, CheckpointNotFound
from .dtypes import FILE_DTYPES
from .json_text import to_json
from .tensors_file import PieceEntry

__all__ = ["INDEX", "Draft", "Index", "TensorEntry", "decode_index", "read_body", "read_index"]

INDEX = "index.json"
"""The name of its file. A folder is a checkpoint if this is in it: it comes last, by a rename."""
_FORMAT = "phalanx checkpoint"
_VERSION = 1


class TensorEntry(msgspec.Struct, gc=False):
    """A tensor: all of it, whoever held which part."""

    dtype: str
    shape: tuple[int, ...]
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


class Draft:
    """An index under a name that does not count yet.

    Args:
        folder: Of the checkpoint.
        index: Its tree may be left out, since it is in `tree`.
        tree: The tree as JSON.

    Raises:
        CheckpointError: It could not be written.
    """

    def __init__(self, folder: Path, index: Index, tree: bytes) -> None:
        body = msgspec.json.encode(
            _Body(msgspec.Raw(tree), index.tensors, index.world_size, index.saved, msgspec.Raw(to_json(index.per_rank)))
        )
        text = msgspec.json.encode(_File(_FORMAT, _VERSION, zlib.crc32(body), msgspec.Raw(body)))
        self._folder = folder
        self._path = folder / f".{INDEX}.{secrets.token_hex(6)}"
        with self._naming_the_index():
            self._file = self._path.open("xb", buffering=0)
            self._file.write(text)

    def sync(self) -> None:
        """Returns when it is on the disk.

        Raises:
            CheckpointError: The disk did not take it.
        """
        with self._naming_the_index():
            os.fsync(self._file.fileno())
            self._file.close()

    def publish(self) -> None:
        """Makes the folder a checkpoint, or the new one instead of the old one: at once, or not at all.

        Raises:
            CheckpointError: What was there before is still there.
        """
        with self._naming_the_index():
            # The names of the files of tensors come before the index that says that they are there.
            sync_folder(self._folder)
            sync_folder(self._folder.parent)
            self._path.replace(self._folder / INDEX)
            sync_folder(self._folder)

    def drop(self) -> None:
        """Removes it."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _naming_the_index(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._path.unlink(missing_ok=True)
            path = self._folder / INDEX
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from error


def read_index(folder: Path) -> Index:
    """Reads the index of a checkpoint.

    Raises:
        CheckpointNotFound: The folder is not a checkpoint.
        CheckpointError: The index is damaged, or of a version that this Phalanx does not know.
    """
    return decode_index(read_body(folder), folder / INDEX)


def read_body(folder: Path) -> bytes:
    """The bytes of an index, for `decode_index`. They are those that were written.

    Raises:
        As `read_index`.
    """
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        words = f"is not a checkpoint (it has no {INDEX})" if folder.exists() else "does not exist"
        raise CheckpointNotFound(f"{folder} {words}", path=str(folder)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    try:
        found = _decode_file(text)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is damaged, or is no index ({error})", path=str(path)) from None
    if found.format != _FORMAT:
        raise CheckpointError(f"{path} is not the index of a checkpoint of Phalanx", path=str(path))
    if found.version != _VERSION:
        raise CheckpointError(
            f"{path} is of version {found.version} (this Phalanx reads version {_VERSION})", path=str(path)
        )
    body = bytes(found.body)
    if found.checksum != zlib.crc32(body):
        raise CheckpointError(f"{path} is damaged: its checksum does not fit", path=str(path))
    return body


def decode_index(body: bytes, path: Path) -> Index:
    """An index of its bytes.

    Raises:
        CheckpointError: It does not have the form of one.
    """
    try:
        found = _decode_body(body)
        index = Index(
            json.loads(bytes(found.tree)),
            found.tensors,
            found.world_size,
            found.saved,
            json.loads(bytes(found.per_rank)),
        )
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})", path=str(path)) from None
    for name, tensor in index.tensors.items():
        pieces_fit = all(piece.region.within(tensor.shape) for piece in tensor.pieces)
        inside = all(Path(piece.file).name == piece.file for piece in tensor.pieces)
        if tensor.dtype not in FILE_DTYPES or not pieces_fit or not inside:
            raise CheckpointError(f"{path} is damaged (the entry of {name!r})", path=str(path), tensor=name)
    return index


class _File(msgspec.Struct):
    """The file: an index, and what proves that it is one."""

    format: str
    version: int
    checksum: int
    """Of the bytes of the body as they stand there."""
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """An index, with the data of users as the standard library writes them: integers may have any length."""

    tree: msgspec.Raw
    tensors: dict[str, TensorEntry]
    world_size: int
    saved: float
    per_rank: msgspec.Raw


_decode_file = msgspec.json.Decoder(_File).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
