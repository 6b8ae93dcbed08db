"""Classes on their way to another process that cannot import them: from a script, a notebook, or inside a function.

A class is made anew there, empty, and then filled: its methods may refer to it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

__all__ = ["MARKS", "module_of", "reduce_class", "reduce_part"]

MARKS = frozenset({"pytestmark"})
"""Attributes of functions and classes that concern who calls them, and may hold anything."""

_NOT_SENT = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__module__",
        "__slots__",
        "_abc_impl",
        "__annotate__",
        "__static_attributes__",
        "__firstlineno__",
    }
)
"""Attributes that Python makes by itself for every class."""
_OF_ENUMS = frozenset({"__new__", "__new_member__", "__qualname__"})
"""Attributes that an enumeration has of its own, beside those with names such as `_member_map_`."""


def module_of(name: str) -> types.ModuleType:
    """The module of this name in this process; an empty one if there is none."""
    return sys.modules.setdefault(name, types.ModuleType(name))


# -- the sender -------------------------------------------------------------------------------------------------------


def reduce_class(kind: type) -> tuple[Any, ...]:
    """How to make a class in another process, as pickle's `__reduce__` says it."""
    attributes = {
        name: value
        for name, value in vars(kind).items()
        if name not in _NOT_SENT | MARKS
        and not isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType))
    }
    if isinstance(kind, enum.EnumMeta):
        found: Any = kind.__members__
        members = {name: one.value for name, one in found.items()}
        kept = {
            name: value
            for name, value in attributes.items()
            if name not in _OF_ENUMS and name not in members and not re.fullmatch("_[a-z].*_", name)
        }
        made: tuple[Any, ...] = (_make_enum, (type(kind), kind.__name__, kind.__bases__, kind.__module__, members))
        return *made, kept, None, None, _fill_class
    # What Python looks at while it makes a class; the rest may refer to the class itself.
    early = {name: attributes.pop(name) for name in ("__orig_bases__",) if name in attributes}
    slots = vars(kind).get("__slots__")
    if slots is not None:
        early["__slots__"] = slots if isinstance(slots, str) else tuple(slots)
    attributes["__qualname__"] = kind.__qualname__
    if "__annotations__" not in attributes and (notes := _annotations(kind)):
        attributes["__annotations__"] = notes
    empty = (type(kind), kind.__name__, kind.__bases__, {"__module__": kind.__module__, **early})
    return _make_class, empty, attributes, None, None, _fill_class


def _annotations(kind: type) -> dict[str, Any]:
    """The annotations of a class, which newer Pythons compute when they are asked for."""
    try:
        return dict(kind.__annotations__) if "__annotate__" in vars(kind) or "__annotate_func__" in vars(kind) else {}
    except Exception:
        return {}


def reduce_part(value: Any, find: Callable[[str | None], object]) -> Any:
    """As pickle's `__reduce__`, for what stands in classes and cannot be pickled; NotImplemented for anything else.

    Args:
        find: Whether another process finds a module, by its name.
    """
    if isinstance(value, property):
        return property, (value.fget, value.fset, value.fdel, value.__doc__)
    if isinstance(value, (classmethod, staticmethod)):
        return type(value), (value.__func__,)
    if isinstance(value, functools.cached_property):
        return functools.cached_property, (value.func,)
    if isinstance(value, types.MappingProxyType):
        return _make_proxy, (dict(value),)
    if isinstance(value, typing.ForwardRef):
        return typing.ForwardRef, (value.__forward_arg__,)
    if isinstance(value, type(dataclasses.MISSING)):
        return getattr, (dataclasses, "MISSING")
    if type(value).__module__ == "dataclasses" and getattr(value, "name", "").startswith("_FIELD"):
        return getattr, (dataclasses, value.name)
    if isinstance(value, typing.TypeVar) and find(value.__module__) is None:
        arguments = (
            value.__name__,
            value.__constraints__,
            value.__bound__,
            value.__covariant__,
            value.__contravariant__,
        )
        return _make_type_variable, arguments
    wrapped = getattr(value, "__wrapped__", None)
    if isinstance(value, functools._lru_cache_wrapper) and find(wrapped.__module__) is None:
        how = value.cache_parameters()
        return _make_cached, (wrapped, how["maxsize"], how["typed"])
    return NotImplemented


# -- the reader -------------------------------------------------------------------------------------------------------


def _make_class(kind: Any, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    return types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(body))


def _make_enum(kind: Any, name: str, bases: tuple[type, ...], module: str, members: dict[str, Any]) -> type:
    def fill(space: dict[str, Any]) -> None:
        space["__module__"] = module
        for member, value in members.items():  # before Python 3.11, `update` goes past what this dict watches
            space[member] = value  # noqa: PERF403

    return types.new_class(name, bases, {"metaclass": kind}, fill)


def _fill_class(kind: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(kind, name, value)
        named = getattr(type(value), "__set_name__", None)
        if named is not None:
            named(value, kind, name)
    if "." not in kind.__qualname__:  # so that it can be pickled by its name, as a result of this rank
        vars(module_of(kind.__module__)).setdefault(kind.__name__, kind)


def _make_type_variable(name: str, constraints: Any, bound: Any, covariant: bool, contravariant: bool) -> Any:
    return typing.TypeVar(name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant)


def _make_proxy(values: dict[Any, Any]) -> Any:
    return types.MappingProxyType(values)


def _make_cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)
