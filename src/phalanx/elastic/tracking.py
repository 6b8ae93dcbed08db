"""The arrays of a part of a state, found again quickly: a step copies the state, and must not look for it each time.

A part that has the same arrays in the same memory as at the last look needs no second one. That is seen by a short
walk over the dicts of a torch module or optimizer, which costs some hundredths of making its `state_dict`, and less in
the core.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._native import core, tensor_reader
from ..checkpoint.local_arrays import bytes_of, held
from ..checkpoint.tree import take_apart
from ..errors import UnsupportedArray, UsageError
from .sampler import Sampler

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
        self._seen: _Survey | None = None
        """The arrays at the last look; None if it must look anew."""

    def look(self, value: Any) -> None:
        """Finds the arrays of the part as it is now.

        Raises:
            UsageError: It is neither an array nor plain data nor has a `state_dict`, or is spread over ranks.
        """
        if type(value) is Sampler:  # changes in each step, and has no arrays
            self.form, self._seen = {"dict": [[key, item] for key, item in value.state_dict().items()]}, None
            return
        seen = self._seen
        if seen is not None and seen.value is value and seen.has_same_arrays():
            settings = _settings(value)
            if settings == seen.settings:
                return
            if self._patch(settings):
                seen.settings = settings
                return
        self._look_anew(value)
        found = _survey(value)
        self._seen = found if found is not None and _all_in_place(found.arrays, self.leaves) else None

    def _patch(self, groups: list[Any] | None) -> bool:
        """Puts other settings of an optimizer into the form, as a scheduler makes them in each step."""
        entries = self.form["dict"] if isinstance(self.form, dict) and "dict" in self.form else []
        place = next((entry for entry in entries if entry[0] == "param_groups"), None)
        if place is None or groups is None or len(groups) != len(place[1]["list"]):
            return False
        new = []
        for form, group in zip(place[1]["list"], groups, strict=True):
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


class _Survey:
    """The arrays of a value whose inside is known, and a quick way to see that they are still the same.

    Args:
        dicts: Gives the dicts that hold all of the value. They are compared by what they hold, object by object.
        arrays: Those among them.
    """

    def __init__(self, value: Any, dicts: Callable[[], Iterable[dict[Any, Any]]], arrays: list[Any]) -> None:
        self.value = value
        self.arrays = arrays
        self.settings = _settings(value)
        self._dicts = dicts
        self._held = list(_held_by(dicts()))
        """Kept, so that their ids stay theirs."""
        self._layout = _layout(arrays)

    def has_same_arrays(self) -> bool:
        """True if the value holds the same objects as then, and its arrays lie where they lay."""
        return _hold(self._dicts(), self._held) and _layout(self.arrays) == self._layout


def _hold(dicts: Iterable[dict[Any, Any]], objects: list[Any]) -> bool:
    """Whether the values of dicts, one after another, are these very objects."""
    if core is not None:
        return bool(core.hold(list(dicts), objects))
    return list(map(id, _held_by(dicts))) == list(map(id, objects))


def _held_by(dicts: Iterable[dict[Any, Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(dict.values, dicts))


def _survey(value: Any) -> _Survey | None:
    """The arrays of a value, if it is of a kind whose inside is known."""
    torch = sys.modules.get("torch")
    if type(value) is np.ndarray or (torch is not None and isinstance(value, torch.Tensor)):
        return _Survey(value, tuple, [value])
    if torch is None:
        return None
    if isinstance(value, torch.nn.Module):
        return _of_module(torch, value)
    if _is_plain_optimizer(torch, value):
        return _of_optimizer(torch, value)
    return None


def _of_module(torch: Any, module: Any) -> _Survey | None:
    stock = torch.nn.Module
    dicts: list[dict[Any, Any]] = []
    arrays = []
    for part in module.modules():
        kind = type(part)
        own = kind.state_dict is not stock.state_dict or kind.get_extra_state is not stock.get_extra_state
        if own or part._state_dict_hooks or part._state_dict_pre_hooks:
            return None
        dicts += [part._parameters, part._buffers, part._modules, part._state_dict_hooks, part._state_dict_pre_hooks]
        arrays += [each for held in (part._parameters, part._buffers) for each in held.values() if each is not None]
    return _Survey(module, lambda: dicts, arrays)


def _of_optimizer(torch: Any, optimizer: Any) -> _Survey | None:
    held = list(_held_by(optimizer.state.values()))
    arrays = [each for each in held if isinstance(each, torch.Tensor)]
    rest = [each for each in held if not isinstance(each, torch.Tensor)]
    for group in _settings(optimizer) or []:
        for value in group.values():
            rest += value if type(value) is tuple else [value]
    if not all(isinstance(each, FIXED) for each in rest):
        return None

    def dicts() -> Iterable[dict[Any, Any]]:
        found: Iterable[dict[Any, Any]] = optimizer.state.values()  # of the `state` now: load_state_dict makes another
        return found

    return _Survey(optimizer, dicts, arrays)


def _is_plain_optimizer(torch: Any, value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) and type(value).state_dict is torch.optim.Optimizer.state_dict


def _settings(value: Any) -> list[Any] | None:
    """The settings of an optimizer's groups, as the learning rate; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or not _is_plain_optimizer(torch, value):
        return None
    return [{key: each for key, each in group.items() if key != "params"} for group in value.param_groups]


def _layout(arrays: list[Any]) -> Any:
    """Where the elements of arrays lie. Each may be given other memory, and another order in the same memory."""
    if arrays and type(arrays[0]) is np.ndarray:
        return [(x.__array_interface__["data"], x.shape, x.strides, x.dtype) for x in arrays]
    torch = sys.modules.get("torch")
    if torch is None or not arrays:
        return []
    reader = tensor_reader()
    found = None if reader is None else reader.layout(arrays)
    if found is not None:
        return found
    tensor = torch.Tensor
    return [list(map(each, arrays)) for each in (tensor.data_ptr, tensor.size, tensor.is_contiguous)]


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
