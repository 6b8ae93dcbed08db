"""One rank of the world under fire. Speaks JSON lines to `tests.soak.hostile`; see there."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import Any

import numpy as np
from tests.soak.hostile_attacks import SACRIFICES

import phalanx as px
from phalanx.backends import SubBackend
from phalanx.backends.base import LaneBackend
from phalanx.errors import PeerLost, ProtocolError, Timeout

MESSAGE = 16 << 10
"""Numbers in each message of a round: 64 KiB."""
PAUSE = 0.002
"""Seconds between rounds: the attackers need the cores, too."""


def say(event: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


class Orders:
    """What the parent writes: `stop` ends the rounds, `quit` the world."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.quit = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            {"stop": self.stop, "quit": self.quit}[line.strip()].set()
        self.stop.set()  # the parent is gone
        self.quit.set()


class Sacrifices:
    """Groups whose channels only attackers use: each receives what it gets, which must be nothing or a clear error."""

    def __init__(self, backend: LaneBackend) -> None:
        self._backend = backend
        self.made = 0
        self.junk = 0

    def make_one(self, wait: float) -> None:
        if self.made == SACRIFICES:
            return
        self.made += 1
        sub = SubBackend(self._backend, range(self._backend.world_size))
        attacked_as = (self._backend.rank + 1) % self._backend.world_size
        try:
            sub.recv(bytearray(8), attacked_as, timeout=wait)
            raise AssertionError("a message that nobody sent")
        except ProtocolError:
            self.junk += 1
        except (PeerLost, Timeout):
            pass  # some insiders hang up without a word; if it were a real loss, the next round would say so
        finally:
            sub.close()


def one_round(world: px.Group, number: int, stop: bool) -> bool:
    """A broadcast, a barrier and a message round the ring; True if rank 0 says that it was the last."""
    flag = np.array([stop], np.int64)
    world.broadcast(flag, 0)
    world.barrier()
    size, rank = world.world_size, world.rank
    out = np.empty(MESSAGE, np.float32)
    world.sendrecv(np.full(MESSAGE, rank + number, np.float32), (rank + 1) % size, out, (rank - 1) % size)
    if not (out == (rank - 1) % size + number).all():
        raise AssertionError(f"round {number}: a message was changed")
    return bool(flag[0])


def main() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    orders = Orders()
    say("started")
    began = time.monotonic()
    world = px.init(timeout=float(sys.argv[1]))
    say("formed", seconds=time.monotonic() - began)
    sacrifices = Sacrifices(world.backend)
    rounds, slowest, last = 0, 0.0, False
    while not last:
        began = time.monotonic()
        last = one_round(world, rounds, orders.stop.is_set())
        slowest = max(slowest, time.monotonic() - began)
        rounds += 1
        if rounds == 1:
            say("talking")
        if rounds % 3 == 0:
            sacrifices.make_one(0.02)
        time.sleep(PAUSE)
    while sacrifices.made < SACRIFICES:
        sacrifices.make_one(0.0)
    world.barrier()
    say("quiet", rounds=rounds, slowest=slowest, junk=sacrifices.junk)
    orders.quit.wait()
    world.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("phalanx")]
    say("closed", threads=left)


if __name__ == "__main__":
    main()
