"""Pipelines of small models, beside one process that takes the same micro-batches."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import phalanx as px
from phalanx.testing import run_ranks

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def deep(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(layers)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(5, 5), nn.Tanh()]
    return nn.Sequential(*blocks)


def batch(length: int, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(length)  # ranks are threads, which share torch's own
    return torch.randn(length, width, generator=random), torch.randn(length, width, generator=random)


def alone(
    model: Callable[[Any], Any], inputs: torch.Tensor, targets: torch.Tensor, microbatches: int, loss_fn: Any = mse_loss
) -> float:
    """One process that takes the micro-batches one after the other. The gradients are in the model."""
    total = torch.zeros(())
    for x, y in zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True):
        loss = loss_fn(model(x), y) * (len(x) / len(inputs))
        loss.backward()
        total = total + loss.detach()
    return float(total)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("length", "microbatches"), [(8, 4), (11, 4), (6, 6), (3, 1)])
def test_gradients_are_those_of_one_process(
    schedule: str, per_rank: int, ranks: int, length: int, microbatches: int
) -> None:
    model, (inputs, targets) = deep(), batch(length)
    reference = copy.deepcopy(model)
    loss = alone(reference, inputs, targets, microbatches)

    def body(world: px.Group) -> tuple[Any, ...]:
        pipe = px.parallel.Pipeline(
            copy.deepcopy(model), world, schedule=schedule, microbatches=microbatches, stages_per_rank=per_rank
        )
        found = pipe.step(inputs, targets, mse_loss)
        return found, gradients(pipe), {**pipe.state_dict()}

    results = run_ranks(ranks, body)
    assert [float(result[0]) for result in results] == [loss] * ranks
    found = {name: tensor for _, each, _ in results for name, tensor in each.items()}
    assert found.keys() == gradients(reference).keys()
    assert_same_bits(found, gradients(reference))
    assert {name for *_, state in results for name in state} == set(model.state_dict())


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES[:3])
def test_training_and_evaluation(schedule: str, per_rank: int) -> None:
    model = nn.Sequential(*deep(4), nn.Dropout(0.5))
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    expected = []
    for length in (9, 8, 9, 4):
        optimizer.zero_grad()
        expected.append(alone(reference, *batch(length), 4))
        optimizer.step()
    probe = batch(7)[0]
    with torch.no_grad():
        output = torch.cat([reference(part) for part in probe.tensor_split(4)])

    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(
            copy.deepcopy(model), world, schedule=schedule, microbatches=4, stages_per_rank=per_rank
        ).eval()
        ours = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        losses = []
        for length in (9, 8, 9, 4):
            ours.zero_grad()
            # Only the ranks that need them have the batches.
            inputs = batch(length)[0] if world.rank == 0 else None
            targets = batch(length)[1] if world.rank == world.world_size - 1 else None
            losses.append(float(pipe.step(inputs, targets, mse_loss)))
            ours.step()
        evaluated = float(pipe.evaluate(probe, probe, mse_loss))
        return losses, pipe(probe), evaluated

    results = run_ranks(2, body)
    assert [result[0] for result in results] == [expected] * 2
    assert results[0][1] is None
    assert torch.equal(results[1][1], output)
    assert [result[2] for result in results] == pytest.approx([float(mse_loss(output, probe))] * 2)


class Embed(nn.Module):
    """Several tensors of which some need no gradients, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, letters: torch.Tensor, mask: torch.Tensor) -> Any:
        x = self.table(letters)
        return x.transpose(1, 2), letters, mask, None, x.detach() * 2


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, letters: torch.Tensor, mask: torch.Tensor, none: None, extra: Any) -> Any:
        assert letters.dtype == torch.int64
        assert mask.dtype == torch.bool
        assert none is None
        assert not extra.requires_grad
        assert x.stride(1) == 1, "the layout in memory was lost"
        y = self.layer(x.transpose(1, 2)).masked_fill(mask[..., None], 0.0) + extra
        return y.transpose(1, 2), letters, mask, None, extra


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.guess = nn.Linear(4, 7)

    def forward(self, x: torch.Tensor, letters: torch.Tensor, *_: Any) -> Any:
        return self.guess(torch.relu_(x.transpose(1, 2))).flatten(0, 1), letters.float().mean()


