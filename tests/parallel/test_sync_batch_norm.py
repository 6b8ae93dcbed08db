"""Batch normalisation over ranks, beside one process that has the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.testing import run_ranks

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def batches(sizes: list[int], dims: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(dims)
    return [torch.randn(size, 3, *[2, 4, 3][: dims - 2], dtype=dtype) * 3 + 100 for size in sizes]


def alone(data: list[torch.Tensor], **options: Any) -> dict[str, Any]:
    x = torch.cat(data).requires_grad_()
    layer = KINDS[x.dim()](3, **options).to(x.dtype)
    if layer.affine:
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    output = layer(x)
    (output**3).sum().backward()
    return {"layer": layer, "output": output.detach(), "grad": x.grad}


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 5, 2], [0, 3, 1]])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
def test_as_one_process(dims: int, sizes: list[int], options: dict[str, Any]) -> None:
    data = batches(sizes, dims)
    expected = alone(data, **options)

    def body(world: px.Group) -> Any:
        x = data[world.rank].clone().requires_grad_()
        layer = px.parallel.SyncBatchNorm(3, world, **options).to(x.dtype)
        layer.load_state_dict(alone(data, **options)["layer"].state_dict())
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            getattr(layer, name).fill_(1.0 if name == "running_var" else 0.0)
        output = layer(x)
        (output**3).sum().backward()
        return output.detach(), x.grad, {**layer.state_dict()}, [p.grad for p in layer.parameters()]

    results = run_ranks(3, body)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(torch.cat([result[0] for result in results]), expected["output"], **close)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), expected["grad"], **close)
    for _, _, state, _ in results:
        torch.testing.assert_close(state, dict(expected["layer"].state_dict()), **close)
        assert all(torch.equal(state[name], results[0][2][name]) for name in state)
    for index, parameter in enumerate(expected["layer"].parameters()):
        total = sum(result[3][index] for result in results)
        torch.testing.assert_close(total, parameter.grad, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shorter_dtypes(dtype: torch.dtype) -> None:
    data = batches([4, 3], 4, dtype)
    expected = alone([each.float() for each in data])

    def body(world: px.Group) -> Any:
        x = data[world.rank].clone().requires_grad_()
        output = px.parallel.SyncBatchNorm(3, world)(x)
        output.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        return output.detach()

    found = torch.cat(run_ranks(2, body))
    assert found.dtype == dtype
    scale = expected["layer"].weight.detach().view(1, 3, 1, 1)
    torch.testing.assert_close(found.float() * scale, expected["output"], rtol=2e-2, atol=4e-2)


def test_convert_keeps_everything() -> None:
    def body(world: px.Group) -> None:
        model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Sequential(nn.BatchNorm1d(3, eps=0.1, momentum=0.5), nn.ReLU()))
        model.eval()
        x = torch.randn(2, 3, 4)
        before, names = model(x), list(model.state_dict())
        weight = model[1][0].weight
        made = px.parallel.SyncBatchNorm.convert(model, world)
        assert made is model
        assert isinstance(model[1][0], px.parallel.SyncBatchNorm)
        assert model[1][0].weight is weight
        assert list(model.state_dict()) == names
        assert torch.equal(model(x), before)
        assert px.parallel.SyncBatchNorm.convert(model, world)[1][0].weight is weight
        twin = copy.deepcopy(model)
        assert twin[1][0].group is world
        assert twin[1][0].weight is not weight

    run_ranks(2, body)


@pytest.mark.parametrize("tracks", [True, False])
def test_an_evaluation_asks_nobody(tracks: bool) -> None:
    def body(world: px.Group) -> None:
        layer = px.parallel.SyncBatchNorm(3, world, track_running_stats=tracks).eval()
        plain = nn.BatchNorm1d(3, track_running_stats=tracks).eval()
        if world.rank == 0:  # the other one does not take part
            x = torch.randn(5, 3)
            assert torch.equal(layer(x), plain(x))

    run_ranks(2, body)


def test_refusals() -> None:
    def body(world: px.Group) -> None:
        layer = px.parallel.SyncBatchNorm(3, world)
        with pytest.raises(px.UsageError, match="expected 3 features in dim 1"):
            layer(torch.zeros(2, 4))
        with pytest.raises(ValueError, match="more than 1 value per feature on all ranks together, got 1"):
            layer(torch.zeros(1 - world.rank, 3))
        with pytest.raises(px.UsageError, match="expected a Group"):
            px.parallel.SyncBatchNorm(3, None)  # type: ignore[arg-type]

    run_ranks(2, body)


def test_under_ddp() -> None:
    data = batches([4, 4], 4, torch.float32)

    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 1))

    def body(world: px.Group) -> Any:
        model: nn.Module = copy.deepcopy(fresh)
        if world.world_size == 2:
            model = px.parallel.DDP(px.parallel.SyncBatchNorm.convert(model, world), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            x = data[world.rank] if world.world_size == 2 else torch.cat(data)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    (whole,) = run_ranks(1, body)
    parts = run_ranks(2, body)
    assert [(a + b) / 2 for a, b in zip(*parts, strict=True)] == pytest.approx(whole, rel=1e-4)


def test_a_weight_without_a_bias() -> None:
    data = batches([3, 5], 2)
    whole = nn.BatchNorm1d(3, dtype=torch.float64)
    whole.bias = None
    nn.init.constant_(whole.weight, 5.0)
    x = torch.cat(data)
    expected = whole(x)
    (expected**3).sum().backward()

    def body(world: px.Group) -> Any:
        given = nn.BatchNorm1d(3, dtype=torch.float64)
        given.bias = None
        nn.init.constant_(given.weight, 5.0)
        layer = px.parallel.SyncBatchNorm.convert(given, world)
        output = layer(data[world.rank])
        (output**3).sum().backward()
        return output.detach(), layer.weight.grad

    results = run_ranks(2, body)
    torch.testing.assert_close(torch.cat([output for output, _ in results]), expected.detach())
    torch.testing.assert_close(sum(grad for _, grad in results), whole.weight.grad)


def test_convert_finds_what_is_there_twice_and_refuses_what_is_not_there_yet() -> None:
    def body(world: px.Group) -> None:
        shared = nn.BatchNorm1d(3)
        made: Any = px.parallel.SyncBatchNorm.convert(nn.Sequential(shared, nn.ReLU(), shared), world)
        assert isinstance(made[0], px.parallel.SyncBatchNorm)
        assert made[0] is made[2]
        with pytest.raises(px.UsageError, match="LazyBatchNorm1d does not know its features yet"):
            px.parallel.SyncBatchNorm.convert(nn.Sequential(nn.LazyBatchNorm1d()), world)

    run_ranks(1, body)
