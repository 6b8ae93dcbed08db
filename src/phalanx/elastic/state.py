"""The state that a training job must not lose: models, optimizers, arrays, positions; and copies to go back to."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from .._native import core
from ..checkpoint.local_arrays import Target, held, new_target, target_of
from ..checkpoint.regions import whole
from ..checkpoint.tree import ODD_KINDS, has_state, plain_value
from ..errors import UsageError
from ..group import Group
from .tracking import Bytes, Leaf, StatePart

__all__ = ["Snapshot", "State"]


class State:
    """Everything that a step changes and that must survive the loss of ranks. The same on all ranks.

    Objects with `state_dict` and `load_state_dict` (modules, optimizers, schedulers), arrays of NumPy, torch and JAX,
    plain data, and dicts, lists and tuples of all of these. Arrays of NumPy and torch are restored in place; what
    cannot be changed in place is an attribute of the state that is set anew:

    ```python
    state = px.elastic.State(params=params, sampler=sampler)
    state.params = update(state.params, gradients)      # JAX
    ```

    If it has a part named `sampler` with `take` and `advance`, as `Sampler` has, that one gives `ElasticStep.batch`.
    Parts with a method `use_group`, as `px.parallel.DDP`, are told of every new group. Gradients are not part of a
    state: those of a step that is taken back are dropped.

    Raises:
        UsageError: A part is nothing of that; says which.
    """

    def __init__(self, **parts: Any) -> None:
        if not parts:
            raise UsageError("State() needs at least one part (as in State(model=model, optimizer=optimizer))")
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_tracked", {name: StatePart(name) for name in parts})
        object.__setattr__(self, "_set_anew", set())
        self._look()  # names what cannot be kept

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_parts"][name]
        except KeyError:
            raise AttributeError(f"this state has no part {name!r} (it has {self._names()})", name=name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._parts:
            raise AttributeError(f"this state has no part {name!r} (it has {self._names()})", name=name)
        self._parts[name] = value
        self._set_anew.add(name)

    def __repr__(self) -> str:
        return f"State({self._names()})"

    def _look(self) -> list[StatePart]:
        """The parts, with their arrays as they are now."""
        for name, part in self._tracked.items():
            part.look(self._parts[name])
        return list(self._tracked.values())

    def _use_group(self, group: Group) -> None:
        """Tells the parts that talk to other ranks which ones those are now."""
        for part in self._parts.values():
            if hasattr(part, "use_group"):
                part.use_group(group)

    def _drop_gradients(self) -> None:
        """Takes back what a step has added to gradients, which a program may drop only after it has used them."""
        for part in self._parts.values():
            if hasattr(part, "zero_grad"):
                part.zero_grad()

    def _names(self) -> str:
        return ", ".join(self.__dict__.get("_parts", ()))


class _Copy:
    """Memory of its own for the arrays of one part.

    Args:
        source: The arrays that it is a copy of.
        old: Memory that may be used again.
    """

    def __init__(self, source: dict[str, Leaf], old: dict[str, Leaf]) -> None:
        self.source = source
        self.leaves: dict[str, Leaf] = {}
        for name, leaf in source.items():
            kept = old.get(name)
            if kept is None or kept[:2] != leaf[:2]:
                kept = leaf._replace(memory=np.empty_like(leaf.memory))
            self.leaves[name] = kept
        pairs = [(self.leaves[name].memory, leaf.memory) for name, leaf in source.items() if leaf.memory.size]
        self.take = _taking([target for target, _ in pairs], [memory for _, memory in pairs])
        """Copies the arrays as they are now."""


def _taking(targets: list[Bytes], sources: list[Bytes]) -> Callable[[], None]:
    if core is not None:
        copies: Callable[[], None] = core.Copies(targets, sources).take
        return copies

    def take() -> None:
        for target, source in zip(targets, sources, strict=True):
            target[:] = source

    return take


class Snapshot:
    """A state as it was: its form, and the bytes of its arrays.

    Args:
        forms: Of each part, as `checkpoint.tree.take_apart` gives it.
        leaves: The arrays of each part, by name.
        set_anew: Parts that the program has replaced by others.
    """

    def __init__(self, forms: dict[str, Any], leaves: dict[str, dict[str, Leaf]], set_anew: Collection[str]) -> None:
        self._forms = forms
        self._leaves = leaves
        self._set_anew = set_anew
        self._copies: dict[str, _Copy] = {}

    @classmethod
    def of(cls, state: State, *, copy: bool = True, into: Snapshot | None = None) -> Snapshot:
        """The state as it is now.

        Args:
            copy: False shares the memory of the arrays, for a look at it before it changes.
            into: An older one, whose memory may be used again.

        Raises:
            UsageError: A part is neither an array nor plain data nor has a `state_dict`, or is spread over ranks.
        """
        parts = state._look()
        forms = {part.name: part.form for part in parts}
        if not copy:
            return cls(forms, {part.name: part.leaves for part in parts}, state._set_anew)
        copies = {}
        for part in parts:
            made = into._copies.get(part.name) if into is not None else None
            if made is None or made.source is not part.leaves:
                made = _Copy(part.leaves, into._leaves.get(part.name, {}) if into is not None else {})
            made.take()
            copies[part.name] = made
        found = cls(forms, {name: made.leaves for name, made in copies.items()}, state._set_anew)
        found._copies = copies
        return found

    def restore(self, state: State) -> None:
        """Makes the state what it was. Arrays, dicts and lists of the program are changed in place."""
        for name, form in self._forms.items():
            state._parts[name] = self._build(form, state._parts.get(name), self._leaves[name])

    def check_fits(self, state: State) -> None:
        """Compares this state, which comes from other ranks, with the one that the program has made.

        Raises:
            UsageError: They have different parts, or arrays of different shapes or types.
        """
        theirs, mine = set(self._forms), set(state._parts)
        if theirs != mine:
            raise UsageError(
                f"the state of the other ranks has the parts {', '.join(sorted(theirs))}, this one has "
                f"{', '.join(sorted(mine))} (run the same program on all ranks)"
            )
        for part in state._look():
            if part.name in self._set_anew or part.name not in part.leaves:
                continue  # it may have become another, or has arrays inside
            here, there = part.leaves[part.name], self._leaves[part.name].get(part.name)
            if there is None or here[:2] != there[:2]:
                what = "no array" if there is None else f"{there.dtype} of shape {there.shape}"
                raise UsageError(
                    f"{part.name} is {what} on the other ranks, and {here.dtype} of shape {here.shape} on this one "
                    "(run the same program on all ranks)"
                )

    # -- as bytes ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.memory.size for leaf in self._all())

    def _all(self) -> Iterator[Leaf]:
        return (leaf for part in self._leaves.values() for leaf in part.values())

    def head(self) -> bytes:
        """Everything but the arrays' bytes."""
        index = [
            [part, [[name, leaf.dtype, list(leaf.shape), leaf.memory.size] for name, leaf in leaves.items()]]
            for part, leaves in self._leaves.items()
        ]
        return json.dumps([self._forms, index, sorted(self._set_anew)]).encode()

    def share(self, begin: int, end: int) -> Bytes:
        """Some of the arrays' bytes, counted as if they lay one behind the other."""
        share = np.empty(end - begin, np.uint8)
        for memory, place in self._pieces(begin, end):
            share[place] = memory
        return share

    def fill(self, begin: int, share: Bytes) -> None:
        """Writes what `share` gave on another rank."""
        for memory, place in self._pieces(begin, begin + share.size):
            memory[:] = share[place]

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[Bytes, slice]]:
        """The arrays' memory between two positions, and where each piece is in that range."""
        at = 0
        for leaf in self._all():
            first, last = max(begin, at), min(end, at + leaf.memory.size)
            if first < last:
                yield leaf.memory[first - at : last - at], slice(first - begin, last - begin)
            at += leaf.memory.size

    @classmethod
    def empty(cls, head: bytes) -> Snapshot:
        """A snapshot whose bytes are still to be filled in."""
        forms, index, set_anew = json.loads(head)
        leaves = {
            part: {name: Leaf(dtype, tuple(shape), np.empty(size, np.uint8)) for name, dtype, shape, size in found}
            for part, found in index
        }
        return cls(forms, leaves, set_anew)

    def checksum(self) -> int:
        """A CRC of everything in it: equal on ranks whose states are."""
        return zlib.crc32(json.dumps(self.checksums()).encode())

    def checksums(self) -> dict[str, int]:
        """A CRC of each part."""
        found = {}
        for part, form in self._forms.items():
            leaves = self._leaves[part].values()
            crc = zlib.crc32(json.dumps([form, [leaf[:2] for leaf in leaves]]).encode())
            for leaf in leaves:
                crc = zlib.crc32(leaf.memory.data, crc)
            found[part] = crc
        return found

    # -- putting it together -------------------------------------------------------------------------------------------

    def _build(self, node: Any, like: Any, leaves: dict[str, Leaf]) -> Any:
        """The value of a form. `like` is what the program has in this place, which is changed where it can be."""
        if not isinstance(node, dict):
            return node
        (kind, value), *_ = node.items()
        if kind == "tensor":
            return _array(value, leaves[value], node["library"], like)
        if kind in ODD_KINDS:
            return _in_place(like, bytearray, plain_value(kind, value))
        if has_state(like):
            like.load_state_dict(self._build(node, like.state_dict(), leaves))
            return like
        if kind == "dict":
            known = like if isinstance(like, Mapping) else {}
            return _in_place(like, dict, {key: self._build(item, known.get(key), leaves) for key, item in value})
        items = like if isinstance(like, list | tuple) else ()
        pairs = itertools.zip_longest(value, items[: len(value)])
        made = [self._build(item, other, leaves) for item, other in pairs]
        if kind == "list":
            return _in_place(like, list, made)
        return type(like)(*made) if hasattr(like, "_fields") and len(items) == len(made) else tuple(made)


def _in_place(like: Any, kind: type, value: Any) -> Any:
    """The program's own object with that value, if it is of that kind; else the value."""
    if not isinstance(like, kind):
        return value
    if isinstance(like, dict):
        like.clear()
        like.update(value)
    else:
        like[:] = value  # type: ignore[index]
    return like


def _array(name: str, leaf: Leaf, library: str, like: Any) -> Any:
    # What is spread over ranks is none of ours: torch's set_state_dict leaves such tensors in what it is given.
    if like is not None and tuple(getattr(like, "shape", (None,))) == leaf.shape and held(like).everywhere:
        target = target_of(like, leaf.dtype, leaf.shape, name)
    else:
        target = new_target(leaf.dtype, library, whole(leaf.shape))
    return _fill(target, leaf.memory)


def _fill(target: Target, memory: Bytes) -> Any:
    if memory.size:
        target.memory[...] = memory.view(target.memory.dtype).reshape(target.memory.shape)
    return target.finish()
