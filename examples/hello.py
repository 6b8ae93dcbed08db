"""The first steps: who am I, the mean over all ranks, a message that goes around.

phalanx run -n 4 examples/hello.py
python examples/hello.py                    (a world of one)
"""

import numpy as np

import phalanx as px

with px.init() as world:
    mean = np.full(1, world.rank, np.float32)
    world.all_reduce(mean, op="mean")  # in place: the mean over all ranks, the same bits on each
    print(f"Hello from rank {world.rank} of {world.world_size}; the mean of all ranks is {mean[0]}", flush=True)
    world.barrier()  # nobody goes on before everybody is here

    # A ring: each rank adds its number to what it got from the left and hands it on to the right.
    left, right = (world.rank - 1) % world.world_size, (world.rank + 1) % world.world_size
    if world.world_size == 1:
        print("Alone: start me with 'phalanx run -n 4' to see messages", flush=True)
    elif world.rank == 0:
        world.send(np.zeros(1), right)
        total = world.recv(src=left)  # a new array, of the shape and dtype that was sent
        print(f"The sum of all ranks went around the ring: {total[0]:.0f}", flush=True)
    else:
        world.send(world.recv(src=left) + world.rank, right)
