"""The recipe for PyTorch Lightning: the same losses as on Gloo, whoever starts the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.launchers.processes import Jobs
from tests.recipes.clients import PROGRAMS, Client, recipe, said

pytestmark = recipe("lightning", "torchmetrics")

PROGRAM = PROGRAMS / "train_lightning.py"
STARTED = {
    "phalanx run": ["phalanx", "run", "-n", "2", PROGRAM],
    "torchrun": ["torchrun", "--nproc-per-node", "2", PROGRAM],
    "Lightning": ["python", PROGRAM],
}


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The results of the same program on Gloo."""
    jobs = Jobs(tmp_path_factory.mktemp("gloo"))
    try:
        client = Client(jobs)
        output = client.run("python", client.changed(PROGRAM.name, '"phalanx"', '"gloo"'))
    finally:
        jobs.clean_up()
    assert "2 ranks on ProcessGroup" in output
    assert len(results(output)) == 1
    return results(output)


@pytest.mark.parametrize("command", STARTED.values(), ids=STARTED)
def test_losses_are_those_of_gloo(client: Client, command: list[str | Path], on_gloo: list[str]) -> None:
    output = client.run(*command)
    assert "2 ranks on PhalanxProcessGroup" in output
    assert results(output) == on_gloo


def test_a_program_that_does_not_know_phalanx(client: Client, on_gloo: list[str]) -> None:
    unchanged = client.changed(PROGRAM.name, 'DDPStrategy(process_group_backend="phalanx")', '"ddp"')
    output = client.run("phalanx", "run", "-n", "2", "--as-gloo", unchanged)
    assert "2 ranks on PhalanxProcessGroup" in output
    assert results(output) == on_gloo


def results(output: str) -> list[str]:
    return [line for line in said(output) if line.startswith("loss ")]
