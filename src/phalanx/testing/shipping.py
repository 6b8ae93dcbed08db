"""Functions on their way to another process: by name where they have one there, else by their code.

A function of a module is named by that module (and its file, so that test modules which are not on the path are found,
too). A lambda, a closure or a function of `__main__` travels as its code, with what it closes over; its globals are
those of its module there or, for `__main__`, copies of those that it uses.

This is pickle, and runs code when it is read: only for processes that trust each other, such as parent and child.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from ..errors import UsageError

__all__ = ["dumps", "load_module", "loads", "modules_of"]

Where = tuple[str, "str | None"]
"""A module's name and file."""


def dumps(value: Any) -> bytes:
    """Pickles a value and the functions in it.

    Raises:
        UsageError: Something in it cannot be sent to another process.
    """
    stream = io.BytesIO()
    try:
        _Shipper(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"cannot send the function and its arguments to the ranks: {error} (pass plain data, or use "
            "backend='simulated', whose ranks are threads)"
        ) from error
    return stream.getvalue()


def loads(data: bytes | bytearray) -> Any:
    """Reads a value that `dumps` wrote. Imports the modules of its functions."""
    return pickle.loads(data)  # noqa: S301 - it comes from the process that started this one


def modules_of(fn: Callable[..., Any]) -> list[Where]:
    """The modules that a function needs, so that the fork server can import them ahead of time."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    where = _where(getattr(fn, "__module__", None))
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


def _where(name: str | None) -> Where | None:
    """How another process finds a module; None for `__main__` and for what was typed in."""
    module = sys.modules.get(name or "__main__")
    if module is None or name in (None, "__main__", "__mp_main__"):
        return None
    return module.__name__, getattr(module, "__file__", None)


class _Shipper(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and value.__module__ != __name__:
            return _reduce_function(value)
        if isinstance(value, types.ModuleType):
            where = _where(value.__name__)
            return (load_module, (where,)) if where is not None else NotImplemented
        if isinstance(value, type) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"the class {value.__qualname__} is defined in __main__ (move it into a module)")
        return NotImplemented


def _reduce_function(function: types.FunctionType) -> Any:
    where = _where(function.__module__)
    if where is not None and _resolve(sys.modules[where[0]], function.__qualname__) is function:
        return _find, (where, function.__qualname__)
    code = function.__code__
    names = {} if where is not None else _used_globals(function)
    empty = (where, marshal.dumps(code), function.__name__, len(function.__closure__ or ()))
    state = (
        function.__defaults__,
        function.__kwdefaults__,
        function.__qualname__,
        [_contents(cell) for cell in function.__closure__ or ()],
        names,
    )
    # Filled in a second step, because a function may refer to itself.
    return _empty_function, empty, state, None, None, _fill_function


def _resolve(module: types.ModuleType, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _find(where: Where, qualname: str) -> Any:
    found = _resolve(load_module(where), qualname)
    if found is None:
        raise UsageError(f"the rank's process finds no {qualname} in the module {where[0]}")
    return found


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not yet bound
        return ()


def _used_globals(function: types.FunctionType) -> dict[str, Any]:
    waiting = [function.__code__]
    names: set[str] = set()
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}


def _empty_function(where: Where | None, code: bytes, name: str, cells: int) -> types.FunctionType:
    namespace = (
        vars(load_module(where)) if where is not None else {"__builtins__": __builtins__, "__name__": "__main__"}
    )
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(marshal.loads(code), namespace, name, None, closure)  # noqa: S302 - see loads


def _fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    function.__defaults__, function.__kwdefaults__, function.__qualname__, cells, names = state
    for cell, contents in zip(function.__closure__ or (), cells, strict=True):
        if contents:
            cell.cell_contents = contents[0]
    function.__globals__.update(names)
