"""Functions on their way to another process: by name where they have one there, else by their code.

A function or class of a module is named by that module (and its file, so that test modules which are not on the path
are found, too). A lambda, a closure, and what was defined in `__main__` (a script, a notebook) travels as its code,
with the values that it uses. All functions that share their globals here share copies of them there.

This is pickle, and runs code when it is read: only for processes that trust each other, such as parent and child.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import linecache
import marshal
import os
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from ..errors import UsageError
from . import class_shipping
from .code_names import global_names

__all__ = ["Shipped", "dumps", "fresh_main", "load_module", "loads", "modules_of"]

Where = tuple[str, "str | None"]
"""A module's name and file."""
_MAIN = frozenset({"__main__", "__mp_main__"})
_OWN = frozenset({__name__, class_shipping.__name__})
"""Modules whose functions read what was sent: they are there already."""


class Shipped(NamedTuple):
    """A pickled value, and what its reader will import."""

    data: bytes
    modules: list[Where]
    """Installed modules: they do not change while this process runs, so they may be imported ahead of time."""


def dumps(value: Any, *, by_value: Collection[str] = (), hint: str = "pass plain data") -> Shipped:
    """Pickles a value and the functions in it.

    Args:
        by_value: More modules that are treated as `__main__` is.
        hint: What to do about a value that cannot be sent.

    Raises:
        UsageError: Something in it cannot be sent to another process.
    """
    stream = io.BytesIO()
    shipper = _Shipper(stream, by_value)
    try:
        shipper.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        what = shipper.culprit() or "the function and its arguments"
        raise UsageError(f"cannot send {what} to the ranks: {error} ({hint})") from error
    return Shipped(stream.getvalue(), shipper.installed())


def loads(data: bytes | bytearray) -> Any:
    """Reads a value that `dumps` wrote. Imports the modules of its functions."""
    return pickle.loads(data)  # noqa: S301 - it comes from the process that started this one


def fresh_main() -> None:
    """Gives this process a new `__main__`, which functions from another's can fill."""
    sys.modules["__main__"] = types.ModuleType("__main__")


