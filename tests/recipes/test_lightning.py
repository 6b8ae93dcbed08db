"""The recipe for PyTorch Lightning: the same losses as on Gloo, whoever starts the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.recipes.clients import PROGRAMS, Client, recipe, said

pytestmark = recipe("lightning", "torchmetrics")

PROGRAM = PROGRAMS / "train_lightning.py"
STARTED = {
    "phalanx run": ["phalanx", "run", "-n", "2", PROGRAM],
    "torchrun": ["torchrun", "--nproc-per-node", "2", PROGRAM],
    "Lightning": ["python", PROGRAM],
}


@pytest.fixture(scope="module")
def on_gloo() -> list[list[str]]:
    """What it says on Gloo, once that is known."""
    return []


@pytest.mark.parametrize("command", STARTED.values(), ids=STARTED)
def test_losses_are_those_of_gloo(client: Client, command: list[str | Path], on_gloo: list[list[str]]) -> None:
    output = client.run(*command)
    assert "2 ranks on PhalanxProcessGroup" in output
    if not on_gloo:
        stock = client.run("python", client.changed(PROGRAM.name, '"phalanx"', '"gloo"'))
        assert "2 ranks on ProcessGroup" in stock
        on_gloo.append(results(stock))
    assert results(output) == on_gloo[0] != []


def results(output: str) -> list[str]:
    return [line for line in said(output) if line.startswith("loss ")]
