"""`px.parallel.DDP` and its kin on real worlds: the same steps as one process with all of the data would take."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.testing import run_ranks

torch = pytest.importorskip("torch")

BACKENDS = ["simulated", "mesh"]
STEPS = 4


def _model(seed: int, *, norm: bool = False) -> Any:
    layers = [torch.nn.Linear(6, 16), torch.nn.ReLU()]
    if norm:
        layers.append(torch.nn.BatchNorm1d(16))
    model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))
    rng = np.random.default_rng(seed)  # torch's own is shared by the ranks of a simulated world
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(scale=0.3, size=tuple(parameter.shape))))
    return model


def _data(count: int = 24) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def _step(model: Any) -> None:
    """Plain SGD: torch.optim takes seconds to import, in every process."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def _alone(count: int = 24) -> list[Any]:
    """The parameters after some steps on all of the data."""
    model = _model(0)
    x, y = _data(count)
    for _ in range(STEPS):
        model.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        _step(model)
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def _train(world: px.Group, **options: Any) -> list[Any]:
    model = px.parallel.DDP(_model(world.rank), world, **options)  # rank 0's values count
    x, y = _data()
    mine = slice(world.rank, None, world.world_size)
    for step in range(STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
        _step(model)
    model.verify_replicas()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def _small_buckets(world: px.Group) -> list[Any]:
    return _train(world, bucket_bytes=64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("train", [_train, _small_buckets])
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_those_of_one_process_with_all_data(backend: str, train: Any, ranks: int) -> None:
    everyone = run_ranks(ranks, train, backend=backend)
    for mine in everyone:
        for parameter, first, alone in zip(mine, everyone[0], _alone(), strict=True):
            assert parameter.tobytes() == first.tobytes()
            np.testing.assert_allclose(parameter, alone, rtol=1e-5, atol=1e-6)


def _by_hand(world: px.Group) -> list[Any]:
    model = px.parallel.DDP(_model(0), world)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(world.rank))
    model.sync_gradients()
    return [float(parameter.grad.max()) for parameter in model.parameters()]


def test_sync_gradients_averages_what_is_there() -> None:
    assert run_ranks(3, _by_hand) == [[1.0] * 4] * 3


class _Forked(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any, which: int) -> Any:
        return (self.a if which == 0 else self.b)(x)


def _unused(world: px.Group, find: bool) -> Any:
    model = px.parallel.DDP(_Forked(), world, find_unused_parameters=find)
    model(torch.ones(2, 4), world.rank).sum().backward()
    return [None if p.grad is None else float(p.grad.abs().sum()) for p in model.parameters()]


def test_parameters_that_no_rank_used_have_no_gradient() -> None:
    first, second = run_ranks(2, _unused, True)
    assert first == second
    assert all(grad is not None and grad > 0 for grad in first[:4])
    assert first[4:] == [None, None]


def test_unused_parameters_are_an_error_that_names_them() -> None:
    with pytest.raises(px.UsageError, match="find_unused_parameters=True") as caught:
        run_ranks(2, _unused, False)
    assert "c.weight" in str(caught.value)


def _different(world: px.Group) -> None:
    px.parallel.DDP(torch.nn.Linear(4, 4 + world.rank), world)


def test_different_modules_are_named() -> None:
    with pytest.raises(px.Desync, match="weight"):
        run_ranks(2, _different)


def _drift(world: px.Group) -> str:
    model = px.parallel.DDP(_model(0), world)
    if world.rank == 1:
        with torch.no_grad():
            model.module[2].bias[1] += 1
    try:
        model.verify_replicas()
    except px.Desync as error:
        return str(error)
    return "alike"


def test_verify_replicas_names_what_differs_and_where() -> None:
    for words in run_ranks(3, _drift):
        assert "2.bias" in words
        assert "ranks 1" in words
        assert "ranks 0, 2" in words


def _uneven(world: px.Group) -> Any:
    model = px.parallel.DDP(_model(0), world)
    x, y = _data()
    steps = 0
    with model.join():
        for start in range(0, 4 * (world.rank + 1), 4):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(x[start : start + 4]), y[start : start + 4]).backward()
            _step(model)
            steps += 1
    model.verify_replicas()
    return steps


def test_ranks_with_different_numbers_of_batches_join() -> None:
    assert run_ranks(3, _uneven) == [1, 2, 3]


def _arrays(world: px.Group) -> Any:
    grads = {"b": [np.full(3, world.rank, np.float32)], "a": (np.full((2, 2), 2.0 * world.rank), None)}
    averaged = px.parallel.average_gradients(grads, world)
    assert averaged["b"][0] is grads["b"][0]
    parallel = px.parallel.DataParallel(world)
    params = parallel.broadcast({"w": np.full(2, float(world.rank))}, root=1)
    parallel.verify(params)
    return averaged["b"][0].tolist(), averaged["a"][0].tolist(), params["w"].tolist(), list(parallel.shard(range(7)))


def test_lists_and_dicts_of_arrays() -> None:
    everyone = run_ranks(3, _arrays)
    shards = [shard for *_, shard in everyone]
    assert [rest[:3] for rest in everyone] == [([1.0] * 3, [[2.0] * 2] * 2, [1.0, 1.0])] * 3
    assert shards == [[0, 3], [1, 4], [2, 5]]


def test_a_dict_stays_what_it_is() -> None:
    def mean(world: px.Group) -> Any:
        grads = defaultdict(list, {"b": [np.full(1, float(world.rank))], "a": []})
        averaged = px.parallel.average_gradients(grads, world)
        return type(averaged).__name__, list(averaged), averaged["b"][0].tolist()

    assert run_ranks(2, mean) == [("defaultdict", ["b", "a"], [0.5])] * 2


def test_what_is_no_array_is_refused() -> None:
    def mean(world: px.Group) -> None:
        px.parallel.average_gradients({"a": ["text"]}, world)

    with pytest.raises(px.UsageError, match=r"gradients\['a'\]\[0\] is of type str"):
        run_ranks(1, mean)


def _another_number_of_steps(world: px.Group) -> Any:
    model = px.parallel.DDP(_model(0), world)
    x, y = _data()
    try:
        for _ in range(2 + world.rank):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
        world.barrier()
    except px.Desync as error:
        return str(error)


def test_a_mismatch_names_the_lines_of_the_program() -> None:
    start = _another_number_of_steps.__code__.co_firstlineno
    for words in run_ranks(2, _another_number_of_steps, backend="mesh"):
        assert f"at test_ddp.py:{start + 6} in _another_number_of_steps" in words  # in backward
        assert f"at test_ddp.py:{start + 7} in _another_number_of_steps" in words  # the barrier
