"""Training with shards, beside one process and data parallel: the same losses, whatever is sharded and wherever."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.fsdp.nets import WORDS, Net, batch, fresh, loss_of, train, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.parallel.fsdp import averaging, units
from phalanx.testing import faults, run_ranks

STRATEGIES = ["full", "grads", "hybrid", "none", "mesh"]


@pytest.fixture(params=["shared", "gathered"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the ranks have memory in common."""
    if request.param == "gathered":
        monkeypatch.setattr(units, "share_memory", lambda *_: None)
    return str(request.param)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_losses_as_in_one_process(memory: str, strategy: str, clip: float | None) -> None:
    expected = train(None, clip=clip)
    found = run_ranks(4, lambda world: train(world, lambda model: wrapped(world, strategy, model), clip=clip))
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert all(losses == found[0] for losses in found)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_gradients(monkeypatch: pytest.MonkeyPatch, memory: str, strategy: str) -> None:
    """They are scattered in blocks of rows, without a copy; here most tensors have rows that are too many for that."""
    monkeypatch.setattr(averaging, "_LARGE", 1)
    expected = train(None)
    found = run_ranks(4, lambda world: train(world, lambda model: wrapped(world, strategy, model)))
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert all(losses == found[0] for losses in found)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_any_number_of_ranks(ranks: int, optimizer: Any) -> None:
    expected = train(None, optimizer=optimizer)
    found = run_ranks(
        ranks,
        lambda world: train(world, lambda model: px.parallel.FSDP(model, world, prefetch=2), optimizer=optimizer),
    )
    assert found[0] == pytest.approx(expected, rel=1e-5)


class Tied(nn.Module):
    """The last layer has the weights of the embedding. The one that is registered first gets the whole gradient."""

    def __init__(self, order: str) -> None:
        super().__init__()
        parts = {"word": nn.Embedding(WORDS, 6), "guess": nn.Linear(6, WORDS, bias=False)}
        for name in sorted(parts, reverse=order == "word first"):
            self.add_module(name, parts[name])
        self.guess.weight = self.word.weight
        nn.init.normal_(self.word.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.guess(self.word(words))


@pytest.mark.parametrize("order", ["word first", "guess first"])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_tied_weights(order: str, passes: int) -> None:
    """They are added as they come: with the bits of one process, but that a second pass has another order."""
    plain = Tied(order)
    for step in range(passes):
        loss_of(plain, batch(step)).backward()

    def body(world: px.Group) -> Any:
        model = px.parallel.FSDP(Tied(order), world)
        seen = []
        for use in (model.module.word.weight, model.module.guess.weight):
            use.register_hook(lambda gradient: seen.append(gradient.layout))
        for step in range(passes):
            with model.no_sync() if step < passes - 1 else contextlib.nullcontext():
                loss = loss_of(model, batch(step))
            loss.backward()
        (shard,) = model.parameters()
        left = [use.grad for use in (model.module.word.weight, model.module.guess.weight)]
        return shard.grad, seen, left

    ((gradient, seen, left),) = run_ranks(1, body)
    if passes == 1:
        assert torch.equal(gradient, plain.word.weight.grad)
    torch.testing.assert_close(gradient, plain.word.weight.grad)
    assert seen == [torch.strided, torch.sparse_coo] * passes
    assert left == [None, None]


def test_a_tied_embedding_alone() -> None:
    """Only the embedding is used: its sparse gradient is all that there is."""
    plain = Tied("word first")
    plain.word(batch(0)).square().sum().backward()

    def body(world: px.Group) -> Any:
        inner = Tied("word first")
        inner.forward = lambda words: inner.word(words)  # type: ignore[method-assign]
        model = px.parallel.FSDP(inner, world)
        model(batch(0)).square().sum().backward()
        (shard,) = model.parameters()
        return shard.grad

    assert torch.equal(torch.cat(run_ranks(2, body)), plain.word.weight.grad)


def test_an_optimizer_of_the_other_name_of_tied_weights() -> None:
    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(Tied("word first"), world)
        loss_of(model, batch(0)).backward()
        torch.optim.SGD([model.module.guess.weight], lr=0.1).step()

    with pytest.raises(px.UsageError, match=r"whole parameter 'word\.weight'"):
        run_ranks(1, body)


def test_processes_share_parameters() -> None:
    def body(world: px.Group) -> Any:
        model = px.parallel.FSDP(fresh(), world)
        first = model.module.embedding.weight.data
        world.barrier()
        if world.rank == 1:
            first[3, 2] = 77.0  # every rank sees it: it is one and the same memory
        world.barrier()
        return first[3, 2].item(), sum(shard.numel() for shard in model.parameters())

    found = run_ranks(3, body, backend="mesh")
    assert [value for value, _ in found] == [77.0] * 3
    assert sum(count for _, count in found) == sum(parameter.numel() for parameter in fresh().parameters())


def test_gathered_parameters_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "share_memory", lambda *_: None)

    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(fresh(), world)
        places = [place for unit in model._units for place in unit.places if place.name.endswith(".0.weight")]

        def there() -> list[bool]:
            return [place.parameter.untyped_storage().size() > 0 for place in places]

        assert there() == [False] * 3
        loss = loss_of(model, batch(0))
        assert there() == [False] * 3
        loss.backward()
        assert there() == [False] * 3
        with torch.no_grad():
            model(batch(0))
        assert there() == [False] * 3
        assert isinstance(model.module.embedding.weight, units.AbsentParameter)

    run_ranks(2, body)


