"""The state that a training job must not lose: models, optimizers, arrays, positions; and copies to go back to."""

from __future__ import annotations

import json
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

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

    def __repr__(self) -> str:
        return f"State({self._names()})"

    def _look(self) -> Iterator[StatePart]:
        """The parts, with their arrays as they are now."""
        found = list(self._tracked.items())
        for name, part in found:
            part.look(self._parts[name])
        return iter([part for _, part in found])

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


class Snapshot:
    """A state as it was: its form, and the bytes of its arrays.

    Args:
        form: As `checkpoint.tree.take_apart` gives it.
        leaves: The arrays by name.
    """

    def __init__(self, form: Any, leaves: dict[str, Leaf]) -> None:
        self._form = form
        self._leaves = leaves

    @classmethod
    def of(cls, state: State, *, copy: bool = True, into: Snapshot | None = None) -> Snapshot:
        """The state as it is now.

        Args:
            copy: False shares the memory of the arrays, for a look at it before it changes.
            into: An older one, whose memory may be used again.

        Raises:
            UsageError: A part is neither an array nor plain data nor has a `state_dict`, or is spread over ranks.
        """
        old = {} if into is None else into._leaves
        form, leaves = [], {}
        for part in state._look():
            form.append([part.name, part.form])
            for name, leaf in part.leaves.items():
                if not copy:
                    leaves[name] = leaf
                    continue
                kept = old.get(name)
                if kept is None or kept[:2] != leaf[:2]:
                    kept = leaf._replace(memory=np.empty_like(leaf.memory))
                np.copyto(kept.memory, leaf.memory)
                leaves[name] = kept
        return cls({"dict": form}, leaves)

    def restore(self, state: State) -> None:
        """Makes the state what it was."""
        state._parts.update(self._build(self._form, state._parts))

    # -- as bytes ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.memory.size for leaf in self._leaves.values())

    def head(self) -> bytes:
        """Everything but the arrays' bytes."""
        index = [[name, leaf.dtype, list(leaf.shape), leaf.memory.size] for name, leaf in self._leaves.items()]
        return json.dumps([self._form, index]).encode()

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
        for leaf in self._leaves.values():
            first, last = max(begin, at), min(end, at + leaf.memory.size)
            if first < last:
                yield leaf.memory[first - at : last - at], slice(first - begin, last - begin)
            at += leaf.memory.size

    @classmethod
    def empty(cls, head: bytes) -> Snapshot:
        """A snapshot whose bytes are still to be filled in."""
        form, index = json.loads(head)
        return cls(
            form, {name: Leaf(dtype, tuple(shape), np.empty(size, np.uint8)) for name, dtype, shape, size in index}
        )

    def checksum(self) -> int:
        """A CRC of everything in it: equal on ranks whose states are."""
        crc = zlib.crc32(self.head())
        for leaf in self._leaves.values():
            crc = zlib.crc32(leaf.memory.data, crc)
        return crc

    # -- putting it together -------------------------------------------------------------------------------------------

    def _build(self, node: Any, like: Any) -> Any:
        """The value of a form. `like` is what the program has in this place, which is changed where it can be."""
        if not isinstance(node, dict):
            return node
        (kind, value), *_ = node.items()
        if kind == "tensor":
            return self._array(value, node["library"], like)
        if kind in ODD_KINDS:
            return plain_value(kind, value)
        if has_state(like):
            like.load_state_dict(self._build(node, like.state_dict()))
            return like
        if kind == "dict":
            known = like if isinstance(like, Mapping) else {}
            found = {key: self._build(item, known.get(key)) for key, item in value}
            return type(like)(found) if type(like) in (Counter, OrderedDict) else found
        items = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        made = [self._build(item, other) for item, other in zip(value, items, strict=True)]
        if kind == "list":
            return made
        return type(like)(*made) if hasattr(like, "_fields") else tuple(made)

    def _array(self, name: str, library: str, like: Any) -> Any:
        leaf = self._leaves[name]
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
