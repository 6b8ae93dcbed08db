"""torch.distributed.pipelining on Phalanx: a stage of the model on each rank.

phalanx run -n 2 examples/recipes/torch_pipelining.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS, MICROBATCHES = 5, 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="phalanx")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(ranks)]
    stage = PipelineStage(layers[rank], rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)

    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(32, 16, generator=data)
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=x.tanh(), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if rank == ranks - 1:
            print(f"step {step}: loss {sum(loss.item() for loss in losses) / MICROBATCHES:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
