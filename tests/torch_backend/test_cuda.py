"""CUDA tensors on `"phalanx"`: all operations of torch.distributed, and training, on one GPU that the ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.gpu.gpu import needs_gpu
from tests.torch_backend.support import (
    all_gather_single,
    functional_all_gather,
    functional_reduce_scatter,
    reduce_scatter_single,
    together,
)
from torch import nn

pytestmark = needs_gpu


def tensor(count: int, *, rank: int | None = None, dtype: Any = torch.float32) -> Any:
    rank = dist.get_rank() if rank is None else rank
    return torch.arange(count, device="cuda").add(rank * 3).remainder(101).to(dtype)


def operations(rank: int, count: int, later: bool) -> None:
    size = dist.get_world_size()
    every = [tensor(count, rank=r) for r in range(size)]
    total = sum(every)
    produced = torch.cuda.Stream()

    def done(work: Any) -> None:
        if later:
            work.wait()

    for side in (torch.cuda.default_stream(), produced):
        with torch.cuda.stream(side):
            x = tensor(count)
            done(dist.all_reduce(x, async_op=later))
            assert x.equal(total)
            x = tensor(count)
            done(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=later))
            assert x.equal(total / size)
            x = tensor(count)
            done(dist.reduce(x, 1, async_op=later))
            assert x.equal(total if rank == 1 else every[rank])
            x = tensor(count)
            done(dist.broadcast(x, 1, async_op=later))
            assert x.equal(every[1])
            out = torch.empty(count * size, device="cuda")
            done(all_gather_single(out, tensor(count), async_op=later))
            assert out.equal(torch.cat(every))
            outs = [torch.empty(count, device="cuda") for _ in range(size)]
            done(dist.all_gather(outs, tensor(count), async_op=later))
            assert all(map(torch.equal, outs, every))
            outs = [torch.empty(count + r, device="cuda") for r in range(size)]
            done(dist.all_gather(outs, tensor(count + rank), async_op=later))
            assert all(torch.equal(outs[r], tensor(count + r, rank=r)) for r in range(size))
            whole = [tensor(count * size, rank=r) for r in range(size)]
            part = torch.empty(count, device="cuda")
            done(reduce_scatter_single(part, whole[rank].clone(), async_op=later))
            assert part.equal(sum(whole).chunk(size)[rank])
            done(dist.reduce_scatter(part, list(whole[rank].chunk(size)), async_op=later))
            assert part.equal(sum(whole).chunk(size)[rank])
            outs = [torch.empty(count, device="cuda") for _ in range(size)] if rank == 0 else None
            done(dist.gather(tensor(count), outs, 0, async_op=later))
            assert outs is None or all(map(torch.equal, outs, every))
            done(dist.scatter(part, every if rank == 0 else None, 0, async_op=later))
            assert part.equal(every[rank])
            out = torch.empty(count * size, device="cuda")
            done(dist.all_to_all_single(out, whole[rank], async_op=later))
            assert out.equal(torch.cat([w.chunk(size)[rank] for w in whole]))
            outs = [torch.empty(count + rank + r, device="cuda") for r in range(size)]
            ins = [tensor(count + rank + r) for r in range(size)]
            done(dist.all_to_all(outs, ins, async_op=later))
            assert all(torch.equal(outs[r], tensor(count + rank + r, rank=r)) for r in range(size))
            pair = [tensor(count), tensor(5, dtype=torch.int64)]
            with dist._coalescing_manager(async_ops=later) as manager:
                for x in pair:
                    dist.all_reduce(x)
            if later:
                manager.wait()
            assert pair[0].equal(total)
            if rank < 2:
                x = torch.empty(count, device="cuda")
                works = [dist.irecv(x, 1 - rank), dist.isend(tensor(count), 1 - rank)]
                for work in works:
                    work.wait()
                assert x.equal(every[1 - rank])
            half = tensor(count, dtype=torch.bfloat16)
            dist.all_reduce(half)
            assert half.equal(sum(e.bfloat16().float() for e in every).bfloat16())
            eighth = tensor(count).to(torch.float8_e4m3fn)
            dist.broadcast(eighth, 0)
            assert eighth.view(torch.uint8).equal(every[0].to(torch.float8_e4m3fn).view(torch.uint8))
            here = torch.ones(3)
            dist.all_reduce(here)
            assert here.tolist() == [size] * 3


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("count", [5, 50_001])
def test_operations(count: int, later: bool) -> None:
    together(2, operations, count, later, timeout=100)


def behind_others(rank: int) -> None:
    """A synchronous operation on a side stream that stands in line behind asynchronous ones."""
    side = torch.cuda.Stream()
    first = torch.ones(1 << 24, device="cuda")
    for _ in range(5):
        works = [dist.all_reduce(first, dist.ReduceOp.MAX, async_op=True) for _ in range(4)]
        with torch.cuda.stream(side):
            big = torch.randn(2048, 2048, device="cuda")
            for _ in range(20):
                big = (big @ big).clamp_(-1, 1)
            x = torch.full((100_000,), rank + 1.0, device="cuda") + 0 * big.sum()
            dist.all_reduce(x)
            assert x.unique().tolist() == [3.0]
        for work in works:
            work.wait()


def test_synchronous_ones_behind_asynchronous_ones() -> None:
    together(2, behind_others, timeout=100)


def futures(rank: int) -> None:
    x = torch.full((100_000,), rank + 1.0, device="cuda")
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().unique().tolist() == [6.0]
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert dist.group.WORLD._device_types == [torch.device("cpu"), torch.device("cuda")]


def test_futures() -> None:
    together(2, futures, timeout=100)


def options(rank: int) -> None:
    """Options that are given one by one, to the methods of the group."""
    group = dist.group.WORLD
    x = torch.full((100_000,), rank + 1.0, device="cuda")
    group.allreduce([x], op=dist.ReduceOp.MAX).wait()
    assert x.unique().tolist() == [2.0]
    x = torch.full((3,), rank + 1.0, device="cuda")
    group.allreduce(x, dist.ReduceOp.PRODUCT).wait()
    assert x.tolist() == [2.0] * 3
    x = torch.full((3,), rank + 1.0, device="cuda")
    group.broadcast(x, root=1).wait()
    assert x.tolist() == [2.0] * 3
    x = torch.full((3,), rank + 1.0, device="cuda")
    group.reduce(x, 1, dist.ReduceOp.MIN).wait()
    assert x.tolist() == [rank + 1.0 if rank == 0 else 1.0] * 3
    outs = [[torch.empty(2, device="cuda") for _ in range(2)]] if rank == 1 else []
    group.gather(outs, [torch.full((2,), rank + 1.0, device="cuda")], root=1).wait()
    assert rank == 0 or [out.tolist() for out in outs[0]] == [[1.0] * 2, [2.0] * 2]
    part = torch.empty(2, device="cuda")
    group.reduce_scatter([part], [[torch.full((2,), rank + 1.0, device="cuda")] * 2], op=dist.ReduceOp.MAX).wait()
    assert part.tolist() == [2.0] * 2


def test_options_that_are_given_one_by_one() -> None:
    together(2, options, timeout=100)


def messages(rank: int) -> None:
    x = torch.full((50_000,), rank + 1.0, device="cuda")
    got = torch.empty(50_000, device="cuda")
    if rank == 0:
        assert dist.recv(got) == 1
        assert got.unique().tolist() == [2.0]
        dist.send(x.reshape(2, -1).t(), 1, tag=3)
    else:
        dist.send(x, 0)
        turned = torch.empty(2, 25_000, device="cuda").t()
        dist.recv(turned, 0, tag=3)
        assert turned.unique().tolist() == [1.0]
    own = torch.empty(3, device="cuda")
    works = [dist.irecv(own, rank), dist.isend(x[:3], rank)]
    for work in works:
        work.wait()
    assert own.tolist() == [rank + 1.0] * 3
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.unique().tolist() == [2.0 - rank]
    objects = [{"rank": 0}] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(objects, 1, device=torch.device("cuda"))
    else:
        dist.recv_object_list(objects, 0, device=torch.device("cuda"))
    assert objects == [{"rank": 0}]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, torch.full((2,), rank + 1.0, device="cuda"))
    assert [value.tolist() for value in every] == [[1.0, 1.0], [2.0, 2.0]]
    first = ["first"] if rank == 0 else [None]
    dist.broadcast_object_list(first, device=torch.device("cuda"))
    assert first == ["first"]


def test_messages_and_objects() -> None:
    together(2, messages, timeout=100)


def sparse(rank: int) -> None:
    place = torch.tensor([[rank, 2]], device="cuda")
    x = torch.sparse_coo_tensor(place, torch.ones(2, 3, device="cuda"), (4, 3))
    dist.all_reduce(x)
    assert x.is_cuda
    assert x.to_dense()[:, 0].tolist() == [1.0, 1.0, 2.0, 0.0]


def test_sparse_tensors() -> None:
    together(2, sparse, timeout=100)


def functional_ones(rank: int) -> None:
    group = dist.group.WORLD
    for count in (2, 100_000):
        x = torch.full((count,), rank + 1.0, device="cuda")
        assert functional.all_reduce(x, "sum", group).unique().tolist() == [3.0]
        assert functional_all_gather(x, 0, group).unique().tolist() == [1.0, 2.0]
        assert functional_reduce_scatter(x, "sum", 0, group).unique().tolist() == [3.0]
        half = [count // 2] * 2
        assert functional.all_to_all_single(x, half, half, group).unique().tolist() == [1.0, 2.0]
        assert functional.broadcast(x, 1, group).unique().tolist() == [2.0]
        for found in functional.all_reduce_coalesced([x, x], "sum", group):
            assert found.unique().tolist() == [3.0]


def test_functional() -> None:
    together(2, functional_ones, timeout=100)


def distributed_tensors(rank: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (2,))
    x = torch.arange(8.0, device="cuda").reshape(4, 2)
    spread = distribute_tensor(x, mesh, [Shard(0)])
    assert spread.redistribute(mesh, [Replicate()]).to_local().equal(x)
    assert spread.redistribute(mesh, [Shard(1)]).full_tensor().equal(x)
    part = DTensor.from_local(torch.ones(4, device="cuda"), mesh, [Partial()])
    assert part.redistribute(mesh, [Shard(0)]).to_local().tolist() == [2.0] * 2
    assert part.full_tensor().tolist() == [2.0] * 4
    dcp.save({"x": spread}, checkpoint_id=folder)
    loaded = {"x": distribute_tensor(torch.zeros_like(x), mesh, [Shard(0)])}
    dcp.load(loaded, checkpoint_id=folder)
    assert loaded["x"].full_tensor().equal(x)


def test_distributed_tensors_and_checkpoints(tmp_path: Path) -> None:
    together(2, distributed_tensors, str(tmp_path), timeout=100)


def groups(rank: int) -> None:
    pair, alone = dist.new_group([1, 0]), [dist.new_group([0]), dist.new_group([1])]
    x = torch.full((100_000,), rank + 1.0, device="cuda")
    dist.all_reduce(x, group=pair)
    assert x.unique().tolist() == [3.0]
    dist.all_reduce(x, group=alone[rank])
    assert x.unique().tolist() == [3.0]
    dist.destroy_process_group(pair)
    dist.barrier(device_ids=[0])
    dist.group.WORLD.monitored_barrier()


def test_groups() -> None:
    together(2, groups, timeout=100)


def training(rank: int, how: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)).cuda()
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.5)
    elif how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "phalanx":
        import phalanx as px

        model = px.parallel.DDP(model, dist.group.WORLD.group)
    elif how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cuda", 0))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(6):
        x, y = (torch.randn(64, n, device="cuda", generator=generator) for n in (64, 4))
        mine = slice(None) if how == "alone" else slice(rank * 32, rank * 32 + 32)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if how != "alone":
            dist.all_reduce(loss, dist.ReduceOp.AVG)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2", "phalanx"])
def test_training(how: str) -> None:
    """The losses of two ranks are those of one process."""
    found = together(2, training, how, timeout=100)
    assert found[0] == found[1]
    (alone,) = together(1, training, "alone", timeout=100)
    assert found[0] == pytest.approx(alone, rel=1e-4)


class Stage(nn.Module):  # type: ignore[misc]
    """A layer whose gradient lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Any) -> Any:
        return torch.einsum("abc,cd->bad", x, self.weight).tanh().contiguous()


def pipeline(rank: int, how: str) -> list[float]:
    """torch's own pipeline, or the same stages one after another."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    stages = [Stage().cuda() for _ in range(2)]
    x = torch.randn(16, 16, 64, device="cuda")
    mine = nn.ModuleList(stages) if how == "alone" else stages[rank]
    optimizer = torch.optim.SGD(mine.parameters(), 0.5)
    if how != "alone":
        stage = PipelineStage(mine, rank, 2, torch.device("cuda"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        if how == "alone":
            found = [nn.functional.mse_loss(stages[1](stages[0](part)), part) for part in x.chunk(4)]
            (sum(found) / 4).backward()
        else:
            found = []
            last = {"target": x, "losses": found} if rank == 1 else {}
            schedule.step(*([x] if rank == 0 else []), **last)
        optimizer.step()
        losses += [loss.item() for loss in found]
    return losses


def test_pipeline_of_torch() -> None:
    _, found = together(2, pipeline, "pipeline", timeout=100)
    (alone,) = together(1, pipeline, "alone", timeout=100)
    assert found == pytest.approx(alone, rel=1e-4)
