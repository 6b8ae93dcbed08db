"""A safetensors file: written in one pass with checksums of its blocks, and read by parts.

The format is eight bytes of length, a JSON header with dtype, shape and place of each tensor, and then their bytes. The
checksums are not part of it: they stand in the index of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .dtypes import FILE_DTYPES, file_shape, item_size
from .regions import Region

__all__ = ["BLOCK", "FileTensor", "PieceEntry", "read_header", "read_region", "verify_piece", "write_file"]

BLOCK = 1 << 20
"""Bytes per checksum: what a reader of a small part has to read at least."""
_BATCH = 16 * BLOCK
"""Bytes that are read at once."""
_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class FileTensor(NamedTuple):
    """A tensor, or a part of one, that is to be written."""

    name: str
    """In the file."""
    tensor: str
    """The name of the whole tensor."""
    dtype: str
    region: Region
    """Its place in the whole tensor."""
    memory: memoryview


class PieceEntry(msgspec.Struct, frozen=True, gc=False):
    """A part of a tensor, in one file, as the index has it."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    checksums: list[int]
    """Of its blocks."""

    @property
    def region(self) -> Region:
        """Its place in the tensor."""
        return Region(self.offset, self.shape)


def raw_dtype(name: str) -> np.dtype[Any]:
    """A NumPy dtype of the same size, for moving elements of any type."""
    return np.dtype(_RAW[item_size(name)])


