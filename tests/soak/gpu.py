"""Ranks that are killed or stopped at random moments of collectives on a GPU: what the others see, and how soon.

    python -m tests.soak.gpu [--kills 40] [--stops 10] [--ranks 3] [--jobs 4] [--seconds 60] [--fake | --torch]

Each trial is a world of its own, whose ranks reduce arrays of random lengths until one of them is killed or stopped.
Every other rank must name that one: within a second of a kill, at the deadline of a stop. After that nothing may write
to its array, and its GPU must work as before. `--torch` passes the same arrays as tensors, which take the fast path.
`--fake` uses the stand-in for the driver, which needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tests.gpu.fake import DriverArray, install

import phalanx as px
from phalanx.testing import run_ranks

LENGTHS = [1, 1000, 100_000, 4 << 20, 16 << 20]
"""Elements; the first two go through the memory of the host."""
DEADLINE = 2.0


def trial(group: px.Group, seed: int, victim: int, number: int, fake: bool, torch: bool) -> dict[str, Any] | None:
    if fake:
        install()
    chosen = random.Random(seed)
    arrays = [DriverArray(np.ones(length // (64 if fake else 1) + 1, np.float32)) for length in LENGTHS]
    passed: Any = dict(enumerate(arrays))
    if torch:
        from torch import as_tensor

        passed = {i: as_tensor(x, device="cuda") for i, x in enumerate(arrays)}
    for i in passed:
        group.all_reduce(passed[i], "max")
    at = np.array([time.monotonic() + chosen.uniform(0.02, 0.3)])
    group.broadcast(at, 0)
    moment = float(at[0])
    if group.rank == victim:
        threading.Thread(target=strike, args=(moment, number), daemon=True).start()
    count = 0
    error: px.PhalanxError | None = None
    while error is None:
        which = chosen.randrange(len(arrays))
        x = arrays[which]
        op = chosen.choice(["max", "min"])
        try:
            group.all_reduce(passed[which], op, timeout=DEADLINE)
            count += 1
        except px.PhalanxError as failure:
            noticed = time.monotonic() - moment
            error = failure
    x.fill(7)
    time.sleep(0.3)
    intact = bool((x.numpy() == 7).all())
    fine = DriverArray(np.arange(10.0)).numpy()[9] == 9
    named = getattr(error, "peer", None)
    if named is None and isinstance(error, px.Timeout):
        named = error.missing[0] if len(error.missing) == 1 else None
    return {
        "error": type(error).__name__,
        "named": named == victim,
        "seconds": noticed,
        "intact": intact,
        "works": bool(fine),
        "calls": count,
        "text": str(error),
    }


def strike(moment: float, number: int) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
    os.kill(os.getpid(), number)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no trial after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--torch", action="store_true")
    arguments = parser.parse_args()
    numbers = [signal.SIGKILL] * arguments.kills + [signal.SIGSTOP] * arguments.stops
    random.Random(arguments.seed).shuffle(numbers)

    until = time.monotonic() + arguments.seconds

    def run(index: int) -> tuple[int, Any]:
        if time.monotonic() > until:
            return index, None
        victim = (arguments.seed + index) % arguments.ranks
        given = (arguments.seed * 1000 + index, victim, int(numbers[index]), arguments.fake, arguments.torch)
        try:
            return index, run_ranks(arguments.ranks, trial, *given, backend="mesh", timeout=60, may_die=[victim])
        except Exception as error:
            return index, error

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(run, range(len(numbers))))
    for number in (signal.SIGKILL, signal.SIGSTOP):
        table: collections.Counter[str] = collections.Counter()
        seconds: list[float] = []
        wrong: list[str] = []
        trials = 0
        for index, found in results:
            if numbers[index] != number or found is None:
                continue
            trials += 1
            if isinstance(found, Exception):
                wrong.append(f"trial {index}: {found}")
                continue
            for rank, one in enumerate(found):
                if not isinstance(one, dict):
                    continue
                table[
                    f"{one['error']}, named {one['named']}, memory intact {one['intact']}, GPU works {one['works']}"
                ] += 1
                seconds.append(one["seconds"])
                if not (one["named"] and one["intact"] and one["works"]):
                    wrong.append(f"trial {index}, rank {rank}: {one}")
        print(f"{number.name}: {trials} trials")
        for text, count in table.most_common():
            print(f"  {count:4} survivors: {text}")
        if seconds:
            seconds.sort()
            print(f"  noticed after {seconds[len(seconds) // 2]:.3f} s (median), {seconds[-1]:.3f} s (worst)")
        for text in wrong[:8]:
            print(f"  {text[:600]}")


if __name__ == "__main__":
    main()
