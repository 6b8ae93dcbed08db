"""The names that code needs from outside: what it reads before it has surely made it itself."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .code_names import global_names

__all__ = ["assigned_names", "needed_names"]


def needed_names(tree: ast.Module) -> set[str]:
    """The global names that a program reads, except for those that were bound before on every way there.

    Attributes are none of them, nor are the variables of functions and comprehensions.
    """
    found: set[str] = set()
    _read_block(tree.body, set(), found)
    return found


def assigned_names(tree: ast.Module) -> set[str]:
    """The names that a program binds somewhere outside its functions, and maybe only sometimes."""
    return _bound(tree.body)


def _read_block(statements: Iterable[ast.stmt], bound: set[str], found: set[str]) -> None:
    """Follows statements in their order, and adds to `bound` what is surely bound after them."""
    for statement in statements:
        _read_statement(statement, bound, found)


def _read_statement(statement: ast.stmt, bound: set[str], found: set[str]) -> None:
    match statement:
        case ast.With():
            for item in statement.items:
                found |= _read(item.context_expr) - bound
                bound |= _bound([item])
            _read_block(statement.body, bound, found)
        case ast.For():
            found |= _read(statement.iter) - bound
            _read_block(statement.body, bound | _bound([statement.target]), found)
            _read_block(statement.orelse, set(bound), found)
        case ast.If() | ast.While():
            found |= _read(statement.test) - bound
            bound |= _bound([statement.test])
            _read_block(statement.body, set(bound), found)
            _read_block(statement.orelse, set(bound), found)
        case ast.Match():
            found |= _read(statement.subject) - bound
            for case in statement.cases:
                inside = bound | _bound([case.pattern])
                if case.guard is not None:
                    found |= _read(case.guard) - inside
                _read_block(case.body, inside, found)
        case ast.Try():
            inside, before = set(bound), set(bound)
            _read_block(statement.body, inside, found)
            _read_block(statement.orelse, inside, found)
            for handler in statement.handlers:
                if handler.type is not None:
                    found |= _read(handler.type) - before
                _read_block(handler.body, before | {handler.name or ""}, found)
            _read_block(statement.finalbody, bound, found)
        case ast.Break() | ast.Continue():
            pass
        case _:
            found |= _read(statement) - bound
            bound |= _bound([statement])


def _read(node: ast.stmt | ast.expr) -> set[str]:
    body = node if isinstance(node, ast.stmt) else ast.copy_location(ast.Expr(node), node)
    return global_names(compile(ast.Module([body], []), "<cell>", "exec"))


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are bound in these, but not inside functions, classes and comprehensions."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.alias():
                found.add(node.asname or node.name.partition(".")[0])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
                continue
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                continue
        waiting += ast.iter_child_nodes(node)
    return found
