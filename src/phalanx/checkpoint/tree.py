"""Trees of tensors and plain data: taken apart into named leaves and a form that JSON can hold, and put together again.

Plain data are None, bool, int, float, complex, str, bytes, and dicts, lists and tuples of them. Objects with a
`state_dict`, as modules and optimizers of torch, stand for it.
"""

from __future__ import annotations

import base64
import functools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError, UsageError
from .shards import PerRank, Shard

__all__ = ["ODD_KINDS", "build", "has_state", "is_array", "library_of", "plain_value", "take_apart"]

Leaves = dict[str, Any]
ODD_KINDS = ("float", "complex", "bytes")
"""Kinds of plain data that JSON has no word for."""
_LONGEST_INT = 14_000
"""Bits: Python refuses to read numbers of more than 4,300 digits."""
_DICTS = (Counter, OrderedDict)
"""Dicts that `like` may have, and that are made again."""
_DEEPEST = 100
"""Dicts and lists inside of each other: JSON and Python's own stack have limits, too."""


def is_array(value: Any) -> bool:
    """True for arrays of any library, and for parts of them."""
    kind: Any = type(value)
    return _is_array_type(kind) or (hasattr(value, "dtype") and hasattr(value, "shape"))


def has_state(value: Any) -> bool:
    """True for objects that give and take their state as a dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def take_apart(tree: Any, *, name: str = "", taken: Collection[str] = ()) -> tuple[Any, Leaves, dict[str, PerRank]]:
    """The form of a tree, its arrays, and its values that belong to single ranks, by name.

    Args:
        name: What the names begin with.
        taken: Names that others have.

    Raises:
        UsageError: There is something in it that is neither an array nor plain data; says where.
    """
    leaves: Leaves = {}
    per_rank: dict[str, PerRank] = {}
    around: list[Any] = []
    """The dicts and lists that the walk is inside of."""

    def unused(name: str) -> str:
        found, number = name or "value", 1
        while found in leaves or found in per_rank or found in taken:
            number += 1
            found = f"{name}#{number}"
        return found

    def walk(value: Any, where: str) -> Any:
        if is_array(value):
            key = unused(where)
            leaves[key] = value
            return {"tensor": key, "library": library_of(value)}
        if isinstance(value, PerRank):
            key = unused(where)
            per_rank[key] = value
            return {"per_rank": key}
        if has_state(value):
            value = value.state_dict()
        if isinstance(value, str):
            return _text(value, where or "the tree")
        if value is None or isinstance(value, bool) or type(value) is int:
            return _number(value, where)
        if isinstance(value, float) and type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, (Mapping, list, tuple)):
            if any(value is outer for outer in around):
                raise UsageError(f"{where} is a {type(value).__name__} that contains itself, which cannot be saved")
            if len(around) == _DEEPEST:
                raise UsageError(f"{where[:60]}... is nested more than {_DEEPEST} deep, which cannot be saved")
            around.append(value)
            try:
                return walk_into(value, where)
            finally:
                around.pop()
        raise UsageError(
            f"{where or 'the tree'} is of type {type(value).__name__}, which cannot be saved (expected arrays, plain "
            "data, dicts and lists of them, or objects with a state_dict)"
        )

    def walk_into(value: Any, where: str) -> Any:
        below = f"{where}." if where else ""
        if isinstance(value, Mapping):
            return {"dict": [[_key(key, where), walk(item, f"{below}{key}")] for key, item in value.items()]}
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [walk(item, f"{below}{index}") for index, item in enumerate(value)]}

    return walk(tree, name), leaves, per_rank


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str):
        return _text(key, f"a key of {where or 'the tree'}")
    if key is None or isinstance(key, int):
        return _number(key, where)
    if isinstance(key, float) and math.isfinite(key):
        return key
    what = repr(key) if isinstance(key, float) else f"of type {type(key).__name__}"
    raise UsageError(f"{where or 'the tree'} has a key {what} (expected str or a finite number)")


def _text(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{where} is {value[:40]!r}, which is not Unicode text and cannot be saved") from None
    return value


def _number(value: int | None, where: str) -> int | None:
    if value is not None and value.bit_length() > _LONGEST_INT:
        raise UsageError(f"{where or 'the tree'} is a number of {value.bit_length()} bits, which cannot be saved")
    return value


def plain_value(kind: str, value: Any) -> Any:
    """A value that JSON has no word for, of one of `ODD_KINDS`."""
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    return base64.b64decode(value)


def build(
    node: Any,
    like: Any,
    *,
    tensor: Callable[[str, str, Any], Any],
    per_rank: Callable[[str], Any],
    applies: bool,
) -> Any:
    """The tree of a form.

    Args:
        like: What the program has in this place, or None.
        tensor: Called with a name, a library and what the program has there; returns the array.
        per_rank: The form of a value that this rank has for itself; None if there is none.
        applies: Whether objects with a `state_dict` are given theirs.

    Raises:
        CheckpointError: `like` has entries that the checkpoint has not, or the form is damaged.
    """

    def walk(node: Any, like: Any, where: str) -> Any:
        if not isinstance(node, dict):
            return node
        (kind, value), *_ = node.items()
        if kind == "tensor":
            return tensor(value, node["library"], like)
        if kind == "per_rank":
            other = like.value if isinstance(like, PerRank) else like
            own = per_rank(value)
            return other if own is None else walk(own["value"], other, where)
        if kind in ODD_KINDS:
            return plain_value(kind, value)
        if has_state(like):
            state = walk(node, like.state_dict(), where)
            if applies:
                like.load_state_dict(state)
            return like
        below = f"{where}." if where else ""
        if kind == "dict":
            known: Any = like if isinstance(like, Mapping) else {}
            missing = [key for key in known if key not in {key for key, _ in value}]
            if missing:
                raise CheckpointError(f"the checkpoint has no {below}{missing[0]} (like has it)")
            found = {key: walk(item, known.get(key), f"{below}{key}") for key, item in value}
            return type(like)(found) if type(like) in _DICTS else found
        if kind in ("list", "tuple"):
            items = like if isinstance(like, (list, tuple)) else ()
            if len(items) > len(value):
                raise CheckpointError(f"the checkpoint has {len(value)} items in {where or 'the tree'}, like more")
            padded = [*items, *[None] * (len(value) - len(items))]
            made = [walk(item, other, f"{below}{i}") for i, (item, other) in enumerate(zip(value, padded, strict=True))]
            if kind == "tuple" and len(made) == len(items) and hasattr(like, "_make"):
                return like._make(made)  # a named tuple
            return made if kind == "list" else tuple(made)
        raise CheckpointError(f"the index is damaged (an entry of kind {kind!r})")

    return walk(node, like, "")


def library_of(value: Any) -> str:
    """The library that an array comes from: "numpy", "torch" or "jax"."""
    kind: Any = type(value.array if isinstance(value, Shard) else value)
    return _library_of_type(kind)


@functools.cache
def _is_array_type(kind: Any) -> bool:
    return issubclass(kind, (Shard, np.generic)) or (hasattr(kind, "dtype") and hasattr(kind, "shape"))


@functools.cache
def _library_of_type(array: Any) -> str:
    for kind in array.__mro__:
        root = str(kind.__module__).partition(".")[0]
        if root in ("torch", "numpy"):
            return root
        if root in ("jax", "jaxlib"):
            return "jax"
    return "numpy"