def letter_loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs[0], targets.flatten()) + outputs[1]


def test_several_tensors_between_stages() -> None:
    torch.manual_seed(0)
    stages = [Embed(), Mix(), Mix(), Head()]
    letters, targets, mask = torch.randint(7, (10, 6)), torch.randint(7, (10, 6)), torch.rand(10, 6) < 0.3
    reference = nn.ModuleList(copy.deepcopy(stages))
    for x, hidden, y in zip(letters.tensor_split(4), mask.tensor_split(4), targets.tensor_split(4), strict=True):
        values = (x, hidden)
        for stage in reference:
            values = stage(*values)
        (letter_loss(values, y) * (len(x) / 10)).backward()

    def body(world: px.Group, schedule: str) -> Any:
        mine = [copy.deepcopy(stage) if index % 2 == world.rank else None for index, stage in enumerate(stages)]
        if schedule == "1f1b":  # two stages as one: stage i is on rank i
            mine = [Pair(*copy.deepcopy(stages[:2])), Pair(*copy.deepcopy(stages[2:]))]
        pipe = px.parallel.Pipeline(mine, world, schedule=schedule, microbatches=4)
        pipe.step((letters, mask), targets, letter_loss)
        names = {f"{2 * world.rank + part}": each for part, each in enumerate(next(pipe.children()).children())}
        return {
            f"{index}.{name}": value
            for index, stage in (names if schedule == "1f1b" else pipe.local_stages).items()
            for name, value in gradients(stage).items()
        }

    for schedule in ("interleaved", "1f1b"):
        found = {name: value for result in run_ranks(2, body, schedule) for name, value in result.items()}
        assert found.keys() == gradients(reference).keys()
        assert_same_bits(found, gradients(reference))


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, *values: Any) -> Any:
        return self.second(*self.first(*values))


def test_a_layer_that_works_in_place_may_begin_a_stage() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5))
    reference, (inputs, targets) = copy.deepcopy(model), batch(4)
    alone(reference, inputs, targets, 2)

    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(copy.deepcopy(model), world, microbatches=2, cuts=[1])
        pipe.step(inputs, targets, mse_loss)
        return gradients(pipe)

    for found in run_ranks(2, body):
        assert_same_bits(found, gradients(reference))


def test_large_messages_come_while_a_stage_computes() -> None:
    torch.manual_seed(1)
    stages = [nn.Linear(512, 512) for _ in range(3)]
    reference, (inputs, targets) = copy.deepcopy(nn.Sequential(*stages)), batch(4 * 512, 512)
    alone(reference, inputs, targets, 4)

    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(copy.deepcopy(stages), world, microbatches=4)
        pipe.step(inputs, targets, mse_loss)
        return gradients(pipe)

    for found in run_ranks(3, body):
        assert_same_bits(found, gradients(reference))


def test_frozen_stages_send_no_gradients() -> None:
    model, (inputs, targets) = deep(4), batch(4)
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    reference = copy.deepcopy(model)
    alone(reference, inputs, targets, 2)

    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(copy.deepcopy(model), world, microbatches=2)
        pipe.step(inputs, targets, mse_loss)
        frozen = gradients(pipe)
        for parameter in pipe.parameters():  # from now on all learn
            parameter.requires_grad_(True)
        pipe.zero_grad()
        pipe.step(inputs, targets, mse_loss)
        return frozen, gradients(pipe)

    results = run_ranks(2, body)
    assert set(results[0][0].values()) == {None}
    assert_same_bits(results[1][0], gradients(reference))
    for parameter in reference.parameters():
        parameter.requires_grad_(True)
    reference.zero_grad()
    alone(reference, inputs, targets, 2)
    for _, found in results:
        assert_same_bits(found, gradients(reference))


def test_a_sum_instead_of_a_mean() -> None:
    model, (inputs, targets) = deep(2), batch(6)
    reference = copy.deepcopy(model)
    for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        mse_loss(reference(x), y, reduction="sum").backward()

    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(copy.deepcopy(model), world, microbatches=4)
        pipe.step(inputs, targets, lambda x, y: mse_loss(x, y, reduction="sum"), reduction="sum")
        return gradients(pipe)

    for found in run_ranks(2, body):
        assert_same_bits(found, gradients(reference))


