"""Ranks that are killed or stopped at random moments of collectives on a GPU: what the others see, and how soon.

    python -m tests.soak.gpu [--kills 200] [--stops 50] [--ranks 8] [--jobs 4] [--seconds 600] [--seed 1] [--fake]

In a world of `--ranks`, all do random verbs on arrays of random lengths until one of them is killed. The others shrink
the group and go on so, until one is left: that spares the GPU a context for each rank and kill. Ranks are stopped in
worlds of two and three. Every other rank must name the lost one: within a second of a kill, at the deadline of a stop.
After that nothing may write to its arrays, and its GPU must compute as before. With one world at a time (`--jobs 1`)
each rank also says how much of the GPU's memory became free when the broken group was left: what the dead rank had, and
what others had opened of it. When all is over, the GPU must have as much free memory as before.

A process beside them strikes (`gpu_witness`). Of a kill that was noticed slowly this program tells what was late: the
word of the directory, the thread that hears it, or the call that then raises.

Every second world has tensors of torch, which take the fast path; the others have arrays of the driver alone. `--fake`
uses the stand-in for the driver, which needs no GPU. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.gpu.fake import DriverArray, install

import phalanx as px
from phalanx.cuda.driver import driver
from phalanx.testing import run_ranks

with contextlib.suppress(ImportError):
    import torch  # here, so that ranks are forked from a process that has it

LENGTHS = [8, 8000, 800_000, 8 << 20]
"""Elements of the arrays; those of the first two go through the memory of the host."""
DEADLINE = 2.0
"""Of worlds with a stopped rank. The others have the group's own, with which calls take the fast path."""
CONTRACT = 1.0
"""Seconds within which a killed rank is named."""
SLOW = 0.5
"""Seconds after which a kill is looked into that nobody needs to have noticed yet."""
LONGEST_FREE = 5.0
"""Seconds that the driver may take to give back what a dead process had."""
PIPE, FACTS, HEARD = "pipe", "facts", "heard"
"""Files in the folder of a run: to the witness, of the witness, and of those who heard of a loss."""


class Arrays(NamedTuple):
    """The arrays of a verb: two with something for each rank, and two as long as one rank's part."""

    own: list[DriverArray]
    passed: list[Any]
    """The same, as they are passed to the verbs."""


class World(NamedTuple):
    """What happens in one world."""

    seed: int
    ranks: int
    kind: str
    fake: bool
    memory: bool

    @property
    def as_torch(self) -> bool:
        """Whether it has tensors."""
        return not self.fake and bool(self.seed % 2)


def verbs(group: px.Group) -> dict[str, Callable[..., object]]:
    """What a rank does with four arrays and a timeout, by name."""
    rank, size = group.rank, group.world_size
    last, after, before = size - 1, (rank + 1) % size, (rank - 1) % size
    return {
        "all_reduce": lambda x, y, part, out, **more: group.all_reduce(x, "max", **more),
        "all_reduce async": lambda x, y, part, out, **more: group.all_reduce(x, "min", async_op=True, **more).wait(),
        "reduce": lambda x, y, part, out, **more: group.reduce(x, last, "max", **more),
        "broadcast": lambda x, y, part, out, **more: group.broadcast(x, last, **more),
        "all_gather": lambda x, y, part, out, **more: group.all_gather(part, y, **more),
        "gather": lambda x, y, part, out, **more: group.gather(part, last, y if rank == last else None, **more),
        "scatter": lambda x, y, part, out, **more: group.scatter(x if rank == last else None, last, out, **more),
        "reduce_scatter": lambda x, y, part, out, **more: group.reduce_scatter(x, "max", out, **more),
        "all_to_all": lambda x, y, part, out, **more: group.all_to_all(x, y, **more),
        "sendrecv": lambda x, y, part, out, **more: group.sendrecv(part, after, out, before, **more),
    }


def rank_of(group: px.Group, world: World, folder: str) -> None:
    """One rank of a world. It writes down what it saw before the next one is struck, which may be this one."""
    if world.fake:
        install()
    note_what_is_heard(folder)
    stacks = os.open(f"{folder}/stacks-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, stacks)
    chosen = random.Random(world.seed)
    path = Path(folder) / f"{world.kind}-{world.seed}-{group.rank}"
    while True:
        victim, moment = chosen.randrange(group.world_size), chosen.uniform(0.02, 0.3)
        found = strike_one(group, world, folder, chosen.randrange(1 << 30), victim, moment)
        goes_on, free = world.kind == "kill" and group.world_size > 2, found.pop("free")
        if goes_on:
            group = group.shrink()
        else:
            group.close()
        if world.memory:
            found["freed"] = _freed(free)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(found)}\n")
        if not goes_on:
            return


