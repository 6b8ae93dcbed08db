"""Cells of a notebook that run on ranks; without a notebook, as the magic calls it, and under IPython where it is."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.notebook import load_ipython_extension, run_cell


def double(x: float) -> float:
    return 2 * x


def test_values_come_back_from_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    cell = """
x = np.full(2, float(world.rank + 1))
print("before", x[0])
world.all_reduce(x)
double(scale * x[0])
"""
    assert run_cell("2", cell, {"np": np, "scale": 10.0, "double": double, "unused": open}) == [60.0, 60.0]
    out = capfd.readouterr().out
    assert "[0] before 1.0" in out
    assert "[1] before 2.0" in out


def test_a_cell_without_a_value() -> None:
    assert run_cell("2 --timeout 60", "y = world.rank", {}) is None


def test_an_error_is_that_of_the_rank() -> None:
    with pytest.raises(px.RankFailed) as caught:
        run_cell("2", "if world.rank == 1:\n    raise ValueError('no such thing')\nworld.barrier()", {})
    [shown] = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert "rank 1" in shown
    assert "ValueError: no such thing" in shown
    assert "raise ValueError('no such thing')" in shown, "the line of the cell"


@pytest.mark.parametrize("line", ["", "four", "2 --what", "2 3"])
def test_a_wrong_line(line: str) -> None:
    with pytest.raises(px.UsageError, match="expected `%%ranks 4`"):
        run_cell(line, "1", {})


def test_the_notebooks_own_world_stays_there() -> None:
    with px.init() as world:
        assert run_cell("2", "world.world_size", {"world": world, "px": 5}) == [2, 2]


def test_what_cannot_be_copied_is_missed_only_where_it_is_used() -> None:
    lock = threading.Lock()
    assert run_cell("1", "d = type('D', (), {})\nd.lock = 2\nd.lock", {"lock": lock}) == [2]
    assert run_cell("1", "if world.rank == 0:\n    lock = 1\nlock", {"lock": lock}) == [1]
    assert run_cell("1", "_h(2)", {"_h": double}) == [4]
    with pytest.raises(px.UsageError) as caught:
        run_cell("1", "x = 1\nlock.locked()", {"lock": lock})
    assert str(caught.value).startswith("%%ranks: cannot copy the notebook's 'lock' to the ranks: cannot pickle")
    [shown] = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert shown == f"UsageError: {caught.value}"


def test_the_magic() -> None:
    class Shell:
        def __init__(self) -> None:
            self.user_ns: dict[str, Any] = {"base": 5}

        def register_magic_function(self, function: Any, kind: str, name: str) -> None:
            self.registered = (kind, name)
            self.call = function

    shell = Shell()
    load_ipython_extension(shell)
    assert shell.registered == ("cell", "ranks")
    assert shell.call("2", "base + world.rank") == [5, 6]


def test_under_ipython() -> None:
    testing = pytest.importorskip("IPython.testing.globalipapp")
    shell = testing.get_ipython() or testing.start_ipython()
    shell.run_line_magic("load_ext", "phalanx.notebook")
    assert shell.run_cell_magic("ranks", "2", "world.world_size") == [2, 2]
