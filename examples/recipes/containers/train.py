"""The program of the containers: every rank, in whichever container or pod it is, runs this."""

import numpy as np

import phalanx as px

# Containers may start minutes apart, if a machine has to fetch the image first: the world has ten minutes to form.
with px.init(timeout=600) as world:
    random = np.random.default_rng(world.rank)
    points = random.normal(size=(1000, 8))
    values = points @ np.arange(1.0, 9.0)
    weights = np.zeros(8)
    for _step in range(100):
        gradient = points.T @ (points @ weights - values) / len(values)
        weights -= 0.3 * world.all_reduce(gradient, op="mean")
    print(f"rank {world.rank} of {world.world_size}: {weights.round(3)}", flush=True)
