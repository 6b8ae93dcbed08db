"""More than arrays: dicts, lists, text and numbers, with arrays inside. Nothing is unpickled on the way.

phalanx run -n 4 examples/objects.py
python examples/objects.py                  (a world of one)
"""

import os

import numpy as np

import phalanx as px

with px.init() as world:
    if world.rank == 0:
        # One rank decides, all know.
        settings = {"name": "small", "rate": 0.1, "layers": [64, 128, 10]}
        for rank in range(1, world.world_size):
            world.send_object(settings, rank)
        print(f"rank 0 sent the settings {settings} to {world.world_size - 1} others", flush=True)

        # Answers from anyone, in the order in which they come.
        for _ in range(1, world.world_size):
            answer = world.recv_object()
            shape = answer.data["weights"].shape
            print(f"rank {answer.src} is process {answer.data['process']} and has weights of shape {shape}", flush=True)
    else:
        settings = world.recv_object(src=0)
        # The array travels as it is: no copy into a message, no pickle.
        weights = np.full(settings["layers"][:2], world.rank, np.float32)
        world.send_object({"process": os.getpid(), "weights": weights}, dst=0)
