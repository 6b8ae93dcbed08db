"""What the ranks on two hosts run: they form a world and exchange messages in all pairs.

`talk.py` prints one line of JSON per rank: who it is, where it found each other rank, what it heard from each.
`talk.py lose` then waits for a message that never comes, and says how and when that ended.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import phalanx as px


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def talk(world: px.Group) -> None:
    world.barrier()
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    sent = [world.isend(np.full(1000, 100 * world.rank + rank), rank) for rank in others]
    heard = {rank: int(world.recv(src=rank).sum()) // 1000 for rank in others}
    for work in sent:
        work.wait()
    mesh: Any = world.backend
    reached = {rank: mesh.world.address_of(rank) for rank in others}
    say(
        {
            "rank": world.rank,
            "local_rank": world.local_rank,
            "local_world_size": world.local_world_size,
            "heard": heard,
            "reached": reached,
        }
    )


def lose(world: px.Group) -> None:
    """Waits for the rank at the other end of the world."""
    try:
        world.recv(src=world.world_size - 1 - world.rank, timeout=60)
    except px.PhalanxError as error:
        say({"ended": time.monotonic(), "kind": type(error).__name__, "peer": error.peer, "message": str(error)})


def main(words: list[str]) -> None:
    try:
        world = px.init(timeout=float(words[1]) if len(words) > 1 else 30)
    except px.PhalanxError as error:
        say({"kind": type(error).__name__, "message": str(error)})
        return
    with world:
        talk(world)
        if words[:1] == ["lose"]:
            lose(world)


if __name__ == "__main__":
    main(sys.argv[1:])
