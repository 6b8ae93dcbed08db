"""The same on Phalanx: line by line from heat_mpi4py.py."""

import numpy as np

import phalanx as px

CELLS, STEPS = 30, 200

with px.init() as world:
    counts = [CELLS // world.world_size + (rank < CELLS % world.world_size) for rank in range(world.world_size)]
    rod = np.sin(np.arange(CELLS) / 3.0) if world.rank == 0 else None
    part = np.zeros(counts[world.rank] + 2)  # a cell of each neighbour at the ends
    part[1:-1] = world.scatter(rod, src=0, counts=counts if world.rank == 0 else "auto")
    left, right = world.rank - 1, world.rank + 1
    for _step in range(STEPS):
        sent = []
        if left >= 0:
            sent.append(world.isend(part[1:2], left))
        if right < world.world_size:
            sent.append(world.isend(part[-2:-1], right))
            world.recv(part[-1:], right)
        if left >= 0:
            world.recv(part[:1], left)
        for work in sent:
            work.wait()
        part[1:-1] += 0.25 * (part[:-2] - 2 * part[1:-1] + part[2:])
    energy = world.all_reduce(np.array([(part[1:-1] ** 2).sum()]))[0]
    warmest = world.all_reduce(part[1:-1].max(keepdims=True), op="max")
    everything = world.gather(part[1:-1], dst=0, counts="auto")
    if world.rank == 0:
        print(f"energy {energy:.12f}, warmest {warmest[0]:.12f}, sum {everything.sum():.12f}", flush=True)
