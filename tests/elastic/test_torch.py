"""torch under `elastic.steps`: DDP, torch's DDP and torch's FSDP2 go on after a kill in the middle of a backward.

The losses are those of one process. Real processes, real kills.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cli.run.support import Runner, run  # noqa: F401
from torch import nn

import phalanx as px
from phalanx import Group, elastic
from phalanx.testing import faults, run_ranks

LENGTH, BATCH, TOTAL, WIDTH = 40, 12, 12, 8
ROOT = Path(__file__).resolve().parents[2]


class Trap(nn.Module):  # type: ignore[misc]
    """Passes everything on; its backward calls a function, when the layers behind it have their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1))
        self.spring: Any = lambda: None

    def forward(self, x: Any) -> Any:
        self.forwards += 1
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(lambda _grad: self.spring())
        return out


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), Trap(), nn.Tanh(), nn.Linear(16, 1)).double()


def make_data() -> Any:
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(LENGTH, width, dtype=torch.float64, generator=generator) for width in (WIDTH, 1))


def loss_of(model: Any, batch: Any, group: Group) -> Any:
    """This rank's share of the step's loss, so that the mean over the ranks is that of all samples."""
    inputs, targets = make_data()
    return ((model(inputs[batch]) - targets[batch]) ** 2).sum() * (group.world_size / BATCH)


class OwnDdp:
    """`px.parallel.DDP` in the state: nothing to do when the world changes."""

    def __init__(self, world: Group) -> None:
        self.model = px.parallel.DDP(make_model(), world, bucket_bytes=200)
        self.trap = self.model.module[1]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state = elastic.State(
            model=self.model, optimizer=self.optimizer, sampler=elastic.Sampler(LENGTH, BATCH), losses=[]
        )

    def begin(self, step: Any) -> None:
        pass

    def end(self) -> None:
        pass


class TorchDdp(OwnDdp):
    """torch's DDP: wrapped again around the same module."""

    def __init__(self, world: Group) -> None:
        module = make_model()
        self.trap = module[1]
        self.optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        self.state = elastic.State(
            module=module, optimizer=self.optimizer, sampler=elastic.Sampler(LENGTH, BATCH), losses=[]
        )

    def begin(self, step: Any) -> None:
        if step.changed:
            step.group.to_torch()
            self.model = nn.parallel.DistributedDataParallel(self.state.module, bucket_cap_mb=0.0002)


class TorchFsdp(OwnDdp):
    """torch's FSDP2: cut anew out of the whole state."""

    def __init__(self, world: Group) -> None:
        # These take some seconds, which the other ranks that join need not wait for.
        from torch.distributed import device_mesh, fsdp
        from torch.distributed.checkpoint import state_dict

        self.make_mesh = device_mesh.init_device_mesh
        self.fully_shard = fsdp.fully_shard
        self.states = state_dict
        self.whole = state_dict.StateDictOptions(full_state_dict=True)
        self.state = elastic.State(model={}, optimizer={}, sampler=elastic.Sampler(LENGTH, BATCH), losses=[])

    def begin(self, step: Any) -> None:
        if not step.changed:
            return
        step.group.to_torch()
        self.model = make_model()
        self.trap = self.model[1]
        mesh = self.make_mesh("cpu", (step.group.world_size,))  # also where there is a GPU
        for part in (*self.model, self.model):
            self.fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if step.number:
            self.states.set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=self.state.model,
                optim_state_dict=self.state.optimizer,
                options=self.whole,
            )

    def end(self) -> None:
        self.state.model, self.state.optimizer = self.states.get_state_dict(
            self.model, self.optimizer, options=self.whole
        )


KINDS = {"own DDP": OwnDdp, "DDP": TorchDdp, "FSDP2": TorchFsdp}


