"""DTensor, and models that are cut inside their layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .common import Part, digest, mlp, parameters, train


def _line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def redistribution() -> Any:
    """Every way from one placement to another, of shapes that the ranks can and cannot share evenly."""
    mesh, found = _line(), []
    for shape in ((8, 4), (5, 7), (1, 3)):
        tensor = torch.randn(shape)
        starts = [distribute_tensor(tensor, mesh, [place]) for place in (Shard(0), Shard(1), Replicate())]
        starts += [
            DTensor.from_local(tensor * (1 + dist.get_rank()), mesh, [Partial(kind)])
            for kind in ("sum", "avg", "max", "min")
        ]
        for start in starts:
            for place in (Replicate(), Shard(0), Shard(1)):
                there = start.redistribute(mesh, [place])
                found.append(digest([there, there.full_tensor()]))
    return found


def redistribution_on_two_axes() -> Any:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rows", "columns"))
    tensor = torch.randn(8, 6)
    placed = distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])
    ways = [[Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
    found = [digest([placed.redistribute(mesh, way)]) for way in ways]
    part = DTensor.from_local(tensor * (1 + dist.get_rank()), mesh, [Partial(), Replicate()], run_check=False)
    return [*found, float(part.full_tensor().sum()), digest([mesh["rows"].mesh, mesh["columns"].mesh])]


def operations() -> Any:
    mesh = _line()
    a = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]).requires_grad_()
    b = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]).requires_grad_()
    product = a @ b
    (product.softmax(-1).pow(2).sum() + product.mean()).backward()
    norm = torch.linalg.vector_norm(a.detach())
    assert a.grad is not None
    assert b.grad is not None
    return [digest([product.full_tensor(), a.grad.full_tensor(), b.grad.full_tensor()]), float(norm.full_tensor())]


def a_module() -> Any:
    mesh = _line()

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    module = distribute_module(
        mlp(),
        mesh,
        cut,
        lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
        lambda module, output, mesh: output.full_tensor(),
    )
    return [train(module, seed=1), parameters(module)]


def columns_and_rows() -> Any:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(mlp(), _line(), plan)
    return [train(module, seed=1), parameters(module)]


def sequence() -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Replicate()),
    }
    prepare = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),))
    module = parallelize_module(parallelize_module(module, _line(), plan), _line(), prepare)
    return [train(module, seed=1), parameters(module)]


def cross_entropy_of_shards() -> Any:
    mesh = _line()
    scores = distribute_tensor(torch.randn(6, 8), mesh, [Shard(1)]).requires_grad_()
    labels = torch.tensor([0, 3, 5, 7, 1, 2])
    with loss_parallel():
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
    assert scores.grad is not None
    return [float(loss), digest([scores.grad.full_tensor()])]


def embedding() -> Any:
    torch.manual_seed(0)
    module = parallelize_module(nn.Embedding(12, 8), _line(), RowwiseParallel(input_layouts=Replicate()))
    found = module(torch.tensor([0, 5, 11, 5]))
    found.pow(2).sum().backward()
    grad = module.weight.grad
    assert isinstance(grad, DTensor)
    return [digest([found]), digest([grad.full_tensor()])]


def with_sharded_data_parallel() -> Any:
    """Two axes: tensor parallel inside, FSDP2 outside."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    return [train(module, seed=mesh["dp"].get_local_rank()), parameters(module)]


PARTS: list[Part] = [
    redistribution,
    redistribution_on_two_axes,
    operations,
    a_module,
    columns_and_rows,
    sequence,
    cross_entropy_of_shards,
    embedding,
    with_sharded_data_parallel,
]
