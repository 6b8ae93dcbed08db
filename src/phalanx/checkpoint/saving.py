"""Saving: every rank writes its share, all vote, and the first makes it a checkpoint by one rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..deadline import Deadline
from ..errors import CheckpointError, Desync, PhalanxError, UsageError
from ..exception_text import describe
from ..group import Group, Mesh
from .folder import prune, remove_leftovers
from .index import Index, PieceEntry, TensorEntry, write_index
from .plan import Plan
from .progress import Progress
from .regions import is_covered, whole
from .tensors_file import Written, write_file

__all__ = ["group_of", "write_checkpoint"]


_NOTHING = Plan(None, {}, {}, {}, [])


def group_of(where: Group | Mesh | None) -> Group | None:
    """The group of a mesh."""
    return where.group if isinstance(where, Mesh) else where


def write_checkpoint(
    folder: Path, make: Callable[[], Plan], group: Group | None, *, keep: int | None, timeout: float | None
) -> None:
    """Writes the share of this rank, and returns when all have voted for the checkpoint and it is there.

    Args:
        make: Takes the tree apart. A rank that cannot do that votes, too, so that the others do not wait for it.

    Raises:
        CheckpointError: Somebody could not write; on all ranks. What was there before is still there.
        Desync: The ranks have different trees; on all of them.
        PeerLost: A rank was lost before the vote was over. What was there before is still there, or the new one.
    """
    rank = 0 if group is None else group.rank
    file = folder / f"rank-{rank:05d}-{secrets.token_hex(6)}.safetensors"
    error: BaseException | None = None
    written: list[Written] = []
    plan = _NOTHING
    try:
        plan = make()
        written = _write_share(folder, file, plan, shows=rank == 0)
    except (PhalanxError, OSError) as problem:
        error = problem
    try:
        _vote(folder, plan, _pieces(plan, file.name, written), error, group, keep, timeout)
    except (CheckpointError, Desync, UsageError):
        # All know that there is no checkpoint. After a lost rank nobody does: the first may have made it one, so that
        # the file stays, for the next save to remove.
        with contextlib.suppress(OSError):
            file.unlink()
        raise


def _write_share(folder: Path, file: Path, plan: Plan, *, shows: bool) -> list[Written]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror or error}", path=str(folder)) from None
    entries = [item.entry for item in plan.shares]
    if not entries:
        return []
    with Progress(f"saving {folder.name}", sum(len(entry.memory) for entry in entries), shows=shows) as progress:
        return write_file(file, entries, progress.advance)


def _pieces(plan: Plan, file: str, written: list[Written]) -> dict[str, list[Any]]:
    pieces: dict[str, list[Any]] = {}
    for item, place in zip(plan.shares, written, strict=bool(written)):
        region = item.region
        entry = [file, list(region.offset), list(region.shape), place.start, place.checksums]
        pieces.setdefault(item.entry.tensor, []).append(entry)
    return pieces


# -- the vote --------------------------------------------------------------------------------------------------------


def _vote(
    folder: Path,
    plan: Plan,
    pieces: dict[str, list[Any]],
    error: BaseException | None,
    group: Group | None,
    keep: int | None,
    timeout: float | None,
) -> None:
    ballot = {
        "tree": _digest(plan),
        "pieces": pieces,
        "own": {name: [held.dtype, list(held.shape)] for name, held in plan.own.items()},
        "per_rank": plan.per_rank,
        "error": None if error is None else _told(error),
    }
    if group is None:
        outcome = _decide(folder, plan, [ballot], keep)
    else:
        deadline = Deadline.of(timeout, group.timeout)
        ballots = group.gather_object(ballot, 0, timeout=deadline.remaining())
        outcome = _decide(folder, plan, ballots, keep) if ballots is not None else {}
        outcome = group.broadcast_object(outcome, 0, timeout=deadline.remaining())
    if outcome["kind"] == "different":
        raise _difference(plan, group)
    if outcome["kind"] == "error":
        words, path, tensor, of_rank = outcome["error"]
        if error is not None and (group is None or group.rank == of_rank):
            raise error
        where = "" if group is None or group.world_size == 1 else f"rank {group.members[of_rank]}: "
        raise CheckpointError(f"{where}{words}", path=path, tensor=tensor) from error


def _decide(folder: Path, plan: Plan, ballots: list[Any], keep: int | None) -> dict[str, Any]:
    """The outcome of the votes, on the first rank: the checkpoint is made, or there is a reason why not."""
    for rank, ballot in enumerate(ballots):
        if ballot["error"] is not None:
            return {"kind": "error", "error": [*ballot["error"], rank]}
    if any(ballot["tree"] != ballots[0]["tree"] for ballot in ballots):
        return {"kind": "different"}
    try:
        index = _index(folder, plan, ballots)
        write_index(folder, index)
    except (PhalanxError, OSError) as error:
        return {"kind": "error", "error": [*_told(error), 0]}
    with contextlib.suppress(OSError):  # the checkpoint is there; what is too much goes with the next one
        remove_leftovers(folder, index.files)
        if keep is not None:
            prune(folder.parent, keep, newest=folder)
    return {"kind": "saved"}


def _told(error: BaseException) -> list[str | None]:
    words = error.message if isinstance(error, CheckpointError) else describe(error)
    return [words, getattr(error, "path", None), getattr(error, "tensor", None)]


def _index(folder: Path, plan: Plan, ballots: list[Any]) -> Index:
    tensors = {
        name: TensorEntry(held.dtype, list(held.shape), [], {str(dim): axis for dim, axis in held.axes.items()})
        for name, held in plan.tensors.items()
    }
    for ballot in ballots:
        for name, (dtype, shape) in ballot["own"].items():
            tensors[name] = TensorEntry(dtype, shape, [])
        for name, found in ballot["pieces"].items():
            for piece in found:
                tensors[name].pieces.append(PieceEntry(*piece))
    for name, tensor in tensors.items():
        missing = not is_covered(whole(tensor.shape), [piece.region for piece in tensor.pieces])
        if missing:
            raise CheckpointError(
                f"the parts of {name!r} that the ranks have do not make a tensor of shape {tensor.shape}", tensor=name
            )
    per_rank = {name: [ballot["per_rank"].get(name) for ballot in ballots] for name in plan.per_rank}
    index = Index(plan.tree, tensors, len(ballots), time.time(), per_rank)
    for file in index.files:
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{file} is not in {folder} on rank 0 (expected a folder that all hosts share)", path=str(folder / file)
            )
    return index


# -- differences -----------------------------------------------------------------------------------------------------


def _described(plan: Plan) -> dict[str, str]:
    """The words that have to be alike on all ranks, by name."""
    words = {name: f"{held.dtype}{list(held.shape)}" for name, held in plan.tensors.items()}

    def walk(node: Any, where: str) -> None:
        if isinstance(node, dict) and "dict" in node:
            words[f"the keys of {where or 'the tree'}"] = ", ".join(str(key) for key, _ in node["dict"])
            for key, item in node["dict"]:
                walk(item, f"{where}.{key}" if where else str(key))
        elif isinstance(node, dict) and ("list" in node or "tuple" in node):
            for index, item in enumerate(next(iter(node.values()))):
                walk(item, f"{where}.{index}")
        elif not (isinstance(node, dict) and "tensor" in node):
            words[where or "the tree"] = json.dumps(node)

    walk(plan.tree, "")
    return words


def _digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(_described(plan), sort_keys=True).encode()).hexdigest()


def _difference(plan: Plan, group: Group | None) -> Desync:
    """Names what differs. All ranks come here, since the first told them to."""
    assert group is not None
    mine = _described(plan)
    theirs: dict[str, str] = group.broadcast_object(mine, 0)
    wrong = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
    everyone: list[Any] = group.all_gather_object(wrong[:3])
    rank, names = next((rank, names) for rank, names in enumerate(everyone) if names)
    detail = ""
    if rank == group.rank:
        shown: Callable[[dict[str, str]], str] = lambda words: words.get(names[0], "missing")[:60]  # noqa: E731
        detail = f" ({shown(mine)} here, {shown(theirs)} on rank {group.members[0]})"
    return Desync(
        f"the ranks save different trees: {', '.join(names)} on rank {group.members[rank]} is not as on rank "
        f"{group.members[0]}{detail} (what each rank has for itself: px.checkpoint.PerRank or Shard)",
        operation="save",
    )
