"""Saving: every rank writes its share, all vote, and the first makes it a checkpoint by one rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ..background_thread import BackgroundThread
from ..errors import CheckpointError, Desync, PhalanxError, UsageError
from ..exception_text import describe
from ..group import Group, Mesh
from .folder import prune, remove_leftovers
from .index import Draft, Index, TensorEntry
from .json_text import to_json
from .plan import Plan
from .progress import Progress
from .regions import is_covered, whole
from .tensors_file import NewFile, PieceEntry

__all__ = ["group_of", "write_checkpoint"]


_NOTHING = Plan(None, {}, {}, {}, [])
Pieces = list[tuple[str, PieceEntry]]
"""Pieces in one file, with the names of the tensors that they are of."""
_DECODER = msgspec.msgpack.Decoder(Pieces)


def group_of(where: Group | Mesh | None) -> Group | None:
    """The group of a mesh."""
    return where.group if isinstance(where, Mesh) else where


def write_checkpoint(
    folder: Path,
    make: Callable[[], Plan],
    group: Group | None,
    *,
    number: int = 0,
    keep: int | None = None,
    timeout: float | None = None,
) -> None:
    """Writes the share of this rank, and returns when all have voted for the checkpoint and it is there.

    Args:
        make: Takes the tree apart. A rank that cannot do that votes, too, so that the others do not wait for it.
        number: Of this save among those of the group.

    Raises:
        CheckpointError: Somebody could not write; on all ranks. What was there before is still there.
        Desync: The ranks have different trees; on all of them.
        PeerLost: A rank was lost before the vote was over. What was there before is still there, or the new one.
    """
    rank = 0 if group is None else group.rank
    path = folder / f"rank-{rank:05d}-{secrets.token_hex(6)}.safetensors"
    error: BaseException | None = None
    file: NewFile | None = None
    plan = _NOTHING
    try:
        plan = make()
        file = _write_share(folder, path, plan, shows=rank == 0)
    except Exception as problem:  # also what the program's own state_dict raises: the others must hear of it
        error = problem
    try:
        _Vote(folder, plan, file, error, group, number, timeout).hold(keep)
    except Exception as problem:
        # All know that there is no checkpoint. After a lost rank nobody does: the first may have made it one, so that
        # the file stays, for the next save to remove.
        if problem is error or isinstance(problem, (CheckpointError, Desync, UsageError)):
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    finally:
        if file is not None:
            file.close()


def _write_share(folder: Path, path: Path, plan: Plan, *, shows: bool) -> NewFile | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror or error}", path=str(folder)) from None
    if not plan.share:
        return None
    with Progress(f"saving {folder.name}", sum(len(entry.memory) for entry in plan.share), shows=shows) as progress:
        return NewFile(path, plan.share, progress.advance)


# -- the vote --------------------------------------------------------------------------------------------------------


class _Vote:
    """How the ranks agree. Each says twice how it fared: when its file is written, and when it is on the disk.

    Between the two, all disks work at the same time, and the first rank writes the index.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        file: NewFile | None,
        error: BaseException | None,
        group: Group | None,
        number: int,
        timeout: float | None,
    ) -> None:
        self._number = number
        self._folder = folder
        self._plan = plan
        self._file = file
        self._error = error
        self._group = group
        self._timeout = timeout

    def hold(self, keep: int | None) -> None:
        """Returns when the checkpoint is there.

        Raises:
            As `write_checkpoint`.
        """
        tree = to_json(self._plan.tree)
        ballot = {
            "tree": _digest(self._plan, tree),
            "number": self._number,
            "folder": str(self._folder),
            "file": None if self._file is None else self._file.path.name,
            "pieces": None if self._is_first else msgspec.msgpack.encode(self._pieces()),
            "own": {name: [held.dtype, list(held.shape)] for name, held in self._plan.own.items()},
            "per_rank": self._plan.per_rank,
            "error": None if self._error is None else _told(self._error),
        }
        ballots = self._gather(ballot)
        if ballots is None:
            self._sync()
            self._gather(None if self._error is None else _told(self._error))
            outcome = None
        else:
            outcome = self._decide(ballots, tree, keep)
        if self._group is not None:
            outcome = self._group.broadcast_object(outcome, 0, timeout=self._timeout)
        assert outcome is not None
        if outcome["kind"] == "different":
            assert self._group is not None
            raise _difference(_described(self._folder, self._plan, self._number), self._group)
        if outcome["kind"] == "error":
            self._raise(*outcome["error"])

    @property
    def _is_first(self) -> bool:
        return self._group is None or self._group.rank == 0

    def _pieces(self) -> Pieces:
        """The pieces that this rank has written."""
        if self._file is None:
            return []
        return list(zip([entry.tensor for entry in self._plan.share], self._file.pieces, strict=True))

    def _gather(self, words: Any) -> list[Any] | None:
        """The words of all ranks, on the first one."""
        return [words] if self._group is None else self._group.gather_object(words, 0, timeout=self._timeout)

    def _sync(self) -> None:
        """Waits for this rank's file; an error is one to report."""
        if self._file is not None and self._error is None:
            try:
                self._file.sync()
            except Exception as error:  # also one that nobody expected: the first rank does this in another thread
                self._error = error

    def _raise(self, words: str, path: str | None, tensor: str | None, rank: int) -> NoReturn:
        group = self._group
        if self._error is not None and (group is None or group.rank == rank):
            raise self._error
        where = "" if group is None or group.world_size == 1 else f"rank {group.members[rank]}: "
        raise CheckpointError(f"{where}{words}", path=path, tensor=tensor) from self._error

    # -- on the first rank -----------------------------------------------------------------------------------------

    def _decide(self, ballots: list[Any], tree: bytes, keep: int | None) -> dict[str, Any]:
        """The outcome: the checkpoint is made, or there is a reason why not."""
        problem = _refusal(ballots)
        draft: Draft | None = None
        files: set[str] = set()
        try:
            if problem is None:
                everyones = [self._pieces(), *[_DECODER.decode(ballot["pieces"]) for ballot in ballots[1:]]]
                index = _index(self._folder, self._plan, ballots, everyones)
                files = {ballot["file"] for ballot in ballots}
                draft = Draft(self._folder, index, tree)
        except (PhalanxError, OSError) as error:
            problem = _error(error)
        problem = self._sync_both(draft) or problem
        told = self._gather(None if self._error is None else _told(self._error))
        assert told is not None
        for rank, words in enumerate(told):
            if words is not None and problem is None:
                problem = {"kind": "error", "error": [*words, rank]}
        try:
            if draft is not None and problem is None:
                draft.publish()
            elif draft is not None:
                draft.drop()
        except CheckpointError as error:
            problem = _error(error)
        if problem is not None:
            return problem
        with contextlib.suppress(OSError):  # the checkpoint is there; what is too much goes with the next one
            remove_leftovers(self._folder, files)
            if keep is not None:
                prune(self._folder.parent, keep, newest=self._folder)
        return {"kind": "saved"}

    def _sync_both(self, draft: Draft | None) -> dict[str, Any] | None:
        """Waits for this rank's file and for the index at the same time. Returns what was wrong with the index."""
        other = BackgroundThread(self._sync, "phalanx-fsync")
        try:
            other.start()
        except (RuntimeError, MemoryError):  # no thread is left: then one after the other
            self._sync()
        try:
            if draft is not None:
                draft.sync()
        except CheckpointError as error:
            return _error(error)
        finally:
            if other.is_started:
                other.join()
        return None


