"""Actors of Ray that form a world, of which one dies while the others wait for it."""

from __future__ import annotations

import os
import secrets

import numpy as np
import ray

import phalanx as px
from phalanx.transports.tcp import free_port

RANKS = 3


@ray.remote(num_cpus=1)
class Worker:
    def join(self, rank: int, master: str, token: str) -> None:
        self.world = px.init(rank=rank, world_size=RANKS, master=master, token=token)

    def step(self) -> None:
        if self.world.rank == 2:
            os._exit(3)
        self.world.all_reduce(np.ones(10))


if __name__ == "__main__":
    ray.init(num_cpus=RANKS)
    workers = [Worker.remote() for _ in range(RANKS)]
    master, token = f"127.0.0.1:{free_port()}", secrets.token_hex(32)
    ray.get([worker.join.remote(rank, master, token) for rank, worker in enumerate(workers)])
    steps = [worker.step.remote() for worker in workers]
    for rank in (0, 1):
        try:
            ray.get(steps[rank])
        except px.PeerLost as lost:
            print("actor", rank, "has lost rank", lost.peer, flush=True)
    ray.shutdown()
