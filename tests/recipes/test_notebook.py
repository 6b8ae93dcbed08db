"""The recipe for notebooks: its cells, run by Jupyter's own client."""

from __future__ import annotations

from typing import Any

from tests.recipes.clients import PROGRAMS, recipe

pytestmark = recipe("nbclient", "ipykernel", "torch")


def test_the_cells_run() -> None:
    import nbclient
    import nbformat

    _, *cells = (PROGRAMS / "notebook.py").read_text(encoding="utf-8").split("# %%")
    made: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("#" + cell) for cell in cells])
    nbclient.NotebookClient(made, timeout=200, allow_errors=True).execute()
    _, define, launch, fails = made.cells
    assert define.outputs == []
    printed = "".join(output.text for output in launch.outputs if output.output_type == "stream")
    assert sorted(line.partition(":")[0] for line in printed.splitlines()) == ["[0] rank 0", "[1] rank 1"]
    (result,) = [output for output in launch.outputs if output.output_type == "execute_result"]
    assert result.data["text/plain"] == "[[1.0, -2.0, 3.0, 0.5]]"
    (error,) = [output for output in fails.outputs if output.output_type == "error"]
    assert error.ename == "RankFailed_TypeError"
    assert "for _ in range(steps):" in error.evalue
