"""A look at every byte of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from .dtypes import FILE_DTYPES, file_shape, item_size
from .index import Index, TensorEntry, read_index
from .progress import Progress
from .tensors_file import PieceEntry, read_header, verify_piece

__all__ = ["verify"]


def verify(path: str | os.PathLike[str]) -> int:
    """Reads all of a checkpoint and compares it with its checksums. One process calls it.

    Returns:
        The number of bytes of its tensors.

    Raises:
        CheckpointNotFound: The folder is not a checkpoint.
        CheckpointError: A file is missing or damaged; names it, and the tensor.
    """
    folder = Path(path).absolute()
    index = read_index(folder)
    total = sum(_length(tensor, piece) for tensor in index.tensors.values() for piece in tensor.pieces)
    with Progress(f"verifying {folder.name}", total) as progress:
        for file in sorted(index.files):
            _verify_file(folder / file, index, progress.advance)
    return total


def _verify_file(path: Path, index: Index, advance: Callable[[int], None]) -> None:
    header, begin = read_header(path)
    for name, tensor in index.tensors.items():
        for piece in tensor.pieces:
            if piece.file != path.name:
                continue
            length = _length(tensor, piece)
            expected = {
                "dtype": FILE_DTYPES[tensor.dtype],
                "shape": list(file_shape(tensor.dtype, tuple(piece.shape))),
                "data_offsets": [piece.start - begin, piece.start - begin + length],
            }
            if expected not in header.values():
                raise CheckpointError(f"the header of {path} does not fit {name!r}", path=str(path), tensor=name)
            verify_piece(path, piece, length, name=name, advance=advance)


def _length(tensor: TensorEntry, piece: PieceEntry) -> int:
    return piece.region.size * item_size(tensor.dtype)
