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
        with pytest.raises(px.UsageError, match="takes it from a layer that it does not call"):
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
