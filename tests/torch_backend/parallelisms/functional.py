"""Functional collectives: those that return a new tensor, as DTensor and compiled programs use them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from .common import Part, digest

OPS: Any = torch.ops._c10d_functional


def _name() -> str:
    name: str = dist.distributed_c10d._get_default_group().group_name
    return name


def native() -> Any:
    """Every operator that C++ knows."""
    rank, ranks, name = dist.get_rank(), dist.get_world_size(), _name()
    x = torch.arange(4.0 * ranks) + rank
    short = torch.arange(3.0) * (rank + 1)
    wait = OPS.wait_tensor
    found = {
        "all_reduce": [wait(OPS.all_reduce(x, kind, name)) for kind in ("sum", "product", "min", "max")],
        "all_reduce_": [wait(OPS.all_reduce_(x.clone(), "sum", name))],
        "all_reduce_coalesced": [wait(t) for t in OPS.all_reduce_coalesced([x, short], "sum", name)],
        "all_reduce_coalesced_": [wait(t) for t in OPS.all_reduce_coalesced_([x.clone(), short.clone()], "sum", name)],
        "all_gather": [wait(OPS.all_gather_into_tensor(short, ranks, name))],
        "all_gather_out": [wait(OPS.all_gather_into_tensor_out(short, ranks, name, out=torch.empty(3 * ranks)))],
        "all_gather_coalesced": [wait(t) for t in OPS.all_gather_into_tensor_coalesced([x, short], ranks, name)],
        "reduce_scatter": [wait(OPS.reduce_scatter_tensor(x, "sum", ranks, name))],
        "reduce_scatter_out": [wait(OPS.reduce_scatter_tensor_out(x, "sum", ranks, name, out=torch.empty(4)))],
        "reduce_scatter_coalesced": [
            wait(t) for t in OPS.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", ranks, name)
        ],
        "all_to_all": [wait(OPS.all_to_all_single(x, [4] * ranks, [4] * ranks, name))],
        "broadcast": [wait(OPS.broadcast(x, 1, name))],
        "broadcast_": [wait(OPS.broadcast_(x.clone(), 1, name))],
    }
    return [f"{operation} {digest(tensors)}" for operation, tensors in found.items()]


def by_their_python_names() -> Any:
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    x = torch.arange(4.0 * ranks).reshape(2, -1) + rank
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    found = [
        functional.all_reduce(x, "sum", world),
        functional.all_reduce(x, "max", list(range(ranks))),
        functional.all_reduce(x, "sum", (mesh, 0)),
        functional.all_gather_tensor(x, 0, world),
        functional.all_gather_tensor(x, 1, (mesh, 0)),
        functional.reduce_scatter_tensor(x, "sum", 1, world),
        functional.reduce_scatter_tensor(x, "sum", 0, (mesh, 0)),
        *functional.all_reduce_coalesced([x, x + 1], "sum", world),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], world),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [1, 1], world),
        functional.all_to_all_single(x.T.contiguous(), None, None, world),
        functional.broadcast(x, 1, world),
        functional.permute_tensor(x.flatten(), [(i + 1) % ranks for i in range(ranks)], world),
    ]
    return [digest([tensor + 0]) for tensor in found]


def uneven_all_to_all() -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sending = [1 + (rank + other) % 3 for other in range(ranks)]
    x = torch.arange(float(sum(sending))) + 100 * rank
    return digest([functional.all_to_all_single(x, sending, sending, dist.group.WORLD) + 0])


def with_gradients() -> Any:
    ranks, world = dist.get_world_size(), dist.group.WORLD
    x = (torch.arange(4.0 * ranks) + dist.get_rank()).requires_grad_()
    losses = []
    for function in (
        lambda: functional.all_gather_tensor_autograd(x, 0, world),
        lambda: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world),
        lambda: functional.all_to_all_single_autograd(x, [4] * ranks, [4] * ranks, world),
    ):
        x.grad = None
        loss = (function() * (1 + dist.get_rank())).pow(2).sum()
        loss.backward()
        assert x.grad is not None
        losses += [float(loss), digest([x.grad])]
    return losses


def with_gradients_of_torch_nn() -> Any:
    from torch.distributed import nn as collectives

    x = (torch.arange(4.0) + dist.get_rank()).requires_grad_()
    (collectives.functional.all_reduce(x).pow(2).sum() + collectives.functional.broadcast(x, 1).sum()).backward()
    torch.cat(collectives.functional.all_gather(x)).pow(2).sum().backward()
    assert x.grad is not None
    return digest([x.grad])


PARTS: list[Part] = [native, by_their_python_names, uneven_all_to_all, with_gradients, with_gradients_of_torch_nn]
