"""The share of each rank: all find it for themselves, without a word among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import UnsupportedArray, UsageError
from .dtypes import item_size
from .local_arrays import Held, HeldPart, held, rows_of
from .regions import Region, cut
from .tensors_file import FileTensor
from .tree import take_apart

__all__ = ["Plan", "Share", "make_plan"]

_CUT_FROM = 8 << 20
"""Bytes from which a tensor that all ranks have is written by all of them, each some rows."""


class Share(NamedTuple):
    """A part of a tensor that this rank writes."""

    region: Region
    entry: FileTensor


class Plan(NamedTuple):
    """The form of a tree, its tensors, and the share of this rank."""

    tree: Any
    tensors: dict[str, Held]
    """The tensors of the tree itself: the same on all ranks, but for what they hold of them."""
    own: dict[str, Held]
    """Those inside of values that this rank has for itself."""
    per_rank: dict[str, Any]
    """The form of these values."""
    shares: list[Share]


def make_plan(tree: Any, rank: int, size: int) -> Plan:
    """Takes a tree apart, and finds the share of a rank. Nothing is copied that lies in order already.

    Raises:
        UsageError: There is something in the tree that cannot be saved; says where.
    """
    form, leaves, values = take_apart(tree)
    tensors = {name: _held(name, leaf) for name, leaf in leaves.items()}
    per_rank, own = {}, {}
    for name, value in values.items():
        per_rank[name], inner, nested = take_apart(value.value, name=f"{name}@{rank}")
        if nested:
            raise UsageError(f"{name}: PerRank inside of PerRank cannot be saved")
        own.update({key: _held(key, leaf) for key, leaf in inner.items()})
    share = []
    for name, parts in _shares(tensors, rank, size).items():
        share += [Share(part.region, _entry(name, tensors[name], part)) for part in parts]
    for name, tensor in own.items():
        share += [Share(part.region, _entry(name, tensor, part)) for part in tensor.parts]
    return Plan(form, tensors, own, per_rank, share)


def _held(name: str, leaf: Any) -> Held:
    try:
        return held(leaf)
    except UnsupportedArray as error:
        raise UnsupportedArray(f"{name}: {error}") from None


def _shares(tensors: Mapping[str, Held], rank: int, size: int) -> dict[str, list[HeldPart]]:
    """The parts of this rank. Tensors that all have are dealt out: large ones cut, the others to who has least."""
    loads = [0] * size
    mine: dict[str, list[HeldPart]] = {name: tensor.parts for name, tensor in tensors.items() if not tensor.everywhere}
    dealt = {name: tensor for name, tensor in tensors.items() if tensor.everywhere}
    for name, tensor in sorted(dealt.items(), key=lambda item: -len(item[1].parts[0].memory)):
        (part,) = tensor.parts
        count = len(part.memory)
        if count >= _CUT_FROM and size > 1 and tensor.shape[0] >= size:
            regions = list(cut(part.region, size))
            mine[name] = [rows_of(part, regions[rank], tensor.dtype)]
            continue
        writer = loads.index(min(loads))
        loads[writer] += count + 64  # also empty ones cost something
        if writer == rank:
            mine[name] = [part]
    return mine


def _entry(name: str, tensor: Held, part: HeldPart) -> FileTensor:
    shape = part.region.shape
    assert len(part.memory) == part.region.size * item_size(tensor.dtype), name
    label = name if shape == tensor.shape else f"{name}@{','.join(map(str, part.region.offset))}"
    return FileTensor(label, name, tensor.dtype, shape, part.memory)
