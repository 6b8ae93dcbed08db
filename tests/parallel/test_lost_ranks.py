"""A rank that is killed in the middle of training or of a checkpoint: all others hear of it at once, with their line.

Pipelines have such tests of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.lateness import bound
from torch import nn

import phalanx as px
from phalanx.checkpoint import loading, saving
from phalanx.parallel.fsdp import units
from phalanx.testing import Died, run_ranks
from phalanx.testing.faults import kill_self

VICTIM, RANKS = 1, 4
Die = Callable[..., None]


class Fuse(nn.Module):
    """Calls something in its forward, or in its backward."""

    def __init__(self, forward: Die | None = None, backward: Die | None = None) -> None:
        super().__init__()
        self.in_forward, self.in_backward = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward is not None:
            self.in_forward()
        output = x * 1
        if self.in_backward is not None:
            output.register_hook(self.in_backward)
        return output


def layers(**fuse: Die) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], Fuse(**fuse), *[nn.Linear(8, 8) for _ in range(3)])


def ddp(world: px.Group, die: Die, _folder: Path) -> None:
    model = px.parallel.DDP(layers(backward=die), world)
    model(torch.ones(2, 8)).sum().backward()


def fsdp(world: px.Group, die: Die, _folder: Path) -> None:
    model = px.parallel.FSDP(layers(backward=die), world)
    model(torch.ones(2, 8)).sum().backward()


def fsdp_that_gathers(world: px.Group, die: Die, _folder: Path) -> None:
    units.share_memory = lambda *_: None  # type: ignore[assignment]
    model = px.parallel.FSDP(layers(forward=die), world)
    model(torch.ones(2, 8)).sum().backward()


def batch_norm(world: px.Group, die: Die, _folder: Path) -> None:
    norms = [px.parallel.SyncBatchNorm(8, world) for _ in range(2)]
    nn.Sequential(norms[0], Fuse(die), norms[1])(torch.randn(4, 8))


def batch_norm_backward(world: px.Group, die: Die, _folder: Path) -> None:
    norms = [px.parallel.SyncBatchNorm(8, world) for _ in range(2)]
    nn.Sequential(norms[0], Fuse(backward=die), norms[1])(torch.randn(4, 8)).sum().backward()


def die_in_a_save(die: Die) -> None:
    new_file = saving.NewFile

    def dying(*arguments: Any) -> Any:
        made = new_file(*arguments)
        die()
        return made

    saving.NewFile = dying  # type: ignore[assignment,misc]


def save(world: px.Group, die: Die, folder: Path) -> None:
    die_in_a_save(die)
    px.checkpoint.save(folder / "b", {"x": px.checkpoint.Shard.along(np.ones(3), world)}, world)


def save_beside(world: px.Group, die: Die, folder: Path) -> None:
    die_in_a_save(die)
    part = px.checkpoint.Shard.along(np.ones(3), world)
    px.checkpoint.save_async(folder / "b", {"x": part}, world).wait()


def load(world: px.Group, die: Die, folder: Path) -> None:
    read = loading.read_region

    def dying(*arguments: Any, **options: Any) -> Any:
        die()
        return read(*arguments, **options)

    loading.read_region = dying
    px.checkpoint.load(folder / "a", world)


@pytest.mark.parametrize(
    "piece", [ddp, fsdp, fsdp_that_gathers, batch_norm, batch_norm_backward, save, save_beside, load]
)
def test_all_others_hear_of_it_with_their_line(piece: Any, tmp_path: Path) -> None:
    px.checkpoint.save(tmp_path / "a", {"x": np.ones(3)})

    def body(world: px.Group) -> Any:
        torch.set_num_threads(1)
        world.barrier()

        def die(*_: Any) -> None:
            if world.rank == VICTIM:
                (tmp_path / "died").write_text(str(time.monotonic()))
                kill_self()

        with pytest.raises(px.PeerLost) as caught:
            piece(world, die, tmp_path)
        return caught.value.peer, str(caught.value), time.monotonic()

    results = run_ranks(RANKS, body, backend="mesh", may_die=[VICTIM])
    died = float((tmp_path / "died").read_text())
    assert isinstance(results[VICTIM], Died)
    for rank, result in enumerate(results):
        if rank != VICTIM:
            peer, words, ended = result
            assert peer == VICTIM
            assert f"{Path(__file__).name}:" in words, "the user's line is missing"
            assert ended - died < bound(1.0)
