"""Meshes of Phalanx and of torch, each made from the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.torch_backend.support import together
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import phalanx as px


def test_from_torch_and_back() -> None:
    def body(rank: int) -> None:
        theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        mesh = px.Mesh.from_torch(theirs)
        assert dict(mesh.shape) == {"replica": 2, "shard": 2}
        assert tuple(mesh.coordinate.values()) == tuple(theirs.get_coordinate())
        assert mesh["shard"].members == tuple(dist.get_process_group_ranks(theirs["shard"].get_group()))
        assert mesh["replica"].all_reduce(torch.tensor([rank])).tolist() == [2 * (rank % 2) + 2]
        again = mesh.to_torch()
        assert again == theirs
        assert again.mesh_dim_names == ("replica", "shard")
        part = mesh["shard",].to_torch()
        assert dist.get_process_group_ranks(part.get_group()) == list(mesh["shard"].members)
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=part.get_group())
        assert x.item() == 4 * (rank // 2) + 1

    together(4, body)


def test_a_device_mesh_of_some_ranks_in_an_order_of_its_own() -> None:
    def body(rank: int) -> None:
        theirs = DeviceMesh("cpu", [3, 1])
        if rank % 2:
            mesh = px.Mesh.from_torch(theirs)
            assert mesh.axes == ("axis0",)
            assert mesh["axis0"].members == (3, 1)
            assert mesh["axis0"].rank == (0 if rank == 3 else 1)

    together(4, body)


def test_refusals() -> None:
    def body(rank: int) -> None:
        world: px.Group = dist.group.WORLD.group
        with pytest.raises(px.UsageError, match="call to_torch before flatten"):
            px.Mesh(world, {"a": 2, "b": 1}).flatten().to_torch()
        with pytest.raises(px.UsageError, match="is not in <Group"):
            px.Mesh.from_torch(DeviceMesh("cpu", [0, 1]), world.subgroup([rank]))
        dist.destroy_process_group()

    together(2, body)


def test_torch_on_another_backend() -> None:
    def body(rank: int) -> None:
        with pytest.raises(px.UsageError, match="'gloo' \\(expected 'phalanx', or give a group\\)"):
            px.Mesh.from_torch(init_device_mesh("cpu", (2,)))
        dist.barrier()  # Gloo fails where a rank ends while another one still connects to it

    together(2, body, backend="gloo")
