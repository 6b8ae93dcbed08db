"""NCCL beside Phalanx, by `"cpu:phalanx,cuda:nccl"`. Needs a GPU; NCCL lets only one rank of a group use it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import together
from torch import nn

BOTH = "cpu:phalanx,cuda:nccl"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use")


def test_each_device_has_its_own() -> None:
    """Tensors on the CPU go to Phalanx, those on the GPU to NCCL, in one group."""

    def body(rank: int) -> None:
        group = dist.distributed_c10d._get_default_group()
        assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
        here = torch.full((1000,), rank + 1.0)
        dist.all_reduce(here)
        assert here.eq(3).all()
        alone = [dist.new_group([0], backend=BOTH), dist.new_group([1], backend=BOTH)][rank]
        there = torch.full((1000,), rank + 1.0, device="cuda")
        dist.all_reduce(there, group=alone)
        gathered = torch.empty_like(there)
        dist.all_gather_into_tensor(gathered, there, group=alone)
        dist.broadcast(there, rank, group=alone)
        torch.cuda.synchronize()
        assert gathered.eq(rank + 1).all()
        on_both = there.cpu()
        dist.all_reduce(on_both)
        assert on_both.eq(3).all()

    together(2, body, backend=BOTH, timeout=120)


def test_training_on_the_gpu() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        x, y = torch.randn(64, 16, device="cuda"), torch.randn(64, 4, device="cuda")
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        found = [None]
        dist.all_gather_object(found, losses)
        assert found == [losses]
        dist.barrier()

    together(1, body, backend=BOTH, timeout=120)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus_of_their_own() -> None:
    def body(rank: int) -> None:
        there = torch.full((1000,), rank + 1.0, device=f"cuda:{rank}")
        dist.all_reduce(there)
        assert there.eq(3).all()

    together(2, body, backend=BOTH, timeout=120)
