"""A rank dies without a word. The others notice within a second, and know who it was.

phalanx run -n 4 examples/failure.py
"""

import os
import signal
import sys
import time

import phalanx as px

# When a rank fails, `phalanx run` asks the others to end with SIGTERM and gives them 5 seconds. Ranks that have
# something to save or to say must not end at once.
signal.signal(signal.SIGTERM, lambda *_: None)

with px.init(timeout=60) as world:
    if world.world_size < 2:
        sys.exit("This example needs at least two ranks: phalanx run -n 4 examples/failure.py")
    victim = world.world_size - 1
    if world.rank == victim:
        print(f"rank {victim} is about to be killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out

    started = time.monotonic()
    try:
        world.barrier()  # would wait for the dead rank, were it not noticed
    except px.PeerLost as lost:
        print(f"rank {world.rank} noticed after {time.monotonic() - started:.2f} s: {lost}", flush=True)
        # The group is broken for good. This is the place to save what should not be lost; then end, and start again.
        sys.exit(1)
