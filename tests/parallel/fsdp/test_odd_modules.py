"""Modules that are put together in ways that sharding has to cope with, or to refuse in words."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.parallel.fsdp.nets import fresh
from torch import nn

import phalanx as px
from phalanx.parallel.fsdp import units
from phalanx.testing import run_ranks


class Odd(nn.Module):
    """Layers in lists of lists and in dicts, a complex parameter, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
        self.gates = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}) for _ in range(2))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.pairs:
            x = x + second(torch.tanh(first(x)))
        for gate in self.gates:
            x = gate["q"](x) * torch.sigmoid(gate["k"](x))
        return x * self.phase.abs()


@pytest.mark.parametrize("memory", ["shared", "gathered"])
@pytest.mark.parametrize("strategy", ["full", "grads", "none"])
def test_as_in_one_process(monkeypatch: pytest.MonkeyPatch, memory: str, strategy: str) -> None:
    if memory == "gathered":
        monkeypatch.setattr(units, "share_memory", lambda *_: None)
    torch.manual_seed(0)
    start = Odd()
    inputs = torch.randn(3, 5, 4)
    alone = copy.deepcopy(start)
    # Decay and momentum would change a parameter whose gradient is zero instead of none.
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    norms = []
    for x in inputs:
        optimizer.zero_grad()
        alone(x).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.05).item())
        optimizer.step()

    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(copy.deepcopy(start), world, strategy=strategy)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for x, norm in zip(inputs, norms, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert dict(model.named_parameters())["unused"].grad is None
            assert model.clip_grad_norm_(0.05).item() == pytest.approx(norm, rel=1e-4)
            optimizer.step()
        for name, whole in model.full_state_dict().items():
            torch.testing.assert_close(whole, alone.state_dict()[name], rtol=1e-4, atol=1e-5)

    run_ranks(2, body)


def test_a_parameter_that_only_one_rank_uses() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.one(x) + (self.other(x) if both else 0)

    def body(world: px.Group) -> list[bool]:
        model = px.parallel.FSDP(Sometimes(), world)
        model(torch.ones(1, 2), world.rank == 1).sum().backward()
        return [shard.grad is not None for _, shard in model.named_parameters()]

    assert run_ranks(2, body) == [[True] * 4] * 2


def test_a_layer_that_is_used_without_being_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.layers[0](x), self.layers[1].weight)

    def body(world: px.Group) -> list[int]:
        with pytest.raises(px.UsageError, match=r"'layers\.1\.weight' is not there: an FSDP gathers it"):
            px.parallel.FSDP(Raw(), world)(torch.ones(1, 4))
        return list(px.parallel.FSDP(Raw(), world, units=[Raw])(torch.ones(1, 4)).shape)

    monkeypatch.setattr(units, "share_memory", lambda *_: None)
    assert run_ranks(2, body) == [[1, 4]] * 2


def test_states_of_other_shapes_are_refused_before_anything_changes() -> None:
    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(fresh(), world)
        before = model.full_state_dict()
        mine = model.state_dict()
        (weight,) = (name for name in before if name.endswith("layers.0.0.weight"))
        shard = mine[weight]
        elsewhere = px.checkpoint.Shard(shard.array, tuple(shard.shape), (1 - min(shard.offset[0], 1), 0))
        for name, wrong, words in [
            (weight, before[weight].repeat(2, 1), r"has shape \(14, 6\) \(expected \(7, 6\)\)"),
            (weight, before[weight][:3], r"has shape \(3, 6\)"),
            (weight, elsewhere, "has the rows of another rank"),
            ("count", torch.ones(1), r"count has shape \(1,\) \(expected \(2,\)\)"),
        ]:
            changed = {key: value + 1 for key, value in before.items()}
            with pytest.raises(px.UsageError, match=words):
                model.load_state_dict({**changed, name: wrong})
        for name, value in model.full_state_dict().items():
            assert torch.equal(value, before[name])
        model.load_state_dict(mine)

    run_ranks(2, body)


def test_a_parameter_that_is_given_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), world)
        weight = model.module[0].weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype, weight.requires_grad) == (torch.Size([3, 3]), torch.float32, True)
        for use in (weight.norm, weight.sum, weight.clone, lambda: str(weight), lambda: weight + 1, weight.numpy):
            with pytest.raises(px.UsageError, match=r"'0\.weight' is not there"):
                use()
        for use in (model.module.state_dict, lambda: copy.deepcopy(model.module)):
            with pytest.raises(px.UsageError, match=r"'0\.weight' is not there"):
                use()

    monkeypatch.setattr(units, "share_memory", lambda *_: None)
    run_ranks(2, body)


@pytest.mark.parametrize("memory", ["shared", "gathered"])
def test_penalties_of_gradients(monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    if memory == "gathered":
        monkeypatch.setattr(units, "share_memory", lambda *_: None)
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    inputs = torch.randn(3, 5, 4)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (gradient.norm(dim=1) - 1).square().mean()

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x in inputs:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train(copy.deepcopy(start))
    found = run_ranks(2, lambda world: train(px.parallel.FSDP(copy.deepcopy(start), world)))
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_compiled_modules(transport: str) -> None:
    def body(world: px.Group) -> list[float]:
        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        losses = []
        for compiled in (False, True):
            inner = copy.deepcopy(start)
            model = px.parallel.FSDP(torch.compile(inner, backend="aot_eager") if compiled else inner, world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 3)).square().mean()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        around = torch.compile(px.parallel.FSDP(copy.deepcopy(start), world), backend="eager")
        around(torch.ones(2, 3)).sum().backward()
        optimizer = torch.optim.AdamW(around.parameters())  # those of the module inside: torch passes the wrapper over
        with pytest.raises(px.UsageError, match="has the whole parameter '0.weight' of an FSDP"):
            optimizer.step()
        return losses

    for alone, compiled in run_ranks(2, body, backend="mesh", options=px.Options(transport=transport)):
        assert compiled == pytest.approx(alone, rel=1e-5)


def test_freezing_by_the_module() -> None:
    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), world)
        before = model.full_state_dict()
        model.module[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for trains in (False, True):
            model.module[0].requires_grad_(trains)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            after = model.full_state_dict()
            assert torch.equal(after["0.weight"], before["0.weight"]) is not trains
            assert not torch.equal(after["1.bias"], before["1.bias"])

    run_ranks(2, body, backend="mesh")


def test_refusals() -> None:
    def body(world: px.Group) -> None:
        inner = px.parallel.FSDP(nn.Linear(2, 2), world)
        with pytest.raises(px.UsageError, match="0 is wrapped already"):
            px.parallel.FSDP(nn.Sequential(inner), world)
        with pytest.raises(px.UsageError, match="norm_type=0"):
            inner.clip_grad_norm_(1.0, norm_type=0)
        model = px.parallel.FSDP(nn.Sequential(nn.Linear(2, 2)), world)
        model.module.append(nn.Linear(2, 2))
        model.parameters_changed()
        with pytest.raises(px.UsageError, match=r"'1\.weight' was added or replaced after FSDP"):
            model(torch.ones(1, 2))
        for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
            optimizer = kind(inner.parameters(), lr=0.1)
            with pytest.raises(px.UsageError, match=f"{kind.__name__} computes with whole parameters"):
                optimizer.step(lambda: torch.zeros(()))

    run_ranks(2, body)
