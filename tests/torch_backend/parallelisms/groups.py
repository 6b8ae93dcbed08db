"""Sub-groups, meshes and the collectives that other parts do not reach."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import nn as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._collective_utils import mesh_broadcast, mesh_scatter

from .common import Part, digest


def _sum(group: Any = None) -> float:
    tensor = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def sub_groups() -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair, pairs = dist.new_subgroups(2)
    halves, _ = dist.new_subgroups_by_enumeration([list(range(0, ranks, 2)), list(range(1, ranks, 2))])
    same = [other for other in range(ranks) if other % 2 == rank % 2]
    local = dist.new_group(same, use_local_synchronization=True, timeout=timedelta(seconds=30), group_desc="local")
    found = [_sum(pair), _sum(halves), _sum(local), _sum()]
    found += [dist.get_group_rank(pair, rank), dist.get_global_rank(pair, 0), len(pairs)]
    for group in (pair, halves, local):
        assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
        dist.destroy_process_group(group)
    return found


def meshes() -> Any:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
    flat = mesh["a", "b"]._flatten("ab")
    again = DeviceMesh.from_group(
        [mesh.get_group("a"), mesh.get_group("b")], "cpu", mesh.mesh.tolist(), mesh_dim_names=("a", "b")
    )
    by_hand = DeviceMesh("cpu", torch.arange(ranks).flip(0))
    alone = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    found: list[Any] = [_sum(mesh.get_group(axis)) for axis in ("a", "b")]
    found += [_sum(flat.get_group()), _sum(again.get_group(0)), _sum(by_hand.get_group()), _sum(alone.get_group())]
    found += [mesh.get_coordinate(), mesh.get_local_rank("b"), mesh["b"].size(), flat.get_rank()]
    tensor = torch.full((4,), float(dist.get_rank()))
    mesh_broadcast(tensor, mesh, mesh_dim=0)
    part = torch.empty(3)
    mesh_scatter(part, [torch.full((3,), 10.0 * i) for i in range(2)], mesh, mesh_dim=0)
    found.append(digest([tensor, part, functional.all_gather_tensor(tensor, 0, (mesh, 1)) + 0]))
    found.append(digest([distribute_tensor(torch.randn(5, 3), by_hand, [Shard(0)])]))
    return found


def objects() -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, {"rank": rank, "words": "x" * rank})
    told = [rank, "a"]
    dist.broadcast_object_list(told, 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(ranks)) if rank == 0 else None, 0)
    gathered: list[Any] | None = [None] * ranks if rank == 1 else None
    dist.gather_object(("from", rank), gathered, 1)
    passed = [None]
    if rank == 0:
        dist.send_object_list([[1, 2, 3]], ranks - 1)
    elif rank == ranks - 1:
        dist.recv_object_list(passed, 0)
    return [everyone, told, mine, gathered, passed]


def lists() -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(3.0) + rank
    gathered = [torch.empty(3) for _ in range(ranks)] if rank == 1 else None
    dist.gather(mine, gathered, 1)
    part, swapped = torch.empty(3), [torch.empty(3) for _ in range(ranks)]
    dist.scatter(part, [mine * i for i in range(ranks)] if rank == 0 else None, 0)
    dist.all_to_all(swapped, [mine * i for i in range(ranks)])
    total = torch.empty(3)
    dist.reduce_scatter(total, [mine + i for i in range(ranks)])
    everyone = [torch.empty(3) for _ in range(ranks)]
    dist.all_gather(everyone, mine)
    reduced = mine.clone()
    dist.reduce(reduced, 1, dist.ReduceOp.MAX)
    kept = [reduced] if rank == 1 else []
    return digest([*(gathered or []), part, *swapped, total, *everyone, *kept])


def several_as_one() -> Any:
    """Gloo has no such thing, and what torch remembers of the attempt spoils what comes after."""
    if dist.get_backend() == "gloo":
        return "refused"
    ranks = dist.get_world_size()
    tensors = [torch.full((4,), float(dist.get_rank() + i)) for i in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as work:
        for tensor in tensors:
            dist.all_reduce(tensor)
    work.wait()
    outs = [torch.empty(4 * ranks) for _ in tensors]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for out, tensor in zip(outs, tensors, strict=True):
            dist.all_gather_into_tensor(out, tensor)
    parts = [torch.empty(4) for _ in outs]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for part, out in zip(parts, outs, strict=True):
            dist.reduce_scatter_tensor(part, out)
    return digest([*tensors, *outs, *parts])


def a_ring() -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, found = torch.arange(5.0) + rank, torch.empty(5)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, (rank + 1) % ranks), dist.P2POp(dist.irecv, found, (rank - 1) % ranks)]
    )
    for work in works:
        work.wait()
    anyone, source = torch.empty(1), -1
    if rank == 0:
        source = sum(dist.recv(anyone) for _ in range(ranks - 1))
    else:
        dist.send(torch.tensor([1.0]), 0, tag=0)
    return [digest([found]), source]


def all_reductions() -> Any:
    found = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8):
        for kind in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = (torch.arange(1, 6) + dist.get_rank()).to(dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, kind))
            found.append(tensor)
    for kind in ("BAND", "BOR", "BXOR"):
        tensor = torch.arange(1, 6) + dist.get_rank()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, kind))
        found.append(tensor)
    return digest(found)


def with_gradients() -> Any:
    """`torch.distributed.nn`: every collective that can be differentiated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = (torch.arange(4.0) + rank).requires_grad_()
    nn = collectives.functional
    results = [
        nn.all_reduce(x),
        nn.broadcast(x, 1),
        nn.reduce(x, 0),
        *nn.all_gather(x),
        *nn.gather(x, 1),
        nn.scatter([x * i for i in range(ranks)], 0),
        nn.reduce_scatter(torch.empty(4), [x * i for i in range(ranks)]),
        *nn.all_to_all([torch.empty(4) for _ in range(ranks)], [x * i for i in range(ranks)]),
        nn.all_to_all_single(torch.empty(ranks), torch.cat([x] * ranks)[:ranks]),
    ]
    torch.cat([result.reshape(-1) * (i + 1) for i, result in enumerate(results)]).pow(2).sum().backward()
    assert x.grad is not None
    return digest([x.grad])


PARTS: list[Part] = [
    sub_groups,
    meshes,
    objects,
    lists,
    several_as_one,
    a_ring,
    all_reductions,
    with_gradients,
]
