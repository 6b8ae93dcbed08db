"""The recipe for JAX."""

from __future__ import annotations

from tests.recipes.clients import PROGRAMS, ROOT, Client, recipe, said

pytestmark = recipe("jax")


def test_training(client: Client) -> None:
    output = said(client.run("phalanx", "run", "-n", "2", ROOT / "examples" / "train_jax.py"))
    assert output[-1] == "replicas identical: yes"


def test_a_collective_inside_jit(client: Client) -> None:
    output = said(client.run("phalanx", "run", "-n", "2", PROGRAMS / "jax_in_jit.py"))
    assert sorted(output) == ["rank 0: [1. 2. 3.]", "rank 1: [1. 2. 3.]"]
