"""One script for every launcher: meets the others, talks a little in every way, prints one line of JSON.

It says nothing of where it runs: that is found in the variables of whoever started it. The first argument, if there is
one, is a name for the job that must come back from every rank.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import phalanx as px
from phalanx.config import detect


def main(job: str) -> None:
    with px.init() as world:
        rank, size = world.rank, world.world_size
        world.barrier()
        total = world.all_reduce(np.full(3, rank + 1, np.int64))
        last = world.broadcast(np.array([rank * 10], np.int64), src=size - 1)
        # A note goes once around the ring, and everybody signs it.
        note = [job]
        for _ in range(size - 1):
            work = world.send_object(note, (rank + 1) % size, async_op=True)
            note = [*world.recv_object((rank - 1) % size), job]
            assert work is not None
            work.wait()
        line = {
            "rank": rank,
            "world_size": size,
            "local_rank": world.local_rank,
            "local_world_size": world.local_world_size,
            "launcher": detect().launcher,
            "sum": total.tolist(),
            "last": last.tolist(),
            "jobs": sorted(set(note)),
        }
        sys.stdout.write(json.dumps(line) + "\n")  # one write: lines of several ranks must not run together
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "job")
