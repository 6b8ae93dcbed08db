"""The recipe for accelerate: the same losses as on Gloo, by either launcher."""

from __future__ import annotations

from tests.recipes.clients import PROGRAMS, Client, recipe, said

pytestmark = recipe("accelerate")

PROGRAM = PROGRAMS / "train_accelerate.py"


def results(output: str) -> list[str]:
    return [line for line in said(output) if line.startswith("epoch ")]


def test_losses_are_those_of_gloo(client: Client) -> None:
    launcher = ["torchrun", "--nproc-per-node", "2"]
    stock = client.run(*launcher, PROGRAM)
    assert "2 ranks on ProcessGroup" in stock
    assert len(results(stock)) == 3

    own = client.run("phalanx", "run", "-n", "2", "--as-gloo", PROGRAM)
    assert "2 ranks on PhalanxProcessGroup" in own
    assert results(own) == results(stock)

    launched = client.run(*launcher, PROGRAM, env={"PHALANX_AS_GLOO": "1"})
    assert "2 ranks on PhalanxProcessGroup" in launched
    assert results(launched) == results(stock)
