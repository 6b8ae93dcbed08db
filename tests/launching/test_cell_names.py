"""Which names a cell needs from the notebook."""

from __future__ import annotations

import ast

import pytest

from phalanx.launching.cell_names import assigned_names, needed_names


@pytest.mark.parametrize(
    ("cell", "needed"),
    [
        ("x.data", {"x"}),
        ("lock = 1\nlock + 1", set()),
        ("lock += 1", {"lock"}),
        ("x = x + 1", {"x"}),
        ("with make() as f:\n    f.read()\nf", {"make"}),
        ("for f in files:\n    f.read()\nf", {"files", "f"}),
        ("for f in files:\n    if f:\n        break\n    continue", {"files"}),
        ("if c:\n    x = 1\nx", {"c", "x"}),
        ("if c:\n    x = 1\n    x", {"c"}),
        ("while c:\n    y = x\ny", {"c", "x", "y"}),
        ("try:\n    x = 1\nexcept E as e:\n    e, x\nelse:\n    x\nfinally:\n    x\nx", {"E", "x"}),
        ("match v:\n    case [a, *b]:\n        a, b, c", {"v", "c"}),
        ("[f for f in files]", {"files"}),
        ("f = lambda f: f + g", {"g"}),
        ("def f(a):\n    return a + b + c\nb = 1", {"b", "c"}),
        ("class C:\n    a = 1\n    b = a + c", {"__name__", "a", "c"}),
        ("import numpy as np\nnp.ones(3)", set()),
        ("import a.b\na.b.c", set()),
        ("if (n := len(x)) > 1:\n    n\nn", {"len", "x"}),
        ("del x", set()),
        ("_h(2)", {"_h"}),
        ("def f():\n    global g\n    g = h", {"g", "h"}),
    ],
)
def test_needed_names(cell: str, needed: set[str]) -> None:
    assert needed_names(ast.parse(cell)) == needed


def test_assigned_names() -> None:
    cell = "a = [b for b in c]\nif d:\n    e: int = 1\nfor f, (g, *h) in i: pass\ndef j(k): l = 1\nimport m.n, o as p"
    assert assigned_names(ast.parse(cell)) == {"a", "e", "f", "g", "h", "j", "m", "p"}
