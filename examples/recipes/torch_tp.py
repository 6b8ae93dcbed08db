"""torch's tensor parallelism on Phalanx: layers that are cut inside.

phalanx run -n 2 examples/recipes/torch_tp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.narrow(self.wide(x).relu())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="phalanx")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))

    torch.manual_seed(0)
    model = Net()
    # Each rank has some columns of the first layer and the rows of the second that go with them: one all_reduce.
    parallelize_module(model, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)  # the same on all ranks
    for step in range(STEPS):
        x = torch.randn(32, 16, generator=data)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    if rank == 0:
        print(f"this rank has {tuple(model.wide.weight.to_local().shape)} of {tuple(model.wide.weight.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
