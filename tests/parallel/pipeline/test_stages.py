"""Stages: how a Sequential is cut, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.parallel.pipeline.stages import SequentialPart, all_stages, cut_evenly
from phalanx.testing import run_ranks


@pytest.mark.parametrize(
    ("weights", "parts", "cuts"),
    [
        ([1, 1, 1, 1], 2, [2]),
        ([1, 1, 1, 1], 4, [1, 2, 3]),
        ([9, 1, 1, 1], 2, [1]),
        ([1, 1, 1, 9], 2, [3]),
        ([5, 1, 5, 1, 5, 1], 3, [2, 4]),
        ([3, 3, 3, 1, 1, 1], 3, [1, 2]),
        ([7], 1, []),
    ],
)
def test_cuts_are_even(weights: list[int], parts: int, cuts: list[int]) -> None:
    assert cut_evenly(weights, parts) == cuts


def test_a_sequential_is_cut_by_parameters_or_where_asked() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 10)).eval()

    def names(**options: Any) -> list[list[str]]:
        stages = all_stages(model, 2, options.get("per_rank"), options.get("cuts"))
        assert all(isinstance(stage, SequentialPart) and not stage.training for stage in stages)
        return [[name for name, _ in stage.named_children()] for stage in stages if stage is not None]

    assert names() == [["0"], ["1", "2", "3"]]
    assert names(cuts=[3]) == [["0", "1", "2"], ["3"]]
    assert names(per_rank=2) == [["0"], ["1"], ["2"], ["3"]]


def test_a_layer_that_is_there_twice() -> None:
    act, twice = nn.ReLU(), nn.Linear(2, 2)
    model = nn.Sequential(twice, act, twice, act, nn.Linear(2, 2), act)
    stages = all_stages(model, 2, None, [4])
    assert [len(stage) for stage in stages if stage is not None] == [4, 2]  # type: ignore[arg-type]

    def body(world: px.Group) -> Any:
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
        found = px.parallel.Pipeline(model, world, microbatches=2, cuts=[4])(x)
        return found is None or torch.allclose(found, model(x))

    assert run_ranks(2, body) == [True, True]
    with pytest.raises(px.UsageError, match="share a parameter"):
        all_stages(model, 2, None, [2])


def test_a_tuple_is_one_value_for_the_layers_of_a_sequential() -> None:
    class Swap(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return pair[1], pair[0]

    model = nn.Sequential(Swap(), Swap(), Swap(), Swap())
    one, other = torch.zeros(4, 1), torch.ones(4, 1)
    found = run_ranks(2, lambda world: px.parallel.Pipeline(model, world, microbatches=2)((one, other)))
    assert found[0] is None
    assert all(torch.equal(*each) for each in zip(found[1], (one, other), strict=True))


def tied() -> list[nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return [first, second]


def torch_ddp(stage: nn.Module) -> nn.Module:
    """Without a process group, which it would ask for."""
    made = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(made)
    return made


LAYERS = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("stages", "options", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), {}, "an nn.Sequential of 1 layers cannot be cut into 2 stages"),
        (LAYERS, {"schedule": "interleaved"}, "of 3 layers cannot be cut into 4 stages"),
        (LAYERS, {"cuts": [1, 2]}, "cuts=[1, 2] is not valid (expected 1 growing indices from 1 to 2"),
        (LAYERS, {"cuts": [3]}, "cuts=[3] is not valid"),
        (nn.Linear(2, 2), {}, "stages=Linear(...) is not valid"),
        ([*LAYERS], {}, "3 stages do not fit 2 ranks (expected a multiple of 2)"),
        ([*LAYERS, nn.ReLU()], {}, "schedule='1f1b' has one stage per rank, not 2"),
        ([*LAYERS, nn.ReLU()], {"schedule": "interleaved", "stages_per_rank": 3}, "4 stages do not fit 2 ranks"),
        ([nn.ReLU(), torch.relu], {}, "is not a module (expected nn.Modules"),
        ([nn.ReLU(), nn.ReLU()], {"cuts": [1]}, "cuts= is for an nn.Sequential"),
        ([None, None], {}, "is None, but it is on this rank"),
        (7, {}, "stages=7 is not valid"),
        (tied(), {}, "stage 0 and stage 1 share a parameter (weight and weight)"),
        (LAYERS, {"schedule": "2f2b"}, "schedule='2f2b' is not valid"),
        (LAYERS, {"microbatches": 0}, "microbatches=0 is not valid"),
        (LAYERS, {"wrap": lambda _: 3}, "wrap returned 3 (expected a module)"),
        (LAYERS, {"wrap": torch_ddp}, "torch's DistributedDataParallel expects a backward after each forward"),
    ],
)
def test_refusals(stages: Any, options: dict[str, Any], words: str) -> None:
    def body(world: px.Group) -> str:
        with pytest.raises(px.errors.UsageError) as caught:
            px.parallel.Pipeline(stages, world, **{"microbatches": 2, **options})
        return str(caught.value)

    for message in run_ranks(2, body):
        assert words in message


def test_a_group_is_needed() -> None:
    with pytest.raises(px.errors.UsageError, match="group=None is not valid"):
        px.parallel.Pipeline(LAYERS, None, microbatches=2)  # type: ignore[arg-type]
