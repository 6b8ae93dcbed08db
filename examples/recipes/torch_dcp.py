"""torch.distributed.checkpoint (DCP) on Phalanx: saved by some ranks, loaded by others, and read by Phalanx.

phalanx run -n 4 examples/recipes/torch_dcp.py save /tmp/checkpoint
phalanx run -n 2 examples/recipes/torch_dcp.py load /tmp/checkpoint
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("folder")
    parser.add_argument("--backend", default="phalanx")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank = dist.get_rank()

    torch.manual_seed(0 if args.what == "save" else 1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))

    def step():
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if args.what == "load":
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=args.folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    losses = [step() for _ in range(3)]
    if args.what == "save":
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=args.folder)
        losses = [step() for _ in range(3)]  # the loader goes on with these
    if rank == 0:
        print(f"{args.what}: losses {', '.join(f'{loss:.5f}' for loss in losses)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