def _refusal(ballots: list[Any]) -> dict[str, Any] | None:
    """Why there can be no checkpoint of these votes; None if there can."""
    for rank, ballot in enumerate(ballots):
        if ballot["error"] is not None:
            return {"kind": "error", "error": [*ballot["error"], rank]}
    first = ballots[0]
    for ballot in ballots:
        # Hosts may have the same folder under different parents.
        alike = ballot["tree"] == first["tree"] and ballot["number"] == first["number"]
        if not alike or Path(ballot["folder"]).name != Path(first["folder"]).name:
            return {"kind": "different"}
    return None


def _error(error: BaseException) -> dict[str, Any]:
    """The outcome if the first rank had an error."""
    return {"kind": "error", "error": [*_told(error), 0]}


def _told(error: BaseException) -> list[str | None]:
    words = error.message if isinstance(error, CheckpointError) else describe(error)
    return [words, getattr(error, "path", None), getattr(error, "tensor", None)]


def _index(folder: Path, plan: Plan, ballots: list[Any], everyones: list[Pieces]) -> Index:
    tensors = {
        name: TensorEntry(held.dtype, held.shape, [], {str(dim): axis for dim, axis in held.axes.items()})
        for name, held in plan.tensors.items()
    }
    for ballot, pieces in zip(ballots, everyones, strict=True):
        for name, (dtype, shape) in ballot["own"].items():
            tensors[name] = TensorEntry(dtype, tuple(shape), [])
        for name, piece in pieces:
            tensors[name].pieces.append(piece)
    for name, tensor in tensors.items():
        is_whole = len(tensor.pieces) == 1 and tensor.pieces[0].shape == tensor.shape
        if not is_whole and not is_covered(whole(tensor.shape), [piece.region for piece in tensor.pieces]):
            raise CheckpointError(
                f"the parts of {name!r} that the ranks have do not make a tensor of shape {list(tensor.shape)}",
                tensor=name,
            )
    for rank, ballot in enumerate(ballots):
        file = ballot["file"]
        if file is not None and not (folder / file).is_file():
            raise CheckpointError(
                f"{file}, which rank {rank} has written to {ballot['folder']}, is not in {folder} on rank 0 "
                "(expected one folder, which all hosts share)",
                path=str(folder / file),
            )
    per_rank = {name: [ballot["per_rank"].get(name) for ballot in ballots] for name in plan.per_rank}
    return Index(plan.tree, tensors, len(ballots), time.time(), per_rank)


