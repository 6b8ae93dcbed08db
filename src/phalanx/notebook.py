"""Cells of a notebook that run on several ranks: `%load_ext phalanx.notebook`, then `%%ranks 4` on top of a cell.

Each rank runs the cell in a process of its own, with `world` (the group of all of them), `px` and whatever the cell
uses of the notebook's own variables and functions, as copies. Output appears as it comes, with the rank in front of
each line. The value of the last line comes back from all ranks, as a list.
"""

from __future__ import annotations

import argparse
import ast
import shlex
from collections.abc import Callable, Collection, Mapping
from types import CodeType, ModuleType
from typing import Any

from .errors import PhalanxError, RankFailed, UsageError
from .launching.cell_names import assigned_names, needed_names
from .launching.launch import launch
from .launching.shipping import dumps

__all__ = ["load_ipython_extension", "run_cell"]

NAME = "<cell of %%ranks>"
OWN = frozenset({"world", "px", "__name__"})
"""Names that each rank has of its own, whatever the notebook calls so."""


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython for `%load_ext phalanx.notebook`."""

    def ranks(line: str, cell: str) -> list[Any] | None:
        return run_cell(line, cell, shell.user_ns)

    shell.register_magic_function(ranks, "cell", "ranks")


def run_cell(line: str, cell: str, namespace: Mapping[str, Any]) -> list[Any] | None:
    """Runs a cell on ranks; returns the values of its last line, or None if that is no expression.

    Args:
        line: What stands behind `%%ranks`: the number of ranks, and `--timeout SECONDS`.
        cell: The code.
        namespace: The notebook's variables.

    Raises:
        RankFailed: A rank failed; shown as the launcher shows it, with that rank's traceback alone.
        UsageError: The line is not valid.
        SyntaxError: The code is not.
    """
    try:
        count, timeout = _options(line)
        return _run(count, timeout, cell, namespace)
    except PhalanxError as error:
        # IPython asks for it; it would show Phalanx's own lines.
        text = str(error) if isinstance(error, RankFailed) else f"{type(error).__name__}: {error}"
        show: Callable[[], list[str]] = lambda: [text]  # noqa: E731
        error._render_traceback_ = show  # type: ignore[attr-defined]
        raise error from None


def _run(count: int, timeout: float | None, cell: str, namespace: Mapping[str, Any]) -> list[Any] | None:
    _, value = _compiled(cell)
    tree = ast.parse(cell, NAME)
    used = {name: namespace[name] for name in needed_names(tree) - OWN if name in namespace}
    modules = {name: used.pop(name).__name__ for name in list(used) if isinstance(used[name], ModuleType)}
    code = (cell, value is not None)
    try:
        results = launch(_on_rank, count, code, used, modules, timeout=timeout)
    except RankFailed:
        raise
    except UsageError:
        copied = _copyable(used, assigned_names(tree))
        if len(copied) == len(used):
            raise
        results = launch(_on_rank, count, code, copied, modules, timeout=timeout)
    return results if value is not None else None


def _copyable(used: Mapping[str, Any], assigned: Collection[str]) -> dict[str, Any]:
    """The variables that can be copied to the ranks, without those that the cell may want to make itself.

    Raises:
        UsageError: One cannot be copied, and the cell needs it.
    """
    copied = {}
    for name, value in used.items():
        try:
            dumps(value)
        except UsageError as error:
            if name not in assigned:
                why = f"cannot copy the notebook's {name!r} to the ranks: {error.__cause__}"
                raise UsageError(f"%%ranks: {why} (make it in the cell)") from None
        else:
            copied[name] = value
    return copied


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"%%ranks: {message} (expected `%%ranks 4` or `%%ranks 4 --timeout 60`)")


def _options(line: str) -> tuple[int, float | None]:
    parser = _Parser(prog="%%ranks", add_help=False)
    parser.add_argument("count", type=int)
    parser.add_argument("--timeout", type=float)
    found = parser.parse_args(shlex.split(line))
    return found.count, found.timeout


def _compiled(cell: str) -> tuple[CodeType, CodeType | None]:
    """The code of a cell, and that of its last line if it is an expression."""
    tree = ast.parse(cell, NAME)
    value = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body.pop()
        assert isinstance(last, ast.Expr)
        value = compile(ast.Expression(last.value), NAME, "eval")
    return compile(tree, NAME, "exec"), value


def _on_rank(code: tuple[str, bool], used: dict[str, Any], modules: dict[str, str]) -> Any:
    """In the process of a rank."""
    import importlib
    import linecache

    import phalanx

    cell, has_value = code
    # So that a traceback shows the lines of the cell.
    linecache.cache[NAME] = (len(cell), None, cell.splitlines(keepends=True), NAME)
    body, value = _compiled(cell)
    imported = {name: importlib.import_module(module) for name, module in modules.items()}
    with phalanx.init() as world:
        scope = {**used, **imported, "px": phalanx, "world": world, "__name__": "__main__"}
        exec(body, scope)  # noqa: S102  # the user's own cell
        return eval(value, scope) if value is not None and has_value else None  # noqa: S307  # the same
