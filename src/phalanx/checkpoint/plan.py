"""The share of each rank: all find it for themselves, without a word among them."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapreplace
from typing import Any, NamedTuple

from ..errors import UnsupportedArray, UsageError
from .dtypes import item_size
from .local_arrays import Held, HeldPart, bytes_of_many, held, parts_of, rows_of
from .regions import cut, whole
from .tensors_file import FileTensor
from .tree import take_apart

__all__ = ["Plan", "make_plan"]

_CUT_FROM = 8 << 20
"""Bytes from which a tensor that all ranks have is written by all of them, each some rows."""


class Plan(NamedTuple):
    """The form of a tree, its tensors, and the share of this rank."""

    tree: Any
    tensors: dict[str, Held]
    """The tensors of the tree itself: the same on all ranks, but for what they hold of them."""
    own: dict[str, Held]
    """Those inside of values that this rank has for itself."""
    per_rank: dict[str, Any]
    """The form of these values."""
    share: list[FileTensor]
    """The pieces that this rank writes."""


def make_plan(tree: Any, rank: int, size: int) -> Plan:
    """Takes a tree apart, and finds the share of a rank. Nothing is copied that lies in order already.

    Raises:
        UsageError: There is something in the tree that cannot be saved; says where.
    """
    form, leaves, values = take_apart(tree)
    tensors = _held_of(leaves)
    per_rank, own = {}, {}
    for name, value in values.items():
        per_rank[name], inner, nested = take_apart(value.value, name=f"{name}@{rank}", taken=tensors)
        if nested:
            raise UsageError(f"{name}: PerRank inside of PerRank cannot be saved")
        own.update(_held_of(inner))
    mine = {name: tensor for name, tensor in tensors.items() if not tensor.everywhere}
    share = [_file_tensor(name, tensor, part) for name, tensor in {**mine, **own}.items() for part in parts_of(tensor)]
    return Plan(form, tensors, own, per_rank, _with_names_of_their_own([*_dealt(tensors, rank, size), *share]))


def _held_of(leaves: Mapping[str, Any]) -> dict[str, Held]:
    tensors = {}
    name = ""
    try:
        for name, leaf in leaves.items():
            tensors[name] = held(leaf)
    except UnsupportedArray as error:
        raise UnsupportedArray(f"{name}: {error}") from None
    return tensors


def _dealt(tensors: Mapping[str, Held], rank: int, size: int) -> list[FileTensor]:
    """This rank's share of the tensors that all have: large ones are cut, the others go to who has least.

    Every rank deals in the same way, so that nobody has to ask; only what it writes itself costs it more than that.
    """
    names = sorted((name for name, each in tensors.items() if each.everywhere), key=lambda name: -tensors[name].size)
    share, mine = [], []
    # A heap of what each has so far. The first has least; who it is stands in the last place of the number.
    loads = list(range(size))
    for name in names:
        tensor = tensors[name]
        if tensor.size >= _CUT_FROM and size > 1 and tensor.shape[0] >= size:
            (part,) = parts_of(tensor)
            rows = rows_of(part, list(cut(part.region, size))[rank], tensor.dtype)
            share.append(_file_tensor(name, tensor, rows))
            continue
        load = heapreplace(loads, loads[0] + (tensor.size + 64) * size)  # also empty ones cost something
        if load % size == rank:
            mine.append(name)
    for name, memory in zip(mine, bytes_of_many([tensors[name] for name in mine]), strict=True):
        tensor = tensors[name]
        share.append(FileTensor(name, name, tensor.dtype, whole(tensor.shape), memory))
    return share


def _with_names_of_their_own(share: list[FileTensor]) -> list[FileTensor]:
    """The same; a part may have been called as another tensor is."""
    names = {each.name for each in share}
    if len(names) == len(share):
        return share
    found: dict[str, FileTensor] = {}
    for each in share:
        name, number = each.name, 1
        while name in found or (number > 1 and name in names):
            number += 1
            name = f"{each.name}#{number}"
        found[name] = each._replace(name=name)
    return list(found.values())


def _file_tensor(name: str, tensor: Held, part: HeldPart) -> FileTensor:
    region = part.region
    assert len(part.memory) == region.size * item_size(tensor.dtype), name
    label = name if region.shape == tensor.shape else f"{name}@{','.join(map(str, region.offset))}"
    return FileTensor(label, name, tensor.dtype, region, part.memory)
