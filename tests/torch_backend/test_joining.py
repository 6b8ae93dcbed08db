"""`join` of torch's data parallel: ranks with different numbers of inputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.gpu.gpu import needs_gpu
from tests.torch_backend.support import together
from torch import nn


def train(rank: int, device: str, by_all: bool) -> list[float]:
    """The gradient of each step: rank 1 has two steps more than rank 0."""
    net = nn.parallel.DistributedDataParallel(nn.Linear(5, 5, bias=False).to(device))
    gradients = []
    with net.join(divide_by_initial_world_size=by_all):
        for _ in range(3 + 2 * rank):
            net(torch.full((1, 5), 50.0, device=device)).sum().backward()
            gradient = net.module.weight.grad
            gradients.append(gradient.mean().item())
            net.zero_grad()
    x = torch.ones(3, device=device)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    return gradients


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("by_all", [False, True])
def test_gradients_are_those_of_the_ranks_that_are_left(device: str, by_all: bool) -> None:
    found = together(2, train, device, by_all, timeout=100)
    alone = 25.0 if by_all else 50.0
    assert found == [[50.0] * 3, [50.0] * 3 + [alone] * 2]
