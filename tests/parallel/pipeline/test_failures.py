"""Failures: a stage that raises, ranks that disagree, a rank that dies. Everybody hears of it, and nothing hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lateness import bound
from torch import nn
from torch.nn.functional import mse_loss

import phalanx as px
from phalanx.testing import Died, run_ranks
from phalanx.testing.faults import kill_self


class Fragile(nn.Linear):
    """Raises in its forward or its backward when told so, after some calls."""

    fails: tuple[str, int] | None = None
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.fails is not None:
            what, at = self.fails
            if what == "forward" and self.calls == at:
                raise OverflowError("the stage is too full")
            if what == "backward" and self.calls == at:
                output.register_hook(self.explode)
        self.calls += 1
        return output

    def explode(self, _gradient: torch.Tensor) -> None:
        raise OverflowError("the stage is too full")


def stages_of(world: px.Group, per_rank: int = 1) -> list[nn.Module | None]:
    count = world.world_size * per_rank
    return [Fragile(3, 3) if stage % world.world_size == world.rank else None for stage in range(count)]


X, Y = torch.ones(8, 3), torch.zeros(8, 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("where", [("forward", 0), ("forward", 3), ("backward", 0), ("backward", 3)], ids=str)
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_stage_that_raises_is_heard_by_all_and_the_next_step_works(
    schedule: str, where: tuple[str, int], culprit: int
) -> None:
    def body(world: px.Group) -> Any:
        stages = stages_of(world, 2 if schedule == "interleaved" else 1)
        pipe = px.parallel.Pipeline(stages, world, schedule=schedule, microbatches=4)
        if world.rank == culprit:
            last = pipe.local_stages[max(pipe.local_stages)]
            last.fails = where
        with pytest.raises((OverflowError, px.errors.Desync)) as caught:
            pipe.step(X, Y, mse_loss)
        if world.rank == culprit:
            last.fails = None
        pipe.zero_grad()
        return caught.value, float(pipe.step(X, Y, mse_loss))

    results = run_ranks(3, body)
    for rank, (error, _) in enumerate(results):
        if rank == culprit:
            assert type(error) is OverflowError
        else:
            assert error.peer == culprit
            assert "OverflowError: the stage is too full" in str(error)
            assert Path(__file__).name in str(error), "the user's line is missing"
    assert len({loss for _, loss in results}) == 1


def test_a_failure_reaches_the_replicas() -> None:
    def body(world: px.Group) -> Any:
        mesh = px.Mesh(world, {"replica": 2, "stage": 2})
        stages = stages_of(mesh["stage"])
        pipe = px.parallel.Pipeline(
            stages, mesh["stage"], microbatches=2, wrap=lambda stage: px.parallel.DDP(stage, mesh["replica"])
        )
        if world.rank == 3:
            stages[1].fails = ("backward", 1)
        with pytest.raises((OverflowError, px.errors.Desync)) as caught:
            pipe.step(X, Y, mse_loss)
        if world.rank == 3:
            stages[1].fails = None
        pipe.zero_grad()
        loss = float(pipe.step(X, Y, mse_loss))
        mesh.close()
        return type(caught.value), loss

    results = run_ranks(4, body)
    assert [kind for kind, _ in results] == [px.errors.Desync] * 3 + [OverflowError]
    assert len({loss for _, loss in results}) == 1


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (X[:2], Y, "inputs: 2 examples cannot be split into 4 micro-batches"),
        (X, Y[:6], "there are 8 inputs and 6 targets"),
        (None, Y, "inputs: None (expected a tensor"),
        ((X, X[:3]), Y, "inputs: tensors of lengths [3, 8]"),
    ],
)
def test_batches_that_do_not_fit(inputs: Any, targets: Any, words: str) -> None:
    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(stages_of(world), world, microbatches=4)
        with pytest.raises((px.errors.UsageError, px.errors.Desync)) as caught:
            pipe.step(inputs, targets, mse_loss)
        return str(caught.value), float(pipe.step(X, Y, mse_loss))

    first, second = run_ranks(2, body)
    assert words in first[0]
    assert words in second[0]
    assert first[1] == second[1]
    # The rank that found nothing wrong itself is told the line of the other's program.
    assert "pipe.step(inputs, targets, mse_loss)" in first[0] + second[0]


def test_ranks_with_different_pipelines() -> None:
    def body(world: px.Group) -> str:
        with pytest.raises(px.errors.Desync) as caught:
            px.parallel.Pipeline(stages_of(world), world, microbatches=4 if world.rank else 8)
        return str(caught.value)

    for message in run_ranks(3, body):
        assert "microbatches is 8 on ranks 0, 4 on ranks 1, 2" in message

    def other(world: px.Group) -> str:
        schedule = "gpipe" if world.rank == 1 else "1f1b"
        with pytest.raises(px.errors.Desync) as caught:
            px.parallel.Pipeline(stages_of(world), world, microbatches=4, schedule=schedule)
        return str(caught.value)

    for message in run_ranks(3, other):
        assert "schedule is '1f1b' on ranks 0, 2, 'gpipe' on ranks 1" in message


def test_a_step_on_one_rank_and_an_evaluation_on_another() -> None:
    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(stages_of(world), world, microbatches=2)
        if world.rank == 0:
            pipe.step(X, Y, mse_loss)
        else:
            pipe.evaluate(X, Y, mse_loss)

    with pytest.raises(px.errors.Desync, match=r"rank 0 is in Pipeline.step\(\), this rank in Pipeline.evaluate\(\)"):
        run_ranks(2, body)


def test_what_a_stage_returns() -> None:
    class Words(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": x}

    def body(world: px.Group) -> str:
        with pytest.raises((px.errors.UsageError, px.errors.Desync)) as caught:
            px.parallel.Pipeline([Words(), nn.ReLU()], world, microbatches=2)(X)
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "stage 0 returned dict, which cannot be passed on" in message


@pytest.mark.parametrize(("schedule", "victim"), [("gpipe", 0), ("1f1b", 1), ("interleaved", 3)])
def test_a_rank_that_is_killed(schedule: str, victim: int, tmp_path: Path) -> None:
    """In the middle of a step. The last thing that the victim does is to write down when."""
    marker = tmp_path / "died"

    def body(world: px.Group) -> Any:
        torch.set_num_threads(1)
        stages = stages_of(world, 2 if schedule == "interleaved" else 1)
        pipe = px.parallel.Pipeline(stages, world, schedule=schedule, microbatches=8)
        pipe.step(X, Y, mse_loss)

        def die(*_: Any) -> None:
            marker.write_text(str(time.monotonic()))
            kill_self()

        if world.rank == victim:
            stages[world.rank].calls = 0
            stages[world.rank].register_forward_hook(lambda module, *_: die() if module.calls == 3 else None)
        with pytest.raises(px.errors.PeerLost) as caught:
            pipe.step(X, Y, mse_loss)
        return caught.value.peer, str(caught.value), time.monotonic()

    results = run_ranks(4, body, backend="mesh", may_die=[victim])
    died = float(marker.read_text())
    assert isinstance(results[victim], Died)
    for rank, result in enumerate(results):
        if rank != victim:
            peer, words, ended = result
            assert peer == victim
            assert f"{Path(__file__).name}:" in words, "the user's line is missing"
            assert ended - died < bound(1.0)
