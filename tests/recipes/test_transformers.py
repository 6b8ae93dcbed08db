"""The recipe for transformers: the same losses as on Gloo, and what it says to the name of Phalanx."""

from __future__ import annotations

from tests.recipes.clients import PROGRAMS, Client, recipe, said

pytestmark = recipe("transformers", "accelerate")

PROGRAM = PROGRAMS / "train_transformers.py"


def results(output: str) -> list[str]:
    return [line for line in said(output) if line.startswith("losses ")]


def test_losses_are_those_of_gloo(client: Client) -> None:
    stock = client.run("phalanx", "run", "-n", "2", PROGRAM)
    assert "2 ranks on ProcessGroup" in stock

    own = client.run("phalanx", "run", "-n", "2", "--as-gloo", PROGRAM)
    assert "2 ranks on PhalanxProcessGroup" in own
    assert results(own) == results(stock) != []

    launched = client.run("torchrun", "--nproc-per-node", "2", PROGRAM, env={"PHALANX_AS_GLOO": "1"})
    assert "2 ranks on PhalanxProcessGroup" in launched
    assert results(launched) == results(stock)


def test_the_name_of_phalanx_is_refused(client: Client) -> None:
    """By accelerate, on which transformers stands. If this fails, the recipes can be shorter."""
    program = client.changed(PROGRAM.name, 'ddp_backend="gloo"', 'ddp_backend="phalanx"')
    said = client.run("phalanx", "run", "-n", "2", program, fails=True)
    assert "Your assigned backend phalanx is not available, please use gloo" in said
