"""`launch` in cells of a notebook, run by Jupyter's own client. `make test-notebook` installs what it needs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

# What Jupyter's packages warn of is not ours.
pytestmark = pytest.mark.filterwarnings("default")

DEFINE = """
import os
import numpy as np
import phalanx as px

SCALE = 10

class Model:
    def __init__(self, start):
        self.start = start

    def step(self, world):
        return float(world.all_reduce(np.full(1, self.start + world.rank))[0]) * SCALE
"""
TRAIN = """
def train(start):
    with px.init() as world:
        print("training on", world.rank)
        return Model(start).step(world)

px.launch(train, 2, 1)
"""
BROKEN = """
def broken():
    world = px.init()
    if world.rank == 1:
        raise ValueError("no data")
    world.barrier()

px.launch(broken, 3)
"""
AGAIN = "SCALE = 100\npx.launch(train, 2, 1)"
HANGS = """
def hangs(folder):
    world = px.init()
    open(f"{folder}/{world.rank}", "w").write(str(os.getpid()))
    import time
    time.sleep(100)

px.launch(hangs, 2, FOLDER)
"""


def text_of(cell: Any, name: str) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.get("name") == name)


def result_of(cell: Any) -> str:
    return "".join(output["data"]["text/plain"] for output in cell.outputs if output.output_type == "execute_result")


def notebook(*sources: str) -> Any:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_cells_launch_ranks() -> None:
    made = notebook(DEFINE, TRAIN, BROKEN, AGAIN)
    nbclient.NotebookClient(made, timeout=60, allow_errors=True).execute()
    _, train, broken, again = made.cells
    assert result_of(train) == "[30.0, 30.0]"
    assert sorted(text_of(train, "stdout").splitlines()) == ["[0] training on 0", "[1] training on 1"]
    (error,) = [output for output in broken.outputs if output.output_type == "error"]
    assert error.ename == "RankFailed_ValueError"
    assert error.evalue.startswith("rank 1 failed: ValueError: no data\n2 ranks ended because of it\n")
    assert 'raise ValueError("no data")' in error.evalue, "the line of the cell is not on disk, but it is shown"
    assert "running_ranks.py" not in "".join(error.traceback)
    assert result_of(again) == "[300.0, 300.0]"


def test_the_stop_button_ends_the_ranks(tmp_path: Path) -> None:
    made = notebook(DEFINE, HANGS.replace("FOLDER", repr(str(tmp_path))))
    # As the button does: the kernel is interrupted when the time of a cell is over.
    client = nbclient.NotebookClient(made, timeout=10, interrupt_on_timeout=True, allow_errors=True)
    client.execute()
    assert [output.ename for output in made.cells[1].outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    limit = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
