"""The recipes that need torch alone: the same losses as on Gloo. They are quick, so `make test` runs them, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.launchers.starting import needs_torch
from tests.recipes.clients import PROGRAMS, Client, said

import phalanx as px

pytestmark = [needs_torch, pytest.mark.timeout(300)]


NUMBER = re.compile(r"\d+\.\d+")


def both(client: Client, ranks: int, program: str, *options: str) -> list[str]:
    """What a program says on Phalanx; on Gloo it says the same, but for the last digits among more than two ranks."""
    command = ["phalanx", "run", "-n", str(ranks), PROGRAMS / program, *options]
    own, stock = (client.run(*command, "--backend", backend) for backend in ("phalanx", "gloo"))
    losses = [[float(number) for number in NUMBER.findall(output)] for output in (own, stock)]
    assert losses[0] == (losses[1] if ranks == 2 else pytest.approx(losses[1], rel=1e-5))
    assert [NUMBER.sub("", line) for line in said(own)] == [NUMBER.sub("", line) for line in said(stock)]
    return said(own)


@pytest.mark.parametrize(("ranks", "options"), [(2, []), (4, ["--replicas", "2"])], ids=["FSDP2", "HSDP"])
def test_sharded(client: Client, ranks: int, options: list[str]) -> None:
    words = both(client, ranks, "torch_fsdp2.py", *options)
    assert len(words) == 6
    assert words[-1] == "this rank has 2145 of 4257 parameters"


def test_tensor_parallel(client: Client) -> None:
    words = both(client, 2, "torch_tp.py")
    assert len(words) == 6
    assert words[-1] == "this rank has (32, 16) of (64, 16)"


def test_pipelining(client: Client) -> None:
    assert len(both(client, 2, "torch_pipelining.py")) == 5


def test_checkpoints(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    program = PROGRAMS / "torch_dcp.py"
    (saved,) = said(client.run("phalanx", "run", "-n", "4", program, "save", str(folder)))
    (loaded,) = said(client.run("phalanx", "run", "-n", "2", program, "load", str(folder)))
    assert saved.removeprefix("save") == loaded.removeprefix("load")
    px.checkpoint.import_dcp(folder, tmp_path / "ours")
    found = px.checkpoint.load(tmp_path / "ours")
    assert tuple(found["model"]["0.weight"].shape) == (32, 16)
