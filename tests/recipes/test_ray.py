"""The recipes for Ray: Ray Train gives the losses of Gloo, and actors form a world."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.recipes.clients import PROGRAMS, Client, recipe, said

pytestmark = recipe("ray")


@pytest.fixture
def quiet() -> Iterator[dict[str, str]]:
    """A folder for Ray with a short name, since it holds sockets; and no reports to its makers."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def test_ray_train_gives_the_losses_of_gloo(client: Client, quiet: dict[str, str]) -> None:
    own = client.run("python", PROGRAMS / "ray_train.py", env=quiet)
    assert "2 ranks on PhalanxProcessGroup" in own
    stock = client.run("python", client.changed("ray_train.py", '"phalanx"', '"gloo"'), env=quiet)
    assert "2 ranks on ProcessGroup" in stock
    results = [line for line in said(stock) if line.startswith("epoch 2: loss ")]
    assert len(results) == 1
    assert results[0] in said(own)


def test_actors_form_a_world(client: Client, quiet: dict[str, str]) -> None:
    output = said(client.run("python", PROGRAMS / "ray_actors.py", env=quiet))
    assert [line for line in output if line.startswith("step ")] == [
        "step 0: [1.0, 1.0, 1.0]",
        "step 1: [11.0, 11.0, 11.0]",
        "step 2: [21.0, 21.0, 21.0]",
    ]


def test_an_actor_that_dies_is_an_error_of_the_others(client: Client, quiet: dict[str, str]) -> None:
    output = said(client.run("python", Path(__file__).with_name("programs") / "lost_actor.py", env=quiet))
    assert [line for line in output if line.startswith("actor ")] == [
        "actor 0 has lost rank 2",
        "actor 1 has lost rank 2",
    ]
