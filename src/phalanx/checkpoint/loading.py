"""Loading: every rank reads the blocks that it needs, whoever wrote them, and all succeed or none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..deadline import Deadline
from ..errors import CheckpointError, CheckpointNotFound, Desync, PhalanxError, UsageError
from ..exception_text import describe
from ..group import Group, Mesh
from .dtypes import item_size
from .index import INDEX, Index, decode_index, read_body, read_index
from .local_arrays import Target, new_target, target_of
from .progress import Progress
from .regions import Region, is_covered, whole
from .shards import Shard, part_of_axis
from .tensors_file import read_region
from .tree import build, is_array

__all__ = ["read_checkpoint"]

logger = logging.getLogger("phalanx.checkpoint")


def read_checkpoint(folder: Path, group: Group | None, like: Any, mesh: Mesh | None, timeout: float | None) -> Any:
    """The tree of a checkpoint, with this rank's parts of its tensors.

    Raises:
        CheckpointError: Somebody could not read it; on all ranks.
        Desync: The ranks read different checkpoints.
    """
    deadline = Deadline.of(timeout, 600.0 if group is None else group.timeout)
    index = _agreed_index(folder, group, deadline)
    error: Exception | None = None
    reading = _Reading(folder, index, group, mesh)
    try:
        reading.prepare(like)
        reading.read()
    except Exception as problem:
        error = problem
    _agree(error, group, deadline)
    tree: Any = None
    try:
        tree = reading.result(like)
    except Exception as problem:  # the program's own load_state_dict
        error = problem
    _agree(error, group, deadline)
    return tree


class _Reading:
    """One load on one rank: a place for each tensor, filled from the files."""

    def __init__(self, folder: Path, index: Index, group: Group | None, mesh: Mesh | None) -> None:
        self._folder = folder
        self._index = index
        self._rank = 0 if group is None else group.rank
        self._size = 1 if group is None else group.world_size
        self._mesh = mesh
        self._targets: dict[str, Target] = {}
        self._made: dict[str, Any] = {}
        self._warned: set[str] = set()

    def prepare(self, like: Any) -> None:
        """Finds a place for each tensor. Nothing is read yet."""
        build(self._index.tree, like, tensor=self._add_target, per_rank=self._own, applies=False)

    def read(self) -> None:
        """Fills all places."""
        tensors = self._index.tensors
        total = sum(place.region.size * item_size(tensors[name].dtype) for name, place in self._targets.items())
        with Progress(f"loading {self._folder.name}", total, shows=self._rank == 0) as progress:
            for name, target in self._targets.items():
                self._fill(name, target, progress)
                self._made[name] = target.finish()

    def result(self, like: Any) -> Any:
        """The tree. Objects with a `state_dict` are given theirs."""
        return build(
            self._index.tree,
            like,
            tensor=lambda name, _library, _like: self._made[name],
            per_rank=self._own,
            applies=True,
        )

    def _add_target(self, name: str, library: str, like: Any) -> None:
        tensor = self._index.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"the index has no tensor {name!r}", path=str(self._folder), tensor=name)
        shape = tuple(tensor.shape)
        if like is not None:
            if not is_array(like):
                raise UsageError(f"like has {type(like).__name__} for {name!r}, which is a tensor")
            self._targets[name] = target_of(like, tensor.dtype, shape, name)
        elif self._mesh is not None and any(axis in self._mesh for axis in tensor.axes.values()):
            region = part_of_axis(shape, tensor.axes, self._mesh)
            target = new_target(tensor.dtype, library, region)
            axes = {int(dim): axis for dim, axis in tensor.axes.items()}
            self._targets[name] = target.then(lambda array: Shard(array, shape, region.offset, axes=axes))
        else:
            self._targets[name] = new_target(tensor.dtype, library, whole(shape))

    def _own(self, name: str) -> Any:
        values = self._index.per_rank.get(name, [])
        if len(values) == self._size:
            return {"value": values[self._rank]}
        if name in self._warned:
            return None
        self._warned.add(name)
        logger.warning(
            "%s of %s was saved by each of %d ranks for itself; there are %d now, so nobody has it",
            name,
            self._folder,
            len(values),
            self._size,
        )
        return None

    def _fill(self, name: str, target: Target, progress: Progress) -> None:
        if not target.memory.size:
            return
        tensor = self._index.tensors[name]
        found: list[Region] = []
        for piece in tensor.pieces:
            # A tensor without dims is read as one with a single row, by whoever has it as such.
            region = piece.region if piece.shape or not target.region.shape else whole([1])
            shared = region.shared(target.region) if region.shape else region
            if shared is None or is_covered(shared, found):
                continue
            read_region(
                self._folder / piece.file,
                piece,
                tensor.dtype,
                region,
                shared,
                target.part(shared),
                name=name,
                advance=progress.advance,
            )
            found.append(shared)
        if not is_covered(target.region, found):
            raise CheckpointError(f"the checkpoint does not have all of {name!r}", path=str(self._folder), tensor=name)


# -- one for all -----------------------------------------------------------------------------------------------------


def _agreed_index(folder: Path, group: Group | None, deadline: Deadline) -> Index:
    """The index that the first rank found: another save may put a new one there at any time."""
    if group is None or group.world_size == 1:
        return read_index(folder)
    told: Any = None
    if group.rank == 0:
        try:
            told = ["index", str(folder), read_body(folder)]
        except CheckpointNotFound as error:
            told = ["missing", error.message, error.path]
        except CheckpointError as error:
            told = ["error", error.message, error.path]
    kind, words, found = group.broadcast_object(told, 0, timeout=deadline.remaining())
    if kind == "missing":
        raise CheckpointNotFound(words, path=found)
    if kind == "error":
        raise CheckpointError(words, path=found)
    if Path(words).name != folder.name:
        # The others go on to the vote, where they hear of it.
        other = Desync(f"this rank loads {folder}, rank {group.members[0]} loads {words}", operation="load")
        _agree(other, group, deadline)
    return decode_index(found, folder / INDEX)


def _agree(error: Exception | None, group: Group | None, deadline: Deadline) -> None:
    """Goes on only if nobody had an error; all raise the first.

    Raises:
        Exception: This rank's own error.
        CheckpointError: Another rank's.
    """
    if group is not None and group.world_size > 1:
        told = None
        if error is not None:
            words = error.message if isinstance(error, PhalanxError) else describe(error)
            told = [words, getattr(error, "path", None), getattr(error, "tensor", None)]
        everyone = group.all_gather_object(told, timeout=deadline.remaining())
        for rank, found in enumerate(everyone):
            if error is None and found is not None:
                words, path, tensor = found
                raise CheckpointError(f"rank {group.members[rank]}: {words}", path=path, tensor=tensor)
    if error is not None:
        raise error