class NewFile:
    """A file that is written; `sync` makes sure that it is on the disk.

    Args:
        advance: Told how many bytes were written since the last call.

    Raises:
        CheckpointError: It could not be written; names the tensor.
    """

    def __init__(self, path: Path, entries: Sequence[FileTensor], advance: Callable[[int], None]) -> None:
        self.path = path
        self.pieces: list[PieceEntry] = []
        """One for each tensor."""
        self._entries = entries
        head = _head(entries)
        self._begin = len(head)
        with self._naming_the_tensor():
            self._file = path.open("xb", buffering=BLOCK)
            try:
                self._write(head, advance)
            except BaseException:
                self.close()
                raise

    def _write(self, head: bytes, advance: Callable[[int], None]) -> None:
        write, crc, place, name = self._file.write, zlib.crc32, len(head), self.path.name
        write(head)
        unreported = 0
        for entry in self._entries:
            memory = entry.memory
            size = len(memory)
            if size <= BLOCK:
                write(memory)
                checksums = [crc(memory)] if size else []
                unreported += size
            else:
                checksums = []
                for first in range(0, size, BLOCK):
                    block = memory[first : first + BLOCK]
                    write(block)
                    checksums.append(crc(block))
                    advance(len(block))
            self.pieces.append(PieceEntry(name, *entry.region, place, checksums))
            place += size
            if unreported >= BLOCK:
                advance(unreported)
                unreported = 0
        advance(unreported)
        self._file.flush()

    def sync(self) -> None:
        """Returns when it is on the disk, and closes it.

        Raises:
            CheckpointError: The disk did not take it.
        """
        with self._naming_the_tensor():
            os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Closes it, on the disk or not."""
        with contextlib.suppress(OSError):  # what was not flushed is lost, which the caller knows
            self._file.close()

    @contextlib.contextmanager
    def _naming_the_tensor(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = _first_missing(self.path, self._entries, self._begin)
            raise CheckpointError(
                f"cannot write {name!r} to {self.path}: {error.strerror or error}", path=str(self.path), tensor=name
            ) from error


class _HeaderEntry(msgspec.Struct, gc=False):
    """Where a tensor lies in the file, as the format has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _head(entries: Sequence[FileTensor]) -> bytes:
    """The length of the header, and the header: where each tensor lies behind it."""
    header: dict[str, _HeaderEntry] = {}
    end = 0
    for entry in entries:
        begin, end = end, end + len(entry.memory)
        shape = file_shape(entry.dtype, entry.region.shape)
        name = entry.name
        while name in header or name == "__metadata__":  # the format has a meaning of its own for that one
            name += "'"
        header[name] = _HeaderEntry(FILE_DTYPES[entry.dtype], shape, (begin, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, entries: Sequence[FileTensor], advance: Callable[[int], None]) -> None:
    """Writes a new file and returns when it is on the disk.

    Raises:
        As `NewFile`.
    """
    NewFile(path, entries, advance).sync()


def _first_missing(path: Path, entries: Sequence[FileTensor], end: int) -> str:
    """The name of the tensor in the middle of which a file ends: what is buffered is written later than it is given."""
    size = path.stat().st_size if path.exists() else 0
    for entry in entries:
        end += len(entry.memory)
        if end > size:
            return entry.tensor
    return entries[-1].tensor


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the byte at which its tensors begin.

    Raises:
        CheckpointError: It is not such a file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 100 << 20:
                raise CheckpointError(f"{path} is not a safetensors file", path=str(path))
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("no table")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    except ValueError as error:
        raise CheckpointError(f"the header of {path} is damaged ({error})", path=str(path)) from None
    return header, 8 + length


class _Piece(NamedTuple):
    """A tensor in a file, and what to call it when something is wrong."""

    path: Path
    start: int
    length: int
    checksums: Sequence[int]
    name: str

    def wrong(self, words: str) -> CheckpointError:
        return CheckpointError(
            f"{words} in {self.name!r} of {self.path.name} in {self.path.parent}", path=str(self.path), tensor=self.name
        )

    def read(self, file: Any, first: int, end: int) -> memoryview:
        """Bytes of the tensor, from the disk. Whole blocks are read and checked."""
        first_block = first // BLOCK
        begin, stop = first_block * BLOCK, min(self.length, -(-end // BLOCK) * BLOCK)
        data = bytearray(stop - begin)
        file.seek(self.start + begin)
        if file.readinto(data) != len(data):
            raise self.wrong("bytes are missing")
        view = memoryview(data)
        for number, place in enumerate(range(0, len(data), BLOCK), first_block):
            if zlib.crc32(view[place : place + BLOCK]) != self.checksums[number]:
                raise self.wrong(f"the bytes from {number * BLOCK} on are not those that were saved: a damaged block")
        return view[first - begin : end - begin]


def read_region(
    path: Path,
    entry: PieceEntry,
    dtype: str,
    piece: Region,
    wanted: Region,
    target: npt.NDArray[Any],
    *,
    name: str,
    advance: Callable[[int], None],
) -> None:
    """Reads a part of a tensor into an array of the same raw dtype.

    Only the rows that are wanted are read, block by block, some MiB at a time.

    Raises:
        CheckpointError: The file cannot be read, or its bytes are not those that were written.
    """
    raw = raw_dtype(dtype)
    source = _Piece(path, entry.start, piece.size * raw.itemsize, entry.checksums, name)
    if not piece.shape:
        piece, wanted, target = Region((0,), (1,)), Region((0,), (1,)), target.reshape(1)
    rest = piece.shape[1:]
    row = int(np.prod(rest, dtype=np.int64)) * raw.itemsize
    inside = wanted.slices_in(piece)
    rows, columns = inside[0], (slice(None), *inside[1:])
    step = max(1, _BATCH // max(row, 1))
    try:
        with path.open("rb", buffering=0) as file:
            for first in range(rows.start, rows.stop, step):
                end = min(first + step, rows.stop)
                data = np.frombuffer(source.read(file, first * row, end * row), raw).reshape(end - first, *rest)
                target[first - rows.start : end - rows.start] = data[columns]
                advance((end - first) * row)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {name!r} from {path}: {error.strerror or error}", path=str(path), tensor=name
        ) from error


def verify_piece(path: Path, entry: PieceEntry, length: int, *, name: str, advance: Callable[[int], None]) -> None:
    """Reads all of a tensor and compares the checksums.

    Raises:
        As `read_region`.
    """
    source = _Piece(path, entry.start, length, entry.checksums, name)
    try:
        with path.open("rb", buffering=0) as file:
            for first in range(0, length, _BATCH):
                advance(len(source.read(file, first, min(first + _BATCH, length))))
    except OSError as error:
        raise CheckpointError(
            f"cannot read {name!r} from {path}: {error.strerror or error}", path=str(path), tensor=name
        ) from error
