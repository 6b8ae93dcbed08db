"""CUDA tensors on `"phalanx"`: all operations of torch.distributed, and training, on one GPU that the ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.gpu import needs_gpu
from tests.torch_backend.support import all_gather_single, reduce_scatter_single, together
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


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "phalanx"])
def test_training(how: str) -> None:
    """The losses of two ranks are those of one process."""
    found = together(2, training, how, timeout=100)
    assert found[0] == found[1]
    (alone,) = together(1, training, "alone", timeout=100)
    assert found[0] == pytest.approx(alone, rel=1e-4)