def strike_one(group: px.Group, world: World, folder: str, seed: int, victim: int, delay: float) -> dict[str, Any]:
    """Does verbs until one rank is killed or stopped; what this one saw."""
    chosen = random.Random(seed)
    arrays = [_arrays(length // (8 if world.fake else 1), group.world_size, world.as_torch) for length in LENGTHS]
    known = verbs(group)
    for one in arrays:
        known["all_reduce"](*one.passed)
    free = _free_memory() if world.memory else 0
    at = np.array([time.monotonic() + delay])
    group.broadcast(at, 0)
    moment = float(at[0])
    name = group.members[victim]
    me = {"strike": f"rank {name} of {group.members} in world {world.seed}", "pid": os.getpid()}
    if group.rank == victim:
        number = signal.SIGKILL if world.kind == "kill" else signal.SIGSTOP
        tell_witness(folder, {**me, "signal": number.value, "at": moment})
    else:
        tell_witness(folder, me)
    more = {"timeout": DEADLINE} if world.kind == "stop" else {}
    count, verb = 0, ""
    error: px.PeerLost | px.Timeout | None = None
    while error is None:
        one, verb = chosen.choice(arrays), chosen.choice(list(known))
        try:
            known[verb](*one.passed, **more)
            count += 1
        except (px.PeerLost, px.Timeout) as failure:
            noticed = time.monotonic()
            error = failure
    tell_witness(folder, {**me, "noticed": noticed})
    everything = [x for one in arrays for x in one.own]
    for x in everything:
        x.fill(7)
    # A rank that is stopped does not break the group if it is noticed in a message: whoever left then would be named by
    # those that still wait for it.
    all_noticed = moment + DEADLINE + CONTRACT if world.kind == "stop" else 0.0
    time.sleep(max(0.2, all_noticed - time.monotonic()))
    intact = all(bool((x.numpy() == 7).all()) for x in everything)
    # A rank may be late because it waits for the stopped one, in a message that this one takes no part in.
    named = name in error.missing or verb == "sendrecv" if isinstance(error, px.Timeout) else error.peer == name
    return {
        "error": type(error).__name__,
        "named": named,
        "noticed": noticed,
        "intact": intact,
        "computes": _computes(world.as_torch),
        "calls": count,
        "verb": verb,
        **me,
        "text": str(error),
        "free": free,
    }


def _arrays(length: int, size: int, as_torch: bool) -> Arrays:
    part = max(1, length // size)
    own = [DriverArray(np.ones(count, np.float32)) for count in (part * size, part * size, part, part)]
    return Arrays(own, [torch.as_tensor(x, device="cuda") for x in own] if as_torch else list(own))


def _computes(as_torch: bool) -> bool:
    if as_torch:
        return bool((torch.arange(1 << 20, device="cuda") * 2).sum().item() == (1 << 20) * ((1 << 20) - 1))
    return bool(DriverArray(np.arange(10.0)).numpy()[9] == 9)


def _free_memory() -> int:
    """Bytes that are free on the GPU; nothing else asks for that."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with driver().using(0):
        ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value


def _freed(before: int) -> int:
    """MiB that have become free since, when it does not grow any more."""
    end, most = time.monotonic() + LONGEST_FREE, -1
    while time.monotonic() < end:
        now = (_free_memory() - before) >> 20
        if now == most:
            break
        most = now
        time.sleep(0.3)
    return most


def tell_witness(folder: str, said: dict[str, Any]) -> None:
    """In one write, so that the lines of ranks do not mix."""
    pipe = os.open(f"{folder}/{PIPE}", os.O_WRONLY)
    os.write(pipe, f"{json.dumps(said)}\n".encode())
    os.close(pipe)


class Ears(logging.Handler):
    """Writes down when this process said or heard that a rank is lost."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._file = os.open(f"{folder}/{HEARD}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def emit(self, record: logging.LogRecord) -> None:
        line = {"at": time.monotonic(), "by": os.getpid(), "text": record.getMessage()}
        os.write(self._file, f"{json.dumps(line)}\n".encode())


def note_what_is_heard(folder: str) -> None:
    logger = logging.getLogger("phalanx.rendezvous")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Ears(folder))
    logger.propagate = False


def used_on_gpu() -> str:
    """The GPU's memory in use, and the processes that use it, as the driver's own tool says."""
    found = []
    for query in ("--query-gpu=memory.used", "--query-compute-apps=pid,used_memory"):
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        found.append(" ".join(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()))
    return f"{found[0]}, processes: {found[1] or 'none'}"


def plans(arguments: argparse.Namespace) -> list[World]:
    """The worlds of a run, in random order."""
    memory = arguments.jobs == 1 and not arguments.fake
    chosen, made, left, seed = random.Random(arguments.seed), [], arguments.kills, 1000 * arguments.seed
    while left > 0:
        ranks = min(arguments.ranks, left + 1)
        made.append(World(seed, ranks, "kill", arguments.fake, memory))
        left, seed = left - (ranks - 1), seed + 1
    for number in range(arguments.stops):
        made.append(World(seed + number, 2 + number // 2 % 2, "stop", arguments.fake, memory))
    chosen.shuffle(made)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no world after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake", action="store_true")
    arguments = parser.parse_args()
    before = "" if arguments.fake else used_on_gpu()
    began = time.monotonic()
    failures: list[str] = []

    def run(world: World) -> None:
        if time.monotonic() > began + arguments.seconds:
            return
        try:
            everyone = range(world.ranks)
            run_ranks(world.ranks, rank_of, world, folder, backend="mesh", timeout=120, may_die=everyone)
        except Exception as error:
            failures.append(f"{world}: {error}")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        note_what_is_heard(folder)
        with witness(folder):
            list(pool.map(run, plans(arguments)))
        seen = {
            kind: [
                json.loads(line) for path in Path(folder).glob(f"{kind}-*") for line in path.read_text().splitlines()
            ]
            for kind in ("kill", "stop")
        }
        facts = lines_of(folder, FACTS)
        struck = {fact["strike"]: fact for fact in facts if "struck" in fact}
        for one in [*seen["kill"], *seen["stop"]]:
            one["seconds"] = one["noticed"] - struck[one["strike"]]["struck"]
        good = [report(kind, seen[kind]) for kind in seen if seen[kind]]
        for one in sorted(seen["kill"], key=lambda one: -one["seconds"]):
            if one["seconds"] > SLOW:
                explain(one, struck[one["strike"]], facts, lines_of(folder, HEARD), folder)
    for text in failures[:8]:
        print(f"failed: {text[:700]}")
    if not arguments.fake:
        print(f"on the GPU before: {before}; after: {used_on_gpu()}")
    print(f"{time.monotonic() - began:.0f} s, {arguments.jobs} worlds at a time, {len(failures)} failed")
    return 0 if all(good) and not failures else 1


@contextlib.contextmanager
def witness(folder: str) -> Iterator[None]:
    """The process that strikes, and looks at those who are late."""
    os.mkfifo(f"{folder}/{PIPE}")
    holder = os.open(f"{folder}/{PIPE}", os.O_RDWR)
    command = [sys.executable, "-m", "tests.soak.gpu_witness", f"{folder}/{PIPE}", f"{folder}/{FACTS}"]
    with subprocess.Popen(command):
        try:
            yield
        finally:
            os.close(holder)  # it ends with the last one who writes


def lines_of(folder: str, name: str) -> list[dict[str, Any]]:
    path = Path(folder, name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def explain(
    one: dict[str, Any], struck: dict[str, Any], facts: list[dict[str, Any]], heard: list[dict[str, Any]], folder: str
) -> None:
    """Prints what was late when a survivor was slow to notice a kill."""
    victim, began = struck["pid"], struck["struck"]
    told = [line for line in heard if f"(process {victim} " in line["text"]]
    at = {
        who: min((line["at"] - began for line in told if chosen(line)), default=math.nan)
        for who, chosen in (
            ("the directory", lambda line: line["text"].startswith("directory: ")),
            ("the survivor's thread", lambda line: line["by"] == one["pid"]),
        )
    }
    known = ", ".join(f"{who} knew after {seconds:.3f} s" for who, seconds in at.items())
    print(f"slow: {one['strike']}, {one['verb']}: {known}, the call raised after {one['seconds']:.3f} s")
    for fact in facts:
        if fact["strike"] == one["strike"] and fact["pid"] in (victim, one["pid"]) and "seen" in fact:
            who = "victim" if fact["pid"] == victim else "survivor"
            print(f"    {fact['after']:.2f} {who}'s thread {fact['thread']}: {fact['seen']}")
    print("    " + Path(folder, f"stacks-{one['pid']}").read_text()[:6000].replace("\n", "\n    "))


def report(kind: str, seen: list[dict[str, Any]]) -> bool:
    """Prints what the survivors saw; True if all of it was right."""
    late = CONTRACT if kind == "kill" else DEADLINE + 2 * CONTRACT
    wrong = [one for one in seen if one["seconds"] > late or not (one["named"] and one["intact"] and one["computes"])]
    print(f"{kind}: {len({one['strike'] for one in seen})} times, seen by {len(seen)} survivors")
    table = collections.Counter(
        f"{one['error']}, named {one['named']}, memory intact {one['intact']}, computes {one['computes']}"
        for one in seen
    )
    for text, count in table.most_common():
        print(f"  {count:4} {text}")
    by_verb = collections.Counter(one["verb"] for one in seen)
    print(f"  in {', '.join(f'{verb} {count}' for verb, count in by_verb.most_common())}")
    seconds = sorted(one["seconds"] for one in seen)
    at = {"median": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
    told = (f"{seconds[min(len(seconds) - 1, int(q * len(seconds)))] * 1000:.0f} ms ({name})" for name, q in at.items())
    print(f"  noticed after {', '.join(told)}")
    freed = [one["freed"] for one in seen if "freed" in one]
    if freed:
        print(f"  MiB that became free: {min(freed)} to {max(freed)}")
    print(f"  {len(wrong)} wrong")
    for one in wrong[:8]:
        print(f"    {str(one)[:700]}")
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