# -- differences -----------------------------------------------------------------------------------------------------


def _described(folder: Path, plan: Plan, number: int) -> dict[str, str]:
    """The words that have to be alike on all ranks, by name."""
    words = {name: f"{held.dtype}{list(held.shape)}" for name, held in plan.tensors.items()}
    words["the folder"] = folder.name
    words["the number of the save"] = str(number)

    def walk(node: Any, where: str) -> None:
        if isinstance(node, dict) and "dict" in node:
            words[f"the keys of {where or 'the tree'}"] = ", ".join(str(key) for key, _ in node["dict"])
            for key, item in node["dict"]:
                walk(item, f"{where}.{key}" if where else str(key))
        elif isinstance(node, dict) and ("list" in node or "tuple" in node):
            for index, item in enumerate(next(iter(node.values()))):
                walk(item, f"{where}.{index}")
        elif isinstance(node, dict) and "tensor" in node:
            words[node["tensor"]] = f"{words.get(node['tensor'])} of {node['library']}"
        else:
            words[where or "the tree"] = json.dumps(node)

    walk(plan.tree, "")
    return words


def _digest(plan: Plan, tree: bytes) -> str:
    """Equal if what `_described` says is, and much quicker."""
    tensors = [(name, held.dtype, held.shape) for name, held in plan.tensors.items()]
    return hashlib.sha256(tree + msgspec.json.encode(tensors)).hexdigest()


def _difference(mine: dict[str, str], group: Group) -> Desync:
    """Names what differs. All ranks come here, since the first told them to."""
    theirs: dict[str, str] = group.broadcast_object(mine, 0)
    wrong = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
    everyone: list[Any] = group.all_gather_object([[name, mine.get(name, "missing")[:60]] for name in wrong[:3]])
    rank, found = next((rank, found) for rank, found in enumerate(everyone) if found)
    (name, value), *_ = found
    hint = "all ranks save to one folder"
    if name == "the number of the save":
        hint = "a rank has left one out"
    elif name != "the folder":
        hint = "what each rank has for itself: px.checkpoint.PerRank or Shard"
    return Desync(
        f"the ranks save different trees: {', '.join(name for name, _ in found)} on rank {group.members[rank]} is not "
        f"as on rank {group.members[0]} ({value} there, {theirs.get(name, 'missing')[:60]} on rank {group.members[0]}; "
        f"{hint})",
        operation="save",
    )
