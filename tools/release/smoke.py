"""Tries an installed Phalanx: worlds form, ranks talk, a killed rank is noticed, `launch` works, the demo trains.

Run by the Python that has it, from any folder: `python smoke.py`, with `--core` or `--pure` to say which wheel it must
be. It needs nothing but Phalanx, and nothing else of this checkout.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 4
LIMIT = 120


def rank() -> None:
    """One rank: all kinds of traffic, then rank 1 is killed and the others must say so."""
    import numpy as np

    import phalanx as px

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which may come sooner than what is to be seen
    world = px.init()
    agent = px.rpc.Agent(world)

    @agent.register
    def double(x: float) -> float:
        return 2 * x

    right, left = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    for size in (2, 100_000):
        x = np.full(size, world.rank, np.float32)
        world.all_reduce(x, op="mean")
        assert (x == (world.world_size - 1) / 2).all()
    world.send(np.array([world.rank]), right)
    assert world.recv(src=left)[0] == left
    assert world.all_gather_object({"rank": world.rank}) == [{"rank": one} for one in range(world.world_size)]
    world.barrier()
    assert agent.call(right, "double", world.rank) == 2 * world.rank
    try:
        world.barrier()  # others may still be in it when rank 1 is through, and notice there
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    except px.errors.PeerLost as error:
        print(f"rank {error.peer} is lost", flush=True)
    os._exit(0)


def total() -> float:
    """What each rank of `launch` does."""
    import numpy as np

    import phalanx as px

    with px.init() as world:
        return float(world.all_reduce(np.ones(1))[0])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `phalanx` in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-m", "phalanx", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )


def main() -> None:
    """Tries everything; ends with an error at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--core", action="store_true", help="fail if there is no native core")
    kind.add_argument("--pure", action="store_true", help="fail if there is one")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank()
    from phalanx import _native

    if (asked.core or asked.pure) and _native.available != asked.core:
        sys.exit(f"the native core is {'there' if _native.available else f'not there: {_native.why_not}'}")
    done = command("run", "-n", str(RANKS), str(Path(__file__).resolve()), "--rank")
    if done.returncode != 128 + signal.SIGKILL or done.stdout.count("rank 1 is lost") != RANKS - 1:
        sys.exit(f"the world of {RANKS} ranks failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    from phalanx import launch

    results = launch(total, 2, timeout=LIMIT)
    if results != [2.0, 2.0]:
        sys.exit(f"two ranks from Python gave {results}")
    done = command("demo", "-n", str(RANKS))
    if done.returncode != 0 or "accuracy" not in done.stdout:
        sys.exit(f"the demo failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    tried = "collectives, messages, remote calls, a killed rank, launch() and the demo"
    print(f"Python {sys.version.split()[0]}: {tried}: all well")


if __name__ == "__main__":
    main()
