"""A rank of the soak of elastic jobs: it trains on whole numbers, and kills itself where the plan says.

    elastic_rank.py FOLDER TOTAL PAUSE

The folder holds `plan.json`, a list of kills. One is due from its step on, as soon as the world is large enough. The
rank that comes to its place first takes it, by making a file, and dies some moments later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import phalanx as px
from phalanx.elastic import loop, transfer

LENGTH, BATCH, WIDTH, MOST = 500, 24, 4096, 16
COLUMNS = 2 + MOST + BATCH
QUIET = 1.0
"""Seconds between two kills of the plan, but for those at a join: one follows each kill, and may be there sooner."""


def gradient(weights: Any, batch: Any) -> Any:
    """Of some samples: whole numbers, so that the order of a sum does not matter."""
    found = np.zeros(WIDTH)
    for sample in batch:
        found += (np.arange(WIDTH) * (int(sample) + 7) + weights) % 31
    return found


def update(weights: Any, total: Any) -> None:
    """One step of the optimizer."""
    weights *= 3
    weights += total
    weights %= 65521


def digest(weights: Any, log: Any) -> str:
    """Of all that must be the same."""
    return hashlib.sha256(weights.tobytes() + log.tobytes()).hexdigest()


class Killer:
    """Ends this process at the places of the plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = json.loads((folder / "plan.json").read_text())
        self.step: Any = None
        self.joining = False

    def at(self, place: str) -> None:
        """Comes to a place."""
        step, size = (self.step.number, self.step.group.world_size) if self.step is not None else (10**9, 10**9)
        for number, kill in enumerate(self.plan):
            if kill["place"] != place or step < kill["step"] or size < kill["size"]:
                continue
            if place not in ("send", "receive") and self._another_is_fresh(number):
                continue
            for victim in range(kill["victims"]):
                try:
                    os.close(os.open(self.folder / f"kill-{number}-{victim}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                epoch = self.step.group.epoch if self.step is not None else -1
                threading.Thread(target=self._die, args=(number, victim, kill["delay"], epoch), daemon=True).start()
                return

    def _another_is_fresh(self, number: int) -> bool:
        """True if another kill was just taken: together they could end all that have the state."""
        now = time.time()
        for path in self.folder.glob("kill-*"):
            with contextlib.suppress(OSError):
                if int(path.name.split("-")[1]) != number and now - path.stat().st_mtime < QUIET:
                    return True
        return False

    def _die(self, number: int, victim: int, delay: float, epoch: int) -> None:
        time.sleep(delay)
        (self.folder / f"died-{number}-{victim}").write_text(f"{time.time()} {epoch}")
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, total: int, pause: float) -> None:
    """Trains to the end."""
    (folder / f"process-{os.getpid()}").touch()
    killer = Killer(folder)
    vote, send, receive = loop._Loop._vote, transfer.send, transfer.receive

    def watched_vote(self: Any, group: Any) -> None:
        killer.at("vote")
        vote(self, group)

    def watched_send(*args: Any) -> int:
        killer.at("send")
        return send(*args)

    def watched_receive(*args: Any) -> Any:
        killer.at("receive")
        return receive(*args)

    loop._Loop._vote = watched_vote  # type: ignore[method-assign]
    transfer.send, transfer.receive = watched_send, watched_receive
    with px.init(timeout=60) as world:
        me = world.members[world.rank]
        weights, log = np.arange(WIDTH, dtype=np.float64), np.full((total, COLUMNS), -1, np.int64)
        sampler = px.elastic.Sampler(LENGTH, BATCH, seed=5)
        state = px.elastic.State(weights=weights, log=log, sampler=sampler)
        with open(folder / f"commits-{me}", "w", buffering=1) as commits:
            for step in px.elastic.steps(world, state, total=total):
                killer.step = step
                if step.number:
                    commits.write(f"{time.time()} {step.number} {step.group.epoch}\n")
                with step:
                    mine = step.batch
                    result = gradient(weights, mine)
                    killer.at("reduction")
                    step.group.all_reduce(result)
                    samples = np.concatenate(step.group.all_gather_object(mine.tolist()))
                    killer.at("optimizer")
                    update(weights, result)
                    row = log[step.number]
                    row[0], row[1] = step.number, step.group.world_size
                    row[2 : 2 + step.group.world_size] = step.group.members
                    row[2 + MOST :] = samples
                    time.sleep(pause)
        print("END", me, digest(weights, log), len(os.listdir("/proc/self/fd")), flush=True)
        if step.group.rank == 0:
            np.save(folder / "log.npy", log)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