def test_a_loss_without_targets_in_double_precision() -> None:
    model, inputs = deep(2).double(), batch(6)[0].double()

    def body(world: px.Group) -> Any:
        return px.parallel.Pipeline(copy.deepcopy(model), world, microbatches=3).step(inputs, None, torch.mean)

    for loss in run_ranks(2, body):
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, model(inputs).mean().detach(), rtol=1e-12, atol=1e-12)


def test_1f1b_holds_few_activations() -> None:
    """Counted where they are: tensors that autograd has saved."""

    class Counted(torch.autograd.Function):
        alive: dict[int, int]
        most: dict[int, int]

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
            ctx.rank = rank
            Counted.alive[rank] += 1
            Counted.most[rank] = max(Counted.most[rank], Counted.alive[rank])
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            Counted.alive[ctx.rank] -= 1
            return gradient * 2, None

    class Stage(nn.Linear):
        def forward(self, x: torch.Tensor, rank: int = 0) -> torch.Tensor:
            return Counted.apply(super().forward(x), self.rank)

    def body(world: px.Group, schedule: str) -> None:
        stage = Stage(5, 5)
        stage.rank = world.rank
        stages = [stage if rank == world.rank else None for rank in range(3)]
        px.parallel.Pipeline(stages, world, schedule=schedule, microbatches=8).step(*batch(8), mse_loss)

    for schedule, expected in (("1f1b", {0: 3, 1: 2, 2: 1}), ("gpipe", {0: 8, 1: 8, 2: 8})):
        Counted.alive, Counted.most = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
        run_ranks(3, body, schedule)
        assert Counted.most == expected


def test_other_stages_are_freed() -> None:
    def body(world: px.Group) -> Any:
        model = deep(4)
        refs = [weakref.ref(layer.weight) for layer in model[::2]]
        pipe = px.parallel.Pipeline(model, world, microbatches=2)
        del model
        gc.collect()
        return [ref() is not None for ref in refs], len([*pipe.parameters()])

    assert run_ranks(2, body) == [([True, True, False, False], 4), ([False, False, True, True], 4)]


def test_checkpoints_are_those_of_the_whole_model(tmp_path: Path) -> None:
    def fresh() -> nn.Sequential:
        return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(6)])

    model = fresh()

    def save(world: px.Group) -> None:
        pipe = px.parallel.Pipeline(copy.deepcopy(model), world, microbatches=2)
        px.checkpoint.save(tmp_path / "saved", pipe.checkpoint_state(), world)

    def load(world: px.Group) -> dict[str, torch.Tensor]:
        pipe = px.parallel.Pipeline(fresh(), world, microbatches=2)
        pipe.load_state_dict(px.checkpoint.load(tmp_path / "saved", world), strict=False)
        return {**pipe.state_dict()}

    run_ranks(3, save)
    for ranks in (1, 2):
        found = {name: tensor for state in run_ranks(ranks, load) for name, tensor in state.items()}
        assert found.keys() == model.state_dict().keys()
        assert_same_bits(found, {**model.state_dict()})


