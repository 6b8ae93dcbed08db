# The cells of a notebook.

# %% Ranks may use what other cells have defined: it is copied to them.
import torch

import phalanx as px

RATE = 0.1


def data(rank, count=256):
    generator = torch.Generator().manual_seed(rank)
    points = torch.randn(count, 4, generator=generator)
    return points, points @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])


# %% The function that every rank runs. Its output appears under the cell.
def train(steps):
    with px.init() as world:
        torch.manual_seed(0)
        model = px.parallel.DDP(torch.nn.Linear(4, 1), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        points, values = data(world.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(points), values)
            loss.backward()
            optimizer.step()
        print(f"rank {world.rank}: loss {loss.item():.4f}")
        return model.module.weight.detach().numpy()


# %% The ranks start, train and end; the notebook has what they returned.
weights = px.launch(train, 2, 50)
weights[0].round(1).tolist()

# %% An error on a rank is an error of the cell, with the line that raised it.
px.launch(train, 2, "fifty")
