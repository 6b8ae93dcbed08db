"""The arrays of a part of a state, found again quickly: a step copies the state, and must not look for it each time.

A part that has the same arrays in the same memory as at the last look needs no second one. That is seen by a short
walk over the dicts of a torch module or optimizer, which costs some hundredths of making its `state_dict`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoint.local_arrays import bytes_of, held
from ..checkpoint.tree import take_apart
from ..errors import UnsupportedArray, UsageError

__all__ = ["Bytes", "Leaf", "StatePart"]

Bytes = npt.NDArray[np.uint8]
FIXED = (int, float, bool, str, bytes, complex, type(None))
"""Types of values that cannot change without being another object."""


class Leaf(NamedTuple):
    """An array: its dtype and shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    memory: Bytes


class StatePart:
    """A part of a state: its form, and its arrays where they lie."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.form: Any = None
        self.leaves: dict[str, Leaf] = {}
        """By name. Another dict whenever anything in it has changed."""
        self._seen: list[Any] | None = None
        """The arrays at the last look, which are kept so that their ids stay theirs; None if it must look anew."""
        self._layout: list[Any] = []
        self._plain: Any = None

    def look(self, value: Any) -> None:
        """Finds the arrays of the part as it is now.

        Raises:
            UsageError: It is neither an array nor plain data nor has a `state_dict`, or is spread over ranks.
        """
        arrays, plain = _survey(value)
        if arrays is not None and self._seen is not None and self._is_same(arrays):
            if plain == self._plain:
                return
            if self._patch(plain):
                self._plain = plain
                return
        self._look_anew(value)
        self._seen = None
        if arrays is not None and _all_in_place(arrays, self.leaves):
            self._seen, self._layout, self._plain = arrays, _layout(arrays), plain

    def _is_same(self, arrays: list[Any]) -> bool:
        seen = self._seen
        assert seen is not None
        return list(map(id, arrays)) == list(map(id, seen)) and _layout(arrays) == self._layout

    def _patch(self, groups: Any) -> bool:
        """Puts other settings of an optimizer into the form, as a scheduler makes them in each step."""
        entries = self.form["dict"] if isinstance(self.form, dict) and "dict" in self.form else []
        place = next((entry for entry in entries if entry[0] == "param_groups"), None)
        if place is None or not _is_optimizer_plain(groups, self._plain):
            return False
        old = place[1]["list"]
        new = []
        for form, group in zip(old, groups[1], strict=True):
            made, arrays, _ = take_apart(group)
            if arrays:
                return False
            params = next(entry for entry in form["dict"] if entry[0] == "params")
            new.append({"dict": [*made["dict"], params]})
        # A new form: a copy of the state may still hold the old one.
        rest = [entry if entry is not place else ["param_groups", {"list": new}] for entry in entries]
        self.form = {"dict": rest}
        return True

    def _look_anew(self, value: Any) -> None:
        if _is_lazy(value):
            raise UsageError(f"{self.name} has parameters without a shape (call the module once before State())")
        self.form, arrays, per_rank = take_apart(value, name=self.name)
        if per_rank:
            raise UsageError(
                f"{next(iter(per_rank))} is a PerRank: the state of an elastic job is the same on all ranks"
            )
        self.leaves = {name: _leaf(name, array) for name, array in arrays.items()}


def _leaf(name: str, array: Any) -> Leaf:
    try:
        found = held(array)
    except UnsupportedArray as error:
        raise UnsupportedArray(f"{name}: {error}") from None
    if not found.everywhere:
        raise UsageError(f"{name} is spread over ranks: the state of an elastic job is the same on all ranks")
    if _overlaps(array):
        raise UsageError(f"{name} has several elements in one place of memory, as expand() leaves them (clone it)")
    raw = bytes_of(array)
    memory = np.frombuffer(raw, np.uint8) if len(raw) else np.empty(0, np.uint8)
    return Leaf(found.dtype, found.shape, memory)


def _survey(value: Any) -> tuple[list[Any] | None, Any]:
    """The arrays of a value and its plain data, if it is of a kind whose inside is known; None for the arrays else."""
    if type(value) is np.ndarray:
        return [value], None
    torch = sys.modules.get("torch")
    if torch is None:
        return None, None
    if isinstance(value, torch.Tensor):
        return [value], None
    if isinstance(value, torch.nn.Module):
        return _of_module(torch, value), None
    if isinstance(value, torch.optim.Optimizer) and type(value).state_dict is torch.optim.Optimizer.state_dict:
        return _of_optimizer(torch, value)
    return None, None


def _of_module(torch: Any, module: Any) -> list[Any] | None:
    stock = torch.nn.Module
    found, stack = [], [module]
    while stack:
        part = stack.pop()
        kind = type(part)
        own = kind.state_dict is not stock.state_dict or kind.get_extra_state is not stock.get_extra_state
        if own or part._state_dict_hooks or part._state_dict_pre_hooks:
            return None
        found += [array for array in part._parameters.values() if array is not None]
        found += [array for array in part._buffers.values() if array is not None]
        stack += [inner for inner in part._modules.values() if inner is not None]
    return found


def _of_optimizer(torch: Any, optimizer: Any) -> tuple[list[Any] | None, Any]:
    arrays, plain = [], []
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                arrays.append(value)
            elif isinstance(value, FIXED):
                plain.append((key, value))
            else:
                return None, None
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for group in groups:
        for value in group.values():
            items = value if type(value) is tuple else (value,)
            if not all(isinstance(item, FIXED) for item in items):
                return None, None
    return arrays, (plain, groups)


def _is_optimizer_plain(new: Any, old: Any) -> bool:
    """True if two surveys differ in the settings of the groups only."""
    if not (isinstance(new, tuple) and isinstance(old, tuple)):
        return False
    same: bool = new[0] == old[0] and len(new[1]) == len(old[1])
    return same


def _layout(arrays: list[Any]) -> list[Any]:
    """Where the elements of arrays lie. Each may be given other memory, and another order in the same memory."""
    if arrays and type(arrays[0]) is np.ndarray:
        return [(x.__array_interface__["data"], x.shape, x.strides, x.dtype) for x in arrays]
    torch = sys.modules.get("torch")
    if torch is None or not arrays:
        return []
    tensor = torch.Tensor
    return [
        list(map(tensor.data_ptr, arrays)),
        list(map(tensor.size, arrays)),
        list(map(tensor.stride, arrays)),
        [array.dtype for array in arrays],
    ]


def _is_lazy(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return False
    is_lazy = torch.nn.parameter.is_lazy
    return any(map(is_lazy, value.parameters())) or any(map(is_lazy, value.buffers()))


def _overlaps(array: Any) -> bool:
    """True if elements of a tensor of torch share memory, so that none of them can be set."""
    stride = getattr(array, "stride", None)
    return callable(stride) and any(step == 0 and size > 1 for step, size in zip(stride(), array.shape, strict=True))


def _all_in_place(arrays: list[Any], leaves: dict[str, Leaf]) -> bool:
    """True if the bytes of all leaves are the memory of the arrays, and not copies of it."""
    memory = {leaf.memory.ctypes.data for leaf in leaves.values() if leaf.memory.size}
    own = {array.ctypes.data if type(array) is np.ndarray else array.data_ptr() for array in arrays}
    return memory <= own
