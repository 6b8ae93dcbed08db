"""Ray actors that form a world: each is told its rank, where rank 0 is, and the job's secret.

python examples/recipes/ray_actors.py
"""

import secrets
import socket

import numpy as np
import ray

import phalanx as px

RANKS = 3


@ray.remote(num_cpus=1)
class Worker:
    def meeting_point(self):
        """An address of this actor's node, with a port that is free there."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{sock.getsockname()[1]}"

    def join(self, rank, master, token):
        self.world = px.init(rank=rank, world_size=RANKS, master=master, token=token)

    def step(self, value):
        return float(self.world.all_reduce(np.full(1000, value), op="mean")[0])

    def leave(self):
        self.world.close()


if __name__ == "__main__":
    ray.init(num_cpus=RANKS)
    workers = [Worker.remote() for _ in range(RANKS)]
    master = ray.get(workers[0].meeting_point.remote())
    token = secrets.token_hex(32)
    ray.get([worker.join.remote(rank, master, token) for rank, worker in enumerate(workers)])
    for step in range(3):
        print(f"step {step}:", ray.get([worker.step.remote(10.0 * step + rank) for rank, worker in enumerate(workers)]))
    ray.get([worker.leave.remote() for worker in workers])
    ray.shutdown()