def train(
    world: Group, kind: str, victims: dict[int, int], *, clears_late: bool = False, min_size: int | None = None
) -> Any:
    """Trains; `victims` are the steps in whose backward a rank is killed.

    Args:
        clears_late: Whether gradients are dropped after their use, and not before the next backward.
    """
    torch.set_num_threads(1)
    trainer = KINDS[kind](world)
    me = world.members[world.rank]
    sizes, changes = [], 0
    for step in elastic.steps(world, trainer.state, total=TOTAL, timeout=60, min_size=min_size):
        with step:
            changes += step.changed
            trainer.begin(step)
            trainer.trap.spring = faults.kill_self if victims.get(me) == step.number else lambda: None
            if not clears_late:
                trainer.optimizer.zero_grad()
            loss = loss_of(trainer.model, step.batch, step.group)
            loss.backward()
            trainer.optimizer.step()
            if clears_late:
                trainer.optimizer.zero_grad()
            total = step.group.all_reduce(loss.detach().numpy().reshape(1).copy(), op="mean")
            trainer.end()
            trainer.state.losses = [*trainer.state.losses, float(total[0])]
        sizes.append(step.group.world_size)
    assert trainer.trap.forwards == TOTAL  # those of steps that were taken back do not count
    if dist.is_initialized():
        dist.destroy_process_group()
    return trainer.state.losses, sizes, changes


def on(n: int, kind: str, victims: dict[int, int], **options: Any) -> list[Any]:
    def work(world: Group) -> Any:
        return train(world, kind, victims, **options)

    return run_ranks(n, work, backend="mesh", may_die=list(victims), timeout=90)


@functools.cache
def reference() -> list[float]:
    """The losses of one process that knows nothing of all this."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler, losses = elastic.Sampler(LENGTH, BATCH), []
    inputs, targets = make_data()
    for _ in range(TOTAL):
        batch = sampler.batch()
        optimizer.zero_grad()
        loss = ((model(inputs[batch]) - targets[batch]) ** 2).sum() / BATCH
        loss.backward()
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_kills_in_the_middle_of_a_backward(kind: str) -> None:
    results = on(4, kind, {1: 4, 0: 8})
    for rank in (2, 3):
        losses, sizes, changes = results[rank]
        assert losses == pytest.approx(reference(), rel=1e-12)
        assert sizes == [4] * 5 + [3] * 5 + [2] * 4  # the steps of the kills come twice
        assert changes == 3
    assert results[2] == results[3]


@pytest.mark.parametrize("kind", ["own DDP", "DDP"])
def test_gradients_of_a_step_that_is_taken_back_are_dropped(kind: str) -> None:
    results = on(3, kind, {1: 4}, clears_late=True)
    assert results[0][0] == results[2][0] == pytest.approx(reference(), rel=1e-12)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_joins(kind: str, run: Runner) -> None:
    """The others wait for it, and have as many ranks as before."""
    text = f"""
        import phalanx as px
        from tests.elastic.test_torch import train
        with px.init(timeout=60) as world:
            print("losses", train(world, {kind!r}, {{1: 4}}, min_size=3)[0], flush=True)
    """
    job = run.start("--elastic", "3:3", run.script(text), env={"PYTHONPATH": str(ROOT)})
    job.finish(120)
    assert job.process.returncode == 0, job.err
    found = [ast.literal_eval(line) for line in re.findall(r"losses (.*)", job.out)]
    assert len(found) == 3
    assert found[0] == found[1] == found[2] == pytest.approx(reference(), rel=1e-12)
    run.assert_nothing_left(5)


def test_a_wrapper_goes_to_another_group() -> None:
    def work(world: Group) -> Any:
        torch.set_num_threads(1)
        layers = nn.Linear(2, 3), px.parallel.SyncBatchNorm(3, world), nn.Linear(3, 1)
        model = px.parallel.DDP(nn.Sequential(*layers), world)
        inputs = torch.arange(8.0).reshape(4, 2) + world.rank
        before = model(inputs).sum()
        pair = world.subgroup([0, 1]) if world.rank < 2 else None
        with model.join(), pytest.raises(px.UsageError, match="inside of join"):
            model.use_group(world.subgroup([world.rank]))
        if pair is None:
            return None
        model.use_group(pair)
        with pytest.raises(px.UsageError, match="have changed since this forward"):
            before.backward()
        model.zero_grad()
        model(inputs).square().sum().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    results = run_ranks(3, work, backend="mesh")
    assert results[0] == results[1] != None  # noqa: E711
    assert results[2] is None


def test_torch_keeps_a_world_that_the_program_made() -> None:
    def work(world: Group) -> Any:
        world.to_torch()
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(px.UsageError, match="has a process group of its own"):
            world.to_torch()
        dist.destroy_process_group()
        return x.item()

    assert run_ranks(2, work, backend="mesh") == [2.0, 2.0]
