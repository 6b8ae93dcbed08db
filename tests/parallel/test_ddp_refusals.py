"""What `px.parallel.DDP` refuses, by whom it is heard, and that all ranks can go on afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import phalanx as px
from phalanx.testing import run_ranks

torch = pytest.importorskip("torch")
nn = torch.nn
functional = torch.nn.functional


def _linears(count: int = 2) -> Any:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class _Calls(nn.Module):  # type: ignore[misc]
    """A linear layer, and a function that says what is done with it."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.call = call

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


def _lazy() -> Any:
    return nn.LazyLinear(3)


def _on_no_device() -> Any:
    return nn.Linear(4, 4, device="meta")


def _frozen() -> Any:
    return _linears().requires_grad_(False)


def _sparse() -> Any:
    return nn.Sequential(nn.Embedding(5, 3, sparse=True))


def _sparse_bag() -> Any:
    return nn.EmbeddingBag(5, 3, sparse=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_sparse, "the embedding '0' makes sparse gradients"),
        (_sparse_bag, "makes sparse gradients"),
        (_lazy, "parameter 'weight' has no shape yet"),
        (_on_no_device, "parameter 'weight' is on meta"),
        (_frozen, "no parameters that require gradients"),
        (nn.Tanh, "no parameters that require gradients"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused_when_wrapped(make: Any, words: str) -> None:
    def wrap(world: px.Group) -> str:
        try:
            px.parallel.DDP(make(), world)
        except px.UsageError as error:
            return str(error)
        return ""

    assert words in run_ranks(1, wrap)[0]


def _sparse_found_late(world: px.Group) -> Any:
    model = px.parallel.DDP(
        _Calls(lambda self, x: functional.embedding(x, self.a.weight, sparse=True) + self.b.bias), world
    )
    model.module.a.bias.requires_grad_(False)
    model.module.b.weight.requires_grad_(False)
    return model, lambda: model(torch.tensor([0])).sum().backward()


def _sparse_added_up(world: px.Group) -> Any:
    model, backward = _sparse_found_late(world)
    with model.no_sync():
        backward()
    return model, backward


def _step_inside_backward(world: px.Group) -> Any:
    def take(parameter: Any) -> None:
        parameter.grad = None

    model = px.parallel.DDP(_linears(), world)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    return model, lambda: model(torch.ones(2, 4)).sum().backward()


def _unused(world: px.Group) -> Any:
    model = px.parallel.DDP(_Calls(lambda self, x: self.a(x)), world)
    return model, lambda: model(torch.ones(2, 4)).sum().backward()


def _unfrozen_after_forward(world: px.Group) -> Any:
    module = _linears()
    module[0].requires_grad_(False)
    model = px.parallel.DDP(module, world)
    old = model(torch.ones(2, 4)).sum()
    module[0].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    return model, old.backward


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_sparse_found_late, "the gradient of 'a.weight' is sparse"),
        (_sparse_added_up, "the gradient of 'a.weight' is sparse"),
        (_step_inside_backward, "was gone before it could be averaged"),
        (_unused, "2 parameters got no gradient in this backward (b.bias, b.weight)"),
        (_unfrozen_after_forward, "have changed since this forward"),
    ],
)
def test_gradients_that_cannot_be_averaged_are_refused_in_backward(prepare: Any, words: str) -> None:
    def refused(world: px.Group) -> str:
        _, backward = prepare(world)
        with pytest.raises(px.UsageError) as caught:
            backward()
        world.barrier()
        return str(caught.value)

    assert all(words in said for said in run_ranks(2, refused))


def test_the_others_hear_of_a_rank_that_refuses_and_all_go_on() -> None:
    def unused_on_rank_1(world: px.Group) -> Any:
        skip = [world.rank == 1]
        model = px.parallel.DDP(_Calls(lambda self, x: self.a(x) if skip[0] else self.b(self.a(x))), world)
        x = torch.full((2, 4), float(world.rank))
        try:
            model(x).sum().backward()
            said: Any = ""
        except px.PhalanxError as error:
            said = type(error).__name__, str(error)
        skip[0] = False
        model.zero_grad()
        model(x).sum().backward()
        return said, model.module.b.bias.grad.tolist(), model.module.a.weight.grad.tolist()

    (first, *grads), (second, *others) = run_ranks(2, unused_on_rank_1, backend="mesh")
    assert first[0] == "Desync"
    assert "rank 1 did not finish this backward" in first[1]
    assert second[0] == "UsageError"
    assert grads == others
    assert grads[0] == [2.0] * 4


def test_ranks_that_freeze_different_parameters_are_told() -> None:
    def freeze(world: px.Group) -> str:
        module = _linears()
        model = px.parallel.DDP(module, world)
        module[world.rank].bias.requires_grad_(False)
        with pytest.raises(px.Desync) as caught:
            model(torch.ones(2, 4)).sum().backward()
        return str(caught.value)

    for said in run_ranks(2, freeze):
        assert "the ranks train different parameters" in said
        assert "0.bias: ranks 0 / ranks 1" in said or "0.bias: ranks 1 / ranks 0" in said


def test_different_options_are_named() -> None:
    def wrap(world: px.Group) -> None:
        px.parallel.DDP(_linears(), world, find_unused_parameters=world.rank == 0)

    with pytest.raises(px.Desync, match="the options"):
        run_ranks(2, wrap)


def test_a_wrapper_is_copied_deeply_but_not_pickled() -> None:
    def duplicate(world: px.Group) -> str:
        model = px.parallel.DDP(_linears(), world)
        assert copy.deepcopy(model).group is world
        with pytest.raises(px.UsageError) as caught:
            pickle.dumps(model)
        return str(caught.value)

    assert "state_dict()" in run_ranks(1, duplicate)[0]


def test_groups_of_some_ranks_and_of_one() -> None:
    def train(world: px.Group) -> Any:
        members = [0, 2] if world.rank != 1 else [1]
        with world.subgroup(members) as group:
            model = px.parallel.DDP(nn.Linear(1, 1), group, bucket_bytes=1)
            model(torch.full((1, 1), float(world.rank))).sum().backward()
            return model.module.weight.grad.item()

    assert run_ranks(3, train) == [1.0, 1.0, 1.0]


def test_nothing_is_left_on_a_module_whose_wrapper_is_gone() -> None:
    def wrap(world: px.Group) -> list[Any]:
        module = nn.Linear(1, 1)
        for _ in range(3):
            px.parallel.DDP(module, world)
        model = px.parallel.DDP(module, world)
        model.close()
        module(torch.ones(1, 1) * world.rank).sum().backward()
        return [module.weight.grad.item()]

    assert run_ranks(2, wrap) == [[0.0], [1.0]]