def modules_of(fn: Callable[..., Any]) -> list[Where]:
    """The module that a function comes from, so that the fork server can import it ahead of time."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    where = _where(getattr(fn, "__module__", None), ())
    return [where] if where is not None else []


def load_module(where: Where) -> types.ModuleType:
    """Imports a module by name, or from its file where the name leads elsewhere or nowhere."""
    name, file = where
    if name in sys.modules:
        return sys.modules[name]
    try:
        module = importlib.import_module(name)
    except ImportError:
        if file is None:
            raise
    else:
        if file is None or getattr(module, "__file__", None) == file:
            return module
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _where(name: str | None, by_value: Collection[str]) -> Where | None:
    """How another process finds a module; None for `__main__` and for what was typed in."""
    module = sys.modules.get(name or "__main__")
    if module is None or name is None or name in _MAIN or name in by_value:
        return None
    return module.__name__, getattr(module, "__file__", None)


def _is_installed(file: str | None) -> bool:
    return file is None or file.startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")}
    return tuple(os.path.join(folder, "") for folder in folders)


# -- the sender -------------------------------------------------------------------------------------------------------


class _Namespace:
    """The globals that some functions share, on their way."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Source:
    """The text of a file that is not on disk, such as a cell of a notebook, for tracebacks."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file = file
        self.lines = lines


class _Shipper(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, by_value: Collection[str]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._by_value = by_value
        self._namespaces: dict[int, _Namespace] = {}
        self._sources: dict[str, _Source | None] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._sent: list[tuple[str, dict[str, Any]]] = []
        """The functions and classes that travel as their code, with what they use: for `culprit`."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return NotImplemented if value.__module__ in _OWN else self._function(value)
        if isinstance(value, types.ModuleType):
            where = self._find(value.__name__)
            return NotImplemented if where is None else (load_module, (where,))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, _Namespace):
            return _open_namespace, (value.name,)
        if isinstance(value, _Source):
            return _remember_source, (value.file, value.lines)
        return class_shipping.reduce_part(value, self._find)

    def _find(self, name: str | None) -> Where | None:
        """How the reader finds a module, which is noted."""
        where = _where(name, self._by_value)
        if where is not None:
            self._modules[where[0]] = sys.modules[where[0]]
        return where

    def _function(self, function: types.FunctionType) -> Any:
        where = self._find(function.__module__)
        if where is not None and _resolve(sys.modules[where[0]], function.__qualname__) is function:
            return _named, (where, function.__qualname__)
        # `functools.wraps` makes it say that it comes from another module than it does.
        space = function.__globals__
        where = self._find(space.get("__name__"))
        if where is not None and vars(sys.modules[where[0]]) is not space:
            where = None
        names = {} if where is not None else _used_globals(function)
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        used = dict(zip(function.__code__.co_freevars, (cell[0] for cell in cells if cell), strict=False))
        self._sent.append((function.__qualname__, names | used))
        home: Any = where if where is not None else self._namespace(function)
        empty = (home, marshal.dumps(function.__code__), function.__name__, len(cells))
        state = {
            "attributes": _attributes(function),
            "cells": cells,
            "names": names,
            "source": self._source(function.__code__.co_filename),
        }
        # Filled in a second step, because a function may refer to itself.
        return _empty_function, empty, state, None, None, _fill_function

    def _class(self, kind: type) -> Any:
        where = self._find(kind.__module__)
        local = "<locals>" in kind.__qualname__
        if where is not None and (not local or _resolve(sys.modules[where[0]], kind.__qualname__) is kind):
            return NotImplemented  # pickle finds it by its name
        reduced = class_shipping.reduce_class(kind)
        self._sent.append((kind.__qualname__, dict(reduced[2])))
        return reduced

    def _namespace(self, function: types.FunctionType) -> _Namespace:
        space = function.__globals__
        return self._namespaces.setdefault(id(space), _Namespace(str(space.get("__name__", "__main__"))))

    def _source(self, file: str) -> _Source | None:
        if file not in self._sources:
            lines = [] if os.path.exists(file) else linecache.getlines(file)
            self._sources[file] = _Source(file, lines) if lines else None
        return self._sources[file]

    def culprit(self) -> str | None:
        """The value that cannot be sent, in words, once a dump has failed; None if it is not known."""
        for name, used in reversed(self._sent):
            for word, value in used.items():
                try:
                    _Shipper(io.BytesIO(), self._by_value).dump(value)
                except Exception:
                    return f"{word!r}, which {name} uses,"
        return None

    def installed(self) -> list[Where]:
        """The installed modules among those that were met, and among those that the others have imported."""
        found: dict[str, str | None] = {}
        for module in self._modules.values():
            parts = [module]
            if not _is_installed(getattr(module, "__file__", None)):
                parts = [part for part in vars(module).values() if isinstance(part, types.ModuleType)]
            for part in parts:
                file = getattr(part, "__file__", None)
                if _is_installed(file) and sys.modules.get(part.__name__) is part:
                    found[part.__name__] = file
        return sorted(found.items())


def _resolve(module: types.ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not yet bound
        return ()


def _used_globals(function: types.FunctionType) -> dict[str, Any]:
    names = global_names(function.__code__)
    return {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}


def _attributes(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__qualname__": function.__qualname__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
    }
    try:
        notes = function.__annotations__
        pickle.dumps(notes)  # what cannot be sent by its name is only missed by those who look at annotations
        found["__annotations__"] = notes
    except Exception:
        pass
    return found | {name: value for name, value in vars(function).items() if name not in class_shipping.MARKS}


# -- the reader -------------------------------------------------------------------------------------------------------


def _named(where: Where, qualname: str) -> Any:
    found = _resolve(load_module(where), qualname)
    if found is None:
        raise UsageError(f"the rank's process finds no {qualname} in the module {where[0]}")
    return found


def _open_namespace(name: str) -> dict[str, Any]:
    """The globals of a module that came here by value."""
    return vars(class_shipping.module_of(name))


def _remember_source(file: str, lines: list[str]) -> str:
    # Without a time of change, nobody looks whether the file has changed.
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return file


def _empty_function(home: Where | dict[str, Any], code: bytes, name: str, cells: int) -> types.FunctionType:
    space = home if isinstance(home, dict) else vars(load_module(home))
    space.setdefault("__builtins__", __builtins__)
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(marshal.loads(code), space, name, None, closure)  # noqa: S302 - see loads


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    _set_all(function, state["attributes"].items())
    for cell, contents in zip(function.__closure__ or (), state["cells"], strict=True):
        if contents:
            cell.cell_contents = contents[0]
    function.__globals__.update(state["names"])


def _set_all(thing: Any, attributes: Iterable[tuple[str, Any]]) -> None:
    for name, value in attributes:
        setattr(thing, name, value)
