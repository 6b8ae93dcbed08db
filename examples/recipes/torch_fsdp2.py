"""torch's FSDP2 on Phalanx, and hybrid sharding (HSDP) on a mesh with two axes.

phalanx run -n 4 examples/recipes/torch_fsdp2.py
phalanx run -n 4 examples/recipes/torch_fsdp2.py --replicas 2
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="phalanx")
    parser.add_argument("--replicas", type=int, default=1, help="more than 1: hybrid sharding")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    if args.replicas == 1:
        mesh = init_device_mesh("cpu", (ranks,))
    else:  # parameters are sharded along the last axis, and the same along the first
        shape = (args.replicas, ranks // args.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)], nn.Linear(32, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(16, 32, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / ranks:.5f}", flush=True)

    whole = sum(parameter.numel() for parameter in model.parameters())
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    if rank == 0:
        print(f"this rank has {mine} of {whole} parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
