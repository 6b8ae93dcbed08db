"""Docstrings begin with the thing that they describe, or with what it does."""

from __future__ import annotations

import ast

from tests.imports import Source, sources

RIDDLES = ("What", "Who", "Whoever", "Nobody")


def openings(source: Source) -> list[str]:
    """The docstrings of a module, its classes, functions and attributes that begin with a riddle."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, *_ = node.value.value.split() or [""]
            if first in RIDDLES:
                found.append(f"{source.path}:{node.lineno}: {node.value.value.strip().splitlines()[0]}")
    return found


def test_a_docstring_begins_with_the_thing() -> None:
    found = [text for source in sources() for text in openings(source)]
    assert not found, "\n".join(found)
