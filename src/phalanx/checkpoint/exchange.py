"""Checkpoints of other kinds: one safetensors file, and those of torch's distributed checkpoint (DCP)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, UsageError
from .dtypes import FILE_DTYPES
from .loading import read_checkpoint
from .local_arrays import held, new_target, parts_of
from .plan import make_plan
from .progress import Progress
from .regions import whole
from .saving import write_checkpoint
from .tensors_file import FileTensor, read_header, write_file
from .tree import take_apart

__all__ = ["export_dcp", "export_safetensors", "import_dcp", "import_safetensors"]


def export_safetensors(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Writes the tensors of a checkpoint to one safetensors file, by their names in it. One process calls it.

    Plain data have no place in such a file, and are left out.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the file not be written; it must not exist.
    """
    _, leaves, _ = take_apart(_whole_tree(path))
    entries = []
    for name, leaf in leaves.items():
        tensor = held(leaf)
        entries += [FileTensor(name, name, tensor.dtype, *part) for part in parts_of(tensor)]
    with Progress(f"writing {Path(file).name}", sum(len(entry.memory) for entry in entries)) as progress:
        write_file(Path(file), entries, progress.advance)


def import_safetensors(file: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Makes a checkpoint of a safetensors file: a dict of its tensors. One process calls it.

    Raises:
        CheckpointError: The file cannot be read, or the checkpoint not be written.
    """
    source = Path(file)
    header, begin = read_header(source)
    names = {code: name for name, code in FILE_DTYPES.items() if name != "complex128"}
    tree: dict[str, Any] = {}
    try:
        data = source.read_bytes()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, end = (begin + int(place) for place in entry["data_offsets"])
            library = "torch" if entry["dtype"] in ("BF16", "F8_E4M3", "F8_E5M2") else "numpy"
            target = new_target(names[entry["dtype"]], library, whole(entry["shape"]))
            raw = memoryview(data)[first:end]
            target.memory.reshape(-1).view("u1")[:] = raw
            tree[name] = target.finish()
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {source}: {error!r}", path=str(source)) from error
    write_checkpoint(Path(path).absolute(), lambda: make_plan(tree, 0, 1), None)


def export_dcp(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Writes a checkpoint as one of `torch.distributed.checkpoint`. One process calls it; it needs torch.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        UsageError: The tree is not a dict.
    """
    import torch.distributed.checkpoint as dcp

    tree = _as_torch(_whole_tree(path))
    if not isinstance(tree, dict):
        raise UsageError(f"the tree of {os.fspath(path)} is a {type(tree).__name__} (torch's checkpoints are dicts)")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # one process is what is meant
        dcp.save(tree, checkpoint_id=os.fspath(folder), no_dist=True)


def import_dcp(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Makes a checkpoint of one of `torch.distributed.checkpoint`. One process calls it; it needs torch.

    Plain data in it are unpickled by torch: only for files that you trust.

    Raises:
        CheckpointError: The checkpoint cannot be written.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    reader = FileSystemReader(os.fspath(folder))
    _load_state_dict(tree, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    write_checkpoint(Path(path).absolute(), lambda: make_plan(tree, 0, 1), None)


def _whole_tree(path: str | os.PathLike[str]) -> Any:
    return read_checkpoint(Path(path).absolute(), None, None, None, None)


def _as_torch(value: Any) -> Any:
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _as_torch(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_as_torch(item) for item in value)
    return torch.from_numpy(np.array(value)) if type(value).__module__.startswith("jax") else value
