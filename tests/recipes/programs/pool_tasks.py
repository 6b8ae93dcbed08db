"""A world among the workers of a pool: its task, and how dask and joblib give it to them."""

from __future__ import annotations

import secrets
import sys
from typing import Any

import numpy as np

import phalanx as px
from phalanx.transports.tcp import free_port

RANKS = 3


def task(rank: int, port: int, token: str) -> tuple[int, float]:
    with px.init(rank=rank, world_size=RANKS, master=f"127.0.0.1:{port}", token=token) as world:
        return world.rank, float(world.all_reduce(np.full(1000, rank + 1.0))[0])


def job() -> list[tuple[int, int, str]]:
    """The arguments of the tasks of one world."""
    port, token = free_port(), secrets.token_hex(32)
    return [(rank, port, token) for rank in range(RANKS)]


def with_dask() -> list[Any]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=RANKS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        assert len(workers) == RANKS
        worlds = []
        for _ in range(2):  # the second one is in the same processes
            tasks = [client.submit(task, *words, workers=[workers[words[0]]], pure=False) for words in job()]
            worlds.append(client.gather(tasks))
        return worlds


def with_joblib() -> list[Any]:
    from joblib import Parallel, delayed

    with Parallel(n_jobs=RANKS, batch_size=1) as pool:
        return [list(pool(delayed(task)(*words) for words in job())) for _ in range(2)]


if __name__ == "__main__":
    for results in {"dask": with_dask, "joblib": with_joblib}[sys.argv[1]]():
        print(results, flush=True)
