"""Checkpoints: a tree of tensors and plain data, saved by all ranks together, loaded by any number of them.

```python
px.checkpoint.save("runs/gpt/step-1000", {"model": model, "optimizer": optimizer, "step": 1000}, world, keep=3)
...
path = px.checkpoint.latest("runs/gpt")
state = px.checkpoint.load(path, world, like={"model": model, "optimizer": optimizer})
```

A checkpoint is a folder: one safetensors file per rank, and an index that says where each piece of each tensor lies,
with checksums. It is whole or not there: the index comes last, by a rename, after all ranks have voted for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..arguments import as_index
from ..errors import UsageError
from ..frames import hides_frames
from ..group import Group, Mesh, Work
from . import background
from .exchange import export_dcp, export_safetensors, import_dcp, import_safetensors
from .folder import latest
from .loading import read_checkpoint
from .plan import Plan, make_plan
from .saving import group_of, write_checkpoint
from .shards import PerRank, Shard
from .verifying import verify

__all__ = [
    "PerRank",
    "Shard",
    "export_dcp",
    "export_safetensors",
    "import_dcp",
    "import_safetensors",
    "latest",
    "load",
    "save",
    "save_async",
    "verify",
]


@hides_frames
def save(
    path: str | os.PathLike[str],
    tree: Any,
    group: Group | Mesh | None = None,
    *,
    keep: int | None = None,
    timeout: float | None = None,
) -> None:
    """Saves a tree as a checkpoint. All ranks of the group call it, and return when it is on the disk.

    Arrays of NumPy, torch and JAX are the same on all ranks, unless they are a `Shard`, a DTensor of torch, or an array
    that JAX has spread over processes. What all ranks have is written once, each rank a share. Values of a rank of its
    own are a `PerRank`. Objects with a `state_dict` stand for it. Nothing is pickled.

    Args:
        path: A folder. If it is a checkpoint already, it is that one until it is this one.
        tree: Dicts, lists and tuples of arrays and plain data.
        group: The ranks that save; a mesh stands for its group. Without it, this process alone.
        keep: How many checkpoints may be in the folder that `path` is in: the oldest ones are removed.
        timeout: Seconds to wait for the other ranks, once this one has written; the group's, if not given.

    Raises:
        CheckpointError: Somebody could not write: on all ranks, with the file and the tensor. What was there is there.
        Desync: The trees of the ranks are different; names what.
        UsageError: Something in the tree cannot be saved; says what and where.
        PeerLost: A rank was lost. What was there is there, or the new one.
    """
    folder, ranks = _folder(path), group_of(group)
    _check_keep(keep)
    number = background.count_save(ranks)
    background.wait(ranks)
    plan = lambda: make_plan(tree, *_place(ranks))  # noqa: E731 - a rank that cannot make one votes, too
    write_checkpoint(folder, plan, ranks, number=number, keep=keep, timeout=timeout)


@hides_frames
def save_async(
    path: str | os.PathLike[str],
    tree: Any,
    group: Group | Mesh | None = None,
    *,
    keep: int | None = None,
    timeout: float | None = None,
) -> Work[None]:
    """As `save`, but returns when this rank's share is copied: the program may change its arrays at once.

    Writing and voting go on beside the program, on a group of their own. A save that is still under way is waited for
    by the next one, by `load` and by the end of the group. An error that nobody has looked at is raised there, on all
    ranks.

    Returns:
        The save under way.

    Raises:
        UsageError: Something in the tree cannot be saved; says what and where.
        As `save`: What the save before this one raised, if nobody has looked.
    """
    folder, ranks = _folder(path), group_of(group)
    _check_keep(keep)
    number = background.count_save(ranks)
    background.wait(ranks)
    error: Exception | None = None
    plan: Plan | None = None
    try:
        plan = background.copied(make_plan(tree, *_place(ranks)))
    except Exception as problem:  # the others hear of it by the vote, which this rank must not leave out
        error = problem

    def made() -> Plan:
        if plan is None:
            assert error is not None
            raise error
        return plan

    work = background.start(
        ranks,
        lambda own: write_checkpoint(folder, made, own, number=number, keep=keep, timeout=timeout),
        f"save_async to {folder}",
    )
    if error is not None:
        raise error
    return work


@hides_frames
def load(
    path: str | os.PathLike[str],
    group: Group | Mesh | None = None,
    like: Any = None,
    mesh: Mesh | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """The tree of a checkpoint, for any number of ranks. All ranks of the group call it; all succeed, or none.

    Each rank reads the blocks (1 MiB) that it needs, and checks them.

    Args:
        path: The folder.
        group: The ranks that load; a mesh stands for its group. Without it, this process alone.
        like: A tree with arrays of your own: they are filled in place where they can be written to, and read-only ones
            are made anew. A `Shard` or DTensor gets its part, whoever saved it. Objects with a `state_dict` are given
            theirs. What is in the checkpoint only is loaded as it was saved.
        mesh: Tensors that were saved along axes of these names, and are not in `like`, come as this rank's `Shard`.

    Returns:
        The tree, with whole arrays of the library that they were saved from, where `like` and `mesh` do not say more.

    Raises:
        CheckpointNotFound: The folder is not a checkpoint.
        CheckpointError: A file is missing or damaged, or `like` does not fit; on all ranks, with the file and tensor.
        Desync: The ranks load different checkpoints.
    """
    ranks = group_of(group if group is not None else mesh)
    background.wait(ranks)
    return read_checkpoint(_folder(path), ranks, like, mesh, timeout)


def _folder(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in os.fspath(path):
        raise UsageError(f"path={path!r} is not valid (expected the name of a folder)")
    return Path(path).absolute()


def _place(group: Group | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank, group.world_size)


def _check_keep(keep: int | None) -> None:
    if keep is not None and as_index(keep, "keep") < 1:
        raise UsageError(f"keep={keep!r} is not valid (expected 1 or more)")