def test_shorter_dtypes_for_forward(memory: str) -> None:
    expected = train(None, steps=8)

    def body(world: px.Group) -> Any:
        model = px.parallel.FSDP(fresh(), world, mixed_precision=torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
        return train(world, lambda _: model, steps=8)

    for losses in run_ranks(2, body):
        assert losses == pytest.approx(expected, rel=0.1)
        assert losses != pytest.approx(expected, rel=1e-5)


def test_batch_normalisation_in_shorter_dtypes(memory: str) -> None:
    def body(world: px.Group) -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model = px.parallel.FSDP(net, world, mixed_precision=torch.bfloat16)
        output = model(torch.randn(6, 4) + 3)
        output.float().square().sum().backward()
        assert output.dtype == torch.bfloat16
        norm = model.module[1]
        assert norm.weight.dtype == norm.running_mean.dtype == torch.float32
        assert norm.running_mean.abs().sum() > 0
        assert all(shard.grad is not None and shard.grad.dtype == torch.float32 for shard in model.parameters())
        assert model.eval()(torch.randn(1, 4)).dtype == torch.bfloat16

    run_ranks(2, body)


@pytest.mark.parametrize("strategy", ["full", "grads", "none"])
def test_gradients_that_add_up(memory: str, strategy: str) -> None:
    def body(world: px.Group) -> Any:
        model = px.parallel.FSDP(fresh(), world, strategy=strategy)
        with model.no_sync():
            loss_of(model, batch(world.rank)).backward()
            assert all(shard.grad is None for shard in model.parameters())
        loss_of(model, batch(10 + world.rank)).backward()
        whole = {name: shard.grad for name, shard in model.named_parameters()}
        return {name: (None if grad is None else grad.clone()) for name, grad in whole.items()}

    single = fresh()
    for step in (0, 1, 10, 11):
        (loss_of(single, batch(step)) / 2).backward()
    found = run_ranks(2, body)
    for name, parameter in single.named_parameters():
        grads = [each[name] for each in found if each[name] is not None and each[name].numel()]
        if strategy == "none":
            grads = grads[:1]
        expected = parameter.grad
        assert (expected is None) == (not grads)
        if expected is not None:
            got = torch.cat([grad.reshape(-1) for grad in grads])
            torch.testing.assert_close(got, expected.reshape(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_a_pipeline(memory: str, schedule: str) -> None:
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(8, 6, generator=generator) for _ in range(4)]

    def stack() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
        values = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            nn.init.normal_(parameter, generator=values)
        return made

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    single = stack()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    expected = []
    for x in data:
        loss = loss_fn(single(x), x[:, :2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    def body(world: px.Group) -> list[float]:
        mesh = px.Mesh(world, {"pipe": 2, "shard": 2})
        pipe = px.parallel.Pipeline(
            stack(),
            mesh["pipe"],
            schedule=schedule,
            microbatches=2,
            wrap=lambda stage: px.parallel.FSDP(stage, mesh["shard"]),
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for x in data:
            mine = x.chunk(2)[mesh.coordinate["shard"]]
            optimizer.zero_grad()
            loss = pipe.step(mine, mine[:, :2], loss_fn)
            optimizer.step()
            losses.append(mesh["shard"].all_reduce(torch.as_tensor(float(loss)).reshape(1), op="mean").item())
        return losses

    for losses in run_ranks(4, body):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_steps_between_evaluations_of_one_rank() -> None:
    def body(world: px.Group) -> float:
        model = px.parallel.FSDP(fresh(), world)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for step in range(3):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            model.zero_grad()
            if world.rank == 0:
                with torch.no_grad():
                    loss_of(model, batch(100))
        with torch.no_grad():
            return loss_of(model, batch(100)).item()

    found = run_ranks(2, body)
    assert found[0] == found[1]


def stack(*, seed: int = 1) -> nn.Module:
    """Layers, with a parameter that belongs to none of them."""
    made = nn.Module()
    made.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    made.extra = nn.Parameter(torch.ones(4))
    values = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=values)

    def forward(x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        for layer in made.layers:
            x = checkpoint(layer, x, use_reentrant=False).tanh() if recompute else layer(x).tanh()
        return x * made.extra

    made.forward = forward
    return made


def steps_of(model: Any, each: Any, count: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(count):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses.append(each(model, x))
        optimizer.step()
    return losses


@pytest.mark.parametrize("strategy", ["full", "grads", "none"])
@pytest.mark.parametrize("way", ["recompute", "evaluate before backward", "evaluate before step"])
def test_ways_to_make_a_step(memory: str, strategy: str, way: str) -> None:
    def each(model: Any, x: torch.Tensor) -> float:
        loss = model(x, recompute=way == "recompute").square().sum()
        if way == "evaluate before backward":
            with torch.no_grad():
                model(x + 1)
        loss.backward()
        if way == "evaluate before step":
            with torch.no_grad():
                model(x + 1)
        return float(loss.detach())

    expected = steps_of(stack(), lambda model, x: each(model, x))

    def body(world: px.Group) -> list[float]:
        return steps_of(px.parallel.FSDP(stack(), world, strategy=strategy, prefetch=2), each)

    for losses in run_ranks(2, body):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    def body(world: px.Group) -> None:
        net = stack()
        before = torch.optim.SGD(net.parameters(), lr=0.1)
        model = px.parallel.FSDP(net, world)
        around = nn.Sequential(model)
        for optimizer, words in ((before, "made before it was wrapped"), (None, "of the module inside")):
            found = optimizer or torch.optim.SGD(around.parameters(), lr=0.1)
            with pytest.raises(px.UsageError, match=words):
                found.step()
        assert {name for name in around.state_dict() if "layers" in name}  # it has the shards

    run_ranks(2, body)


def test_freezing_by_the_shards() -> None:
    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(stack(), world)
        shards = dict(model.named_parameters())
        for frozen in (True, False):
            shards["layers.1.weight"].requires_grad_(not frozen)
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            assert (shards["layers.1.weight"].grad is None) == frozen
            assert shards["layers.0.weight"].grad is not None

    run_ranks(2, body)


def test_wrappers_are_given_back() -> None:
    def body(world: px.Group) -> list[int]:
        counts = []
        for _ in range(4):
            model = px.parallel.FSDP(stack(), world)
            model(torch.ones(1, 4)).sum().backward()
            del model
            gc.collect()
            counts.append(Path("/proc/self/maps").read_text().count("phalanx-parameters"))
        return counts

    assert run_ranks(2, body, backend="mesh") == [[0] * 4] * 2


def test_states_fit_those_of_the_plain_module() -> None:
    def body(world: px.Group) -> None:
        model = px.parallel.FSDP(fresh(), world)
        plain = fresh(5)
        plain.load_state_dict(model.full_state_dict())
        assert torch.equal(plain.embedding.weight, fresh().embedding.weight)
        model.load_state_dict(fresh(6).state_dict())
        assert torch.equal(model.full_state_dict()["head.weight"], fresh(6).head.weight)
        short = {name: value for name, value in fresh().state_dict().items() if name != "scale"}
        with pytest.raises(px.UsageError, match="it has no scale"):
            model.load_state_dict(short)
        with pytest.raises(px.UsageError, match="more is not known"):
            model.load_state_dict({**fresh().state_dict(), "more": torch.ones(1)})

    run_ranks(2, body)


def test_memory_is_not_shared_where_that_is_forbidden() -> None:
    def body(world: px.Group) -> bool:
        model = px.parallel.FSDP(stack(), world)
        return any(isinstance(unit, units.SharedUnit) for unit in model._units)

    assert run_ranks(2, body, backend="mesh", options=px.Options(transport="tcp")) == [False, False]
    assert run_ranks(2, body, backend="mesh") == [True, True]


def test_one_warning_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr(units, "share_memory", lambda *_: tries.append(1))
    run_ranks(1, lambda world: px.parallel.FSDP(stack(), world))
    assert not tries  # alone, there is nobody to share with
    run_ranks(2, lambda world: px.parallel.FSDP(stack(), world))
    assert len(tries) == 2  # each rank once, for all layers


def test_a_backward_that_raises_on_one_rank(memory: str) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("bad luck")

    def body(world: px.Group) -> list[float]:
        net = fresh()
        bad = net.layers[1].register_forward_hook(lambda _module, _inputs, output: Bad.apply(output))
        if world.rank != 1:
            bad.remove()
        model = px.parallel.FSDP(net, world)
        loss = loss_of(model, batch(0))
        with pytest.raises(ArithmeticError if world.rank == 1 else px.Desync) as caught:
            loss.backward()
        if memory == "gathered":
            return []  # some ranks gather what the one that failed does not: they cannot go on
        if world.rank != 1:
            assert "rank 1 did not finish this backward" in str(caught.value)
        bad.remove()
        del loss, caught
        gc.collect()
        assert all(shard.grad is None for shard in model.parameters())
        model.zero_grad()
        return train(world, lambda _: model)

    found = run_ranks(3, body)
    assert memory == "gathered" or found[0] == pytest.approx(train(None), rel=1e-5)


@pytest.mark.parametrize("strategy", ["full", "grads"])
def test_a_lost_rank_is_named(strategy: str) -> None:
    def body(world: px.Group) -> Any:
        model = px.parallel.FSDP(fresh(), world, strategy=strategy)
        loss = loss_of(model, batch(0))
        if world.rank == 2:
            faults.kill_self()
        with pytest.raises(px.PeerLost) as caught:
            loss.backward()
        return caught.value.peer

    assert run_ranks(3, body, backend="mesh", may_die=[2])[:2] == [2, 2]


def test_the_first_rank_gives_the_values() -> None:
    def body(world: px.Group) -> Any:
        with torch.device("cpu" if world.rank == 0 else "meta"):
            model = Net()
        if world.rank == 0:
            model.load_state_dict(fresh(5).state_dict())
        return px.parallel.FSDP(model, world).full_state_dict()

    expected = fresh(5).state_dict()
    for found in run_ranks(2, body, backend="mesh"):
        assert found.keys() >= {name for name in expected if name != "head.weight"}
        assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["full", "grads", "mesh"])
def test_checkpoints_go_on_with_other_numbers_of_ranks(tmp_path: Path, ranks: int, strategy: str) -> None:
    if strategy == "mesh" and ranks == 1:
        pytest.skip("a mesh of two replicas needs two ranks")

    def steps(world: px.Group, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = loss_of(model, batch(step).chunk(world.world_size)[world.rank])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(world.all_reduce(loss.detach().reshape(1), op="mean").item())
        return losses

    def optimizer_of(model: Any) -> Any:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)

    def saves(world: px.Group) -> list[float]:
        model = px.parallel.FSDP(fresh(), world)
        optimizer = optimizer_of(model)
        losses = steps(world, model, optimizer, 0, 3)
        px.checkpoint.save(tmp_path / "a", {"model": model, "optimizer": model.optimizer_state(optimizer)}, world)
        return losses

    def loads(world: px.Group) -> list[float]:
        model = wrapped(world, strategy, fresh(9))
        optimizer = optimizer_of(model)
        px.checkpoint.load(tmp_path / "a", world, like={"model": model, "optimizer": model.optimizer_state(optimizer)})
        return steps(world, model, optimizer, 3, 6)

    expected = train(None, steps=6)
    assert run_ranks(3, saves)[0] == pytest.approx(expected[:3], rel=1e-5)
    assert run_ranks(ranks, loads)[0] == pytest.approx(expected[3:], rel=1e-4)
    # And without any wrapper.
    model = fresh(9)
    found = px.checkpoint.load(tmp_path / "a")["model"]
    model.load_state_dict(found, strict=False)
    assert loss_of(model, batch(3)).item() == pytest.approx(expected[3], rel=1e-5)


def test_refusals() -> None:
    def body(world: px.Group) -> None:
        fsdp = px.parallel.FSDP
        for wrong, words in [
            (lambda: fsdp(fresh(), world, strategy="half"), "strategy='half' is not valid"),
            (lambda: fsdp(fresh(), world, mixed_precision=torch.int8), "expected a floating-point dtype"),
            (lambda: fsdp(fresh(), world, prefetch=-1), "prefetch=-1"),
            (lambda: fsdp(nn.ReLU(), world), "no parameters that require gradients"),
            (lambda: fsdp(nn.Linear(2, 2, device="meta"), world), "is on the meta device on rank 0"),
            (lambda: fsdp(nn.Sequential(nn.Embedding(3, 2, sparse=True)), world), "the embedding '0' makes sparse"),
        ]:
            with pytest.raises(px.UsageError) as caught:
                wrong()
            assert words in str(caught.value)
        model = fsdp(fresh(), world)
        with pytest.raises(px.UsageError, match="cannot be moved or converted"):
            model.half()
        with pytest.raises(px.UsageError, match="it has no embedding.weight, other is not known"):
            model.load_state_dict({"other": torch.ones(1)})
        with pytest.raises(px.UsageError, match="not the FSDP's"):
            model.optimizer_state(torch.optim.SGD(fresh().parameters(), lr=0.1)).state_dict()

    run_ranks(1, body)


def test_different_modules() -> None:
    def body(world: px.Group) -> None:
        with pytest.raises(px.Desync, match="the ranks have different modules") as caught:
            px.parallel.FSDP(nn.Linear(WORDS, 2 + world.rank), world)
        assert "bias: (2,) torch.float32 on ranks 0 / (3,) torch.float32 on ranks 1" in str(caught.value)

    run_ranks(2, body)
