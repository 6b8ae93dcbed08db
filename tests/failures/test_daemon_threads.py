"""Daemon threads inside the core when the interpreter ends: the process ends as if they were not there."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, time
from pathlib import Path

import numpy as np

import phalanx as px
from phalanx.testing import open_world

opened = open_world(2, "mesh")
backends = opened.__enter__()


def pair():
    "The two ranks of a group with a segment and a channel, in this process."
    groups = [px.Group(one) for one in backends]
    meet = [threading.Thread(target=lambda group=group: (group.barrier(), group.sendrecv(np.ones(3), 1 - group.rank,
        src=1 - group.rank))) for group in groups]
    for thread in meet:
        thread.start()
    for thread in meet:
        thread.join()
    return groups


def spin(group, keep):
    while True:
        group.all_reduce(np.ones(4))


waits, large, messages, busy, calls = pair(), pair(), pair(), pair(), pair()
agents = [px.rpc.Agent(group) for group in calls]
agents[0].register(time.sleep)
inside = [
    lambda keep: waits[0].barrier(),  # waits for the other rank
    lambda keep: waits[0].barrier(),  # waits for its turn
    lambda keep: large[0].all_reduce(np.ones(1 << 20)),
    lambda keep: messages[1].all_reduce(np.ones(4), async_op=True).wait(),
    lambda keep: messages[0].recv(np.ones(3), 1),
    lambda keep: agents[1].call(0, "sleep", 60),
    lambda keep: spin(busy[0], keep),
    lambda keep: spin(busy[1], keep),
]
# `keep`: the end of the interpreter does not close what the threads are in.
kept = (opened, backends, waits, large, messages, busy, agents)
threads = [threading.Thread(target=call, args=(kept,), daemon=True) for call in inside]
for thread in threads:
    thread.start()
sleeping = [Path(f"/proc/self/task/{thread.native_id}/stat") for thread in threads[:-2]]
while any(path.read_text().rpartition(")")[2].split()[0] != "S" for path in sleeping):
    time.sleep(0.01)


class Slow:
    "Takes long to be finalized, so that every thread asks for the GIL meanwhile."

    def __init__(self):
        self.sleep = time.sleep

    def __del__(self):
        self.sleep(0.3)
        print("ended", flush=True)


sys.modules["slow"] = Slow()  # not a global: the threads' frames would keep it
print("ends", flush=True)
"""


def test_the_interpreter_ends_beside_threads_in_the_core() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["ends", "ended"]), done.stderr