@pytest.mark.parametrize("kind", ["FSDP", "DDP"])
def test_checkpoints_of_wrapped_stages(tmp_path: Path, kind: str) -> None:
    def fresh() -> nn.Sequential:
        return nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(4)])

    model = fresh()

    def pipe_of(world: px.Group, whole: nn.Sequential) -> tuple[px.Mesh, px.parallel.Pipeline]:
        mesh = px.Mesh(world, {"stage": 2, "other": 2})
        wrapper = getattr(px.parallel, kind)
        return mesh, px.parallel.Pipeline(
            whole, mesh["stage"], microbatches=2, wrap=lambda stage: wrapper(stage, mesh["other"])
        )

    def save(world: px.Group) -> list[str]:
        mesh, pipe = pipe_of(world, copy.deepcopy(model))
        px.checkpoint.save(tmp_path / "saved", pipe.checkpoint_state(), mesh)
        return [name for name, _ in pipe.named_parameters()]

    def load(world: px.Group) -> bool:
        _, pipe = pipe_of(world, fresh())
        found = px.checkpoint.load(tmp_path / "saved", world)
        names = pipe.load_state_dict(found, strict=False)
        assert not names.missing_keys
        with pytest.raises(px.UsageError, match=r"is not on this rank \(see strict=False\)"):
            pipe.load_state_dict(found)
        again = pipe.checkpoint_state()
        px.checkpoint.save(tmp_path / "again", again, world)
        return True

    names = run_ranks(4, save)
    assert {name for found in names for name in found} == {name for name, _ in model.named_parameters()}
    assert run_ranks(4, load) == [True] * 4
    for name in ("saved", "again"):
        found = px.checkpoint.load(tmp_path / name)
        assert found.keys() == model.state_dict().keys()
        assert_same_bits(found, {**model.state_dict()})


def test_on_a_mesh_with_ddp() -> None:
    model, (inputs, targets) = deep(4), batch(16)
    halves = [(inputs[:8], targets[:8]), (inputs[8:], targets[8:])]
    reference = copy.deepcopy(model)
    for x, y in halves:
        alone(reference, x, y, 4)

    def body(world: px.Group, schedule: str) -> Any:
        mesh = px.Mesh(world, {"replica": 2, "stage": 2})
        pipe = px.parallel.Pipeline(
            copy.deepcopy(model),
            mesh["stage"],
            schedule=schedule,
            microbatches=4,
            wrap=lambda stage: px.parallel.DDP(stage, mesh["replica"]),
        )
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(*halves[mesh.coordinate["replica"]], mse_loss)
        found = {n: g for stage in pipe.local_stages.values() for n, g in gradients(stage.module).items()}
        mesh.close()
        return found

    for schedule in ("1f1b", "interleaved"):
        results = run_ranks(4, body, schedule)
        for found in results:
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, gradients(reference)[name] / 2)
        assert {name for found in results for name in found} == gradients(reference).keys()


def test_the_report_of_a_step() -> None:
    def body(world: px.Group) -> Any:
        pipe = px.parallel.Pipeline(deep(4), world, microbatches=4)
        with pytest.raises(px.errors.UsageError, match="no step yet"):
            pipe.report()
        pipe.step(*batch(8), mse_loss)
        return pipe.report()

    first, second = run_ranks(2, body)
    assert str(first) == str(second)
    assert [len(spans) for spans in first.timeline.ranks] == [8, 8]
    assert first.theory == pytest.approx(1 / 4)
    assert first.bubble > 0
    assert "rank 1: computed" in str(first)
    assert first.draw().count("\n") == 1
    assert first.draw("svg").startswith("<svg")


def test_outputs_of_all_kinds_are_put_together() -> None:
    class Last(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: torch.Tensor) -> Any:
            return {"dict": {"y": x, "more": (x, None)}, "words": "words"}[self.kind]

    def body(world: px.Group) -> Any:
        x = torch.arange(6.0).view(6, 1)
        found = px.parallel.Pipeline([nn.Identity(), Last("dict")], world, microbatches=3)(x)
        if world.rank == 1:
            assert torch.equal(found["y"], x)
            assert torch.equal(found["more"][0], x)
            assert found["more"][1] is None
        words = px.parallel.Pipeline([nn.Identity(), Last("words")], world, microbatches=3)
        if world.rank == 0:
            assert words(x) is None
        else:
            with pytest.raises(px.UsageError, match="the last stage returned 'words', which cannot be put together"):
                words(x)

    run_ranks(2, body)


def test_a_missing_loss_is_heard_by_all() -> None:
    def body(world: px.Group) -> Any:
        pipeline = px.parallel.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), world, microbatches=2)
        x = torch.ones(4, 2)
        with pytest.raises(px.PhalanxError, match="loss_fn is missing") as caught:
            pipeline.step(x, x)
        assert type(caught.value) is (px.UsageError if world.rank == 1 else px.Desync)
        return pipeline.step(x, x, nn.functional.mse_loss).isfinite().item()

    assert run_ranks(2, body) == [True, True]
