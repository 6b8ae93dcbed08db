"""Data-parallel training with anything that is a list or dict of arrays: NumPy, JAX, torch, nested as you like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError
from ..group import Group
from ..group.tracking import call_site
from . import replicas

__all__ = ["DataParallel", "average_gradients"]

T = TypeVar("T")

call_site.add_library(f"{Path(__file__).parent}/")


def average_gradients(arrays: T, group: Group, *, timeout: float | None = None) -> T:
    """The mean of each array over all ranks.

    Args:
        arrays: A list, tuple or dict of arrays, nested as you like; the same on all ranks but for the values.

    Returns:
        The same structure. Writable arrays are changed in place; of read-only ones (JAX) new ones are made.

    Raises:
        UsageError: There is something else than arrays in it.
        Desync: The ranks have different arrays.
    """
    leaves: list[Any] = []
    _collect(arrays, leaves, "gradients")
    averaged = iter(group.all_reduce_many(leaves, op="mean", timeout=timeout) if leaves else [])
    result: T = _rebuild(arrays, lambda _leaf: next(averaged))
    return result


class DataParallel:
    """The steps of a data-parallel loop, for arrays of any library.

    ```python
    parallel = px.parallel.DataParallel(world)
    params = parallel.broadcast(params)
    for batch in parallel.shard(data):
        loss, grads = value_and_grad(params, batch)
        params = update(params, parallel.average(grads))
    parallel.verify(params)
    ```
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def broadcast(self, params: T, *, root: int = 0, timeout: float | None = None) -> T:
        """The parameters of `root` on all ranks.

        Raises:
            Desync: The ranks have different arrays.
        """
        leaves: list[Any] = []
        _collect(params, leaves, "parameters")
        sent = iter([self.group.broadcast(leaf, root, timeout=timeout) for leaf in leaves])
        result: T = _rebuild(params, lambda _leaf: next(sent))
        return result

    def average(self, gradients: T, *, timeout: float | None = None) -> T:
        """As `average_gradients`."""
        return average_gradients(gradients, self.group, timeout=timeout)

    def shard(self, data: Any) -> Any:
        """This rank's part of something that can be cut: each `world_size`-th item, and as many on every rank.

        Raises:
            UsageError: There are fewer items than ranks.
        """
        size = self.group.world_size
        if len(data) < size:
            raise UsageError(f"{len(data)} items cannot be shared by {size} ranks")
        return data[: len(data) // size * size][self.group.rank :: size]

    def verify(self, params: Any, *, timeout: float | None = None) -> None:
        """Whether all ranks have the same parameters, bit for bit.

        Raises:
            Desync: They have not; names the arrays and the ranks.
        """
        named: dict[str, Any] = {}
        _name(params, named, "params")
        replicas.verify(named, self.group, timeout=timeout)


def _is_leaf(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _collect(value: Any, leaves: list[Any], where: str) -> None:
    named: dict[str, Any] = {}
    _name(value, named, where)
    leaves.extend(named.values())


def _name(value: Any, named: dict[str, Any], where: str) -> None:
    """All arrays in a structure, by their place in it. Dicts by sorted keys: ranks may have filled them differently."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _name(value[key], named, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _name(item, named, f"{where}[{index}]")
    elif _is_leaf(value):
        named[where] = value
    elif value is not None:
        raise UsageError(f"{where} is of type {type(value).__name__} (expected arrays in lists, tuples and dicts)")


def _rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        made = {key: _rebuild(value[key], leaf) for key in sorted(value, key=str)}
        if isinstance(value, dict):  # also one whose class is not made of pairs, as defaultdict
            same = copy.copy(value)
            same.update(made)
            return same
        return type(value)((key, made[key]) for key in value)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuild(item, leaf) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_rebuild(item, leaf) for item in value)
    return None if value is None else leaf(value)
