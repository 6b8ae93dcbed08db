"""Elastic jobs whose ranks are killed again and again: is the result that of one process that lost nobody?

    python -m tests.soak.elastic [--ranks 8] [--kills 200] [--per-job 20] [--seed S]

Each job runs under `phalanx run --elastic`. Its ranks are killed at seeded points: in a reduction, in the vote, in the
optimizer, while they send the state to a rank that joins, while they receive it, two at once; each is started again.
At the end all ranks must have the same SHA-256 of weights and log, and a single process that replays the log (step,
members, samples) must come to the same; every sample is there once. No process and no shared memory may be left. Shows
how long the job stood still after each kill. Exits with 1 if anything of this fails, and says with which seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.soak.elastic_rank import BATCH, LENGTH, MOST, WIDTH, digest, gradient, update

from phalanx.elastic import Sampler

__all__ = ["Outcome", "run_job"]

PLACES = ("reduction", "vote", "optimizer", "send", "receive")
LIMIT = 600.0
"""Seconds after which a job counts as hung."""
RANK = Path(__file__).with_name("elastic_rank.py")
MARK = "ELASTIC_SOAK_MARK"


class Outcome(NamedTuple):
    """The result of a job."""

    kills: Counter[str]
    """How often each place was hit."""
    stalls: list[float]
    """Seconds from each kill to the next step that was committed without the victim."""
    epochs: int


def make_plan(kills: int, ranks: int, rng: random.Random, spacing: int) -> list[dict[str, Any]]:
    """The kills of a job."""
    plan = []
    for number in range(kills):
        place = PLACES[number % len(PLACES)] if number < len(PLACES) else rng.choice(PLACES)
        two = place in ("reduction", "vote", "optimizer") and rng.random() < 0.25
        plan.append(
            {
                "place": place,
                "step": 10 + number * spacing + rng.randrange(spacing // 2),
                "size": max(3, ranks - 3) + int(two),
                "victims": 2 if two else 1,
                "delay": rng.choice([0.0, 0.0, rng.random() * 0.002, rng.random() * 0.02]),
            }
        )
    return plan


def run_job(ranks: int, kills: int, seed: int, *, spacing: int = 60, pause: float = 0.01) -> Outcome:
    """One job.

    Raises:
        AssertionError: Something is not as it must be.
    """
    rng = random.Random(seed)
    total = 30 + (kills + 2) * spacing
    with tempfile.TemporaryDirectory(prefix="elastic-soak-") as name:
        folder = Path(name)
        plan = make_plan(kills, ranks, rng, spacing)
        (folder / "plan.json").write_text(json.dumps(plan))
        mark = uuid.uuid4().hex
        command = [
            sys.executable,
            "-m",
            "phalanx",
            "run",
            "--elastic",
            f"1:{ranks}",
            "--max-restarts",
            str(10 * kills + 10),
        ]
        environment = {**os.environ, MARK: mark, "PYTHONPATH": str(RANK.parents[2]), "OMP_NUM_THREADS": "1"}
        job = subprocess.run(
            [*command, str(RANK), str(folder), str(total), str(pause)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        shown = job.stdout[-3000:] + job.stderr[-6000:]
        assert job.returncode == 0, f"exit code {job.returncode}:\n{shown}"
        ends = re.findall(r"END (\d+) (\w+) (\d+)", job.stdout)
        assert len({end[1] for end in ends}) == 1, f"the ranks differ: {ends}\n{shown}"
        log = np.load(folder / "log.npy")
        assert replay(log) == ends[0][1], f"the replay differs\n{shown}"
        hit, stalls = _kills(folder, plan)
        if kills >= len(PLACES):
            assert {name.partition(",")[0] for name in hit} == set(PLACES), f"only these places were hit: {dict(hit)}"
        wait_for_the_end(mark, [path.name.partition("-")[2] for path in folder.glob("process-*")])
        epochs = max(
            int(line.split()[2]) for path in folder.glob("commits-*") for line in path.read_text().splitlines()
        )
        return Outcome(hit, stalls, epochs)


def replay(log: Any) -> str:
    """What one process gets from the log; also checks the log itself.

    Raises:
        AssertionError: A step is missing or there twice, or a sample is.
    """
    weights = np.arange(WIDTH, dtype=np.float64)
    sampler = Sampler(LENGTH, BATCH, seed=5)
    for number, row in enumerate(log):
        assert row[0] == number, f"step {number} of the log is {row[0]}"
        size, samples = row[1], row[2 + MOST :]
        assert (row[2 : 2 + size] >= 0).all()
        assert (row[2 + size : 2 + MOST] == -1).all()
        assert samples.tolist() == sampler.batch().tolist(), f"step {number} has other samples"
        update(weights, gradient(weights, samples))
        sampler.advance()
    return digest(weights, log)


def _kills(folder: Path, plan: list[dict[str, Any]]) -> tuple[Counter[str], list[float]]:
    commits = []
    for path in folder.glob("commits-*"):
        for line in path.read_text().splitlines():
            at, _, epoch = line.split()
            commits.append((float(at), int(epoch)))
    commits.sort()
    hit: Counter[str] = Counter()
    stalls = []
    for path in sorted(folder.glob("died-*")):
        kill = plan[int(path.name.split("-")[1])]
        hit[kill["place"] + (", two" if kill["victims"] > 1 else "")] += 1
        died, epoch = path.read_text().split()
        if int(epoch) < 0:
            continue  # a rank that joined: the others wait for nothing
        after = [at for at, then in commits if at > float(died) and then > int(epoch)]
        if after:
            stalls.append(after[0] - float(died))
    return hit, stalls


def wait_for_the_end(mark: str, processes: list[str]) -> None:
    """Waits until no process of a job is there, and no file of its ranks' in memory.

    Raises:
        AssertionError: Something stays.
    """
    end = time.monotonic() + 10
    while left := _alive(mark) or _slates_of(processes):
        assert time.monotonic() < end, f"these processes or files are left: {left}"
        time.sleep(0.1)


def _slates_of(processes: list[str]) -> list[str]:
    """Slates end with the number of their process. Other jobs may have some here, too."""
    folder = Path(f"/dev/shm/phalanx-{os.geteuid()}")
    return [str(path) for number in processes for path in folder.glob(f"*.{number}")]


def _alive(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def main() -> int:
    """Runs jobs until there were enough kills."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-job", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    hit: Counter[str] = Counter()
    stalls: list[float] = []
    job = 0
    began = time.monotonic()
    while hit.total() < arguments.kills:
        seed = arguments.seed + job
        try:
            outcome = run_job(arguments.ranks, arguments.per_job, seed)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f"FAILED with --ranks {arguments.ranks} --per-job {arguments.per_job} --seed {seed}: {error}")
            return 1
        hit += outcome.kills
        stalls += outcome.stalls
        job += 1
        print(
            f"job {job} (seed {seed}): {outcome.kills.total()} kills, {outcome.epochs} epochs, "
            f"stall {statistics.median(outcome.stalls) if outcome.stalls else 0:.3f} s",
            flush=True,
        )
    seconds = time.monotonic() - began
    print(f"{hit.total()} kills in {job} jobs of {arguments.ranks} ranks, {seconds:.0f} s: {dict(hit)}")
    if stalls:
        tenth = sorted(stalls)[int(len(stalls) * 0.9)]
        middle = statistics.median(stalls)
        print(
            f"stall: median {middle:.3f} s, nine of ten below {tenth:.3f} s, worst {max(stalls):.3f} s ({len(stalls)})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
