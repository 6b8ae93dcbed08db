"""A world that forms and works under fire: `python -m tests.soak.hostile [--connections 2000] [--seconds 0]`.

Four processes form a world within its deadline, pass barriers and send messages, while hostile connections hit every
port that they open: the directory's and each rank's, before, while and after the world forms. The same world is run
first in peace, and what it needs there is the measure: under fire no rank may need more memory than that and a small
bound, and afterwards descriptors and threads are as many as in peace. Every stranger is in the log exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.hostile_attacks import Fire, Situation, Target
from tests.soak.hostile_watch import Watch, descriptors, listening_ports, resident, threads

from phalanx.backends.mesh.world import PARKED
from phalanx.transports.tcp import free_port

SIZE = 4
DEADLINE = 30.0
"""Seconds in which the world must form, under fire."""
LIMIT = 90.0
"""Seconds that nothing here needs."""
MEMORY = 16 << 20
"""Bytes by which the peak of a rank under fire may be above its peak in peace."""
WORKERS = 24
DROPPED = re.compile(r"dropped a connection from (\d+\.\d+\.\d+\.\d+:\d+): ")
HANDSHAKES = 128
"""Handshakes that may be under way at one listener: the default of `Options.max_pending_handshakes`."""


class Rank:
    """A process of the world."""

    def __init__(self, rank: int, env: dict[str, str], folder: Path) -> None:
        self.rank = rank
        self.log = folder / f"rank-{rank}.log"
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.hostile_rank", str(DEADLINE)],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.pid = self.process.pid
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "ended"})

    def wait(self, event: str) -> dict[str, Any]:
        """Waits until the rank says it.

        Raises:
            RuntimeError: It said something else, or nothing.
        """
        try:
            said = self._events.get(timeout=LIMIT)
        except queue.Empty:
            raise RuntimeError(f"rank {self.rank}: waited {LIMIT:g} s for {event!r}") from None
        if said["event"] != event:
            raise RuntimeError(f"rank {self.rank} is {said['event']} where it should be {event}:\n{self._last_words()}")
        return said

    def _last_words(self) -> str:
        last = "\n".join(line for line in self.log.read_text().splitlines() if not DROPPED.search(line))
        return last[-3000:]

    def tell(self, order: str) -> None:
        """Gives an order."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the next `wait` says why
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()

    def ports(self, count: int) -> list[int]:
        """Its listening ports, once there are so many."""

        def listens_or_ended() -> bool:
            return len(listening_ports(self.pid)) >= count or self.process.poll() is not None

        wait_until(listens_or_ended, f"rank {self.rank} to listen")
        if self.process.poll() is not None:
            raise RuntimeError(f"rank {self.rank} ended before it listened:\n{self._last_words()}")
        return listening_ports(self.pid)


def wait_until(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Waits until something holds.

    Raises:
        RuntimeError: It does not within `limit` seconds.
    """
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"waited {limit:g} s for {what}")
        time.sleep(0.01)


@dataclass
class Needs:
    """What one rank needed."""

    resident: int = 0
    descriptors: int = 0
    threads: int = 0
    peak_resident: int = 0
    peak_descriptors: int = 0


@dataclass
class Result:
    """What came of one world."""

    formed: list[float] = field(default_factory=list)
    rounds: int = 0
    slowest: float = 0.0
    junk: int = 0
    needs: list[Needs] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@contextlib.contextmanager
def processes() -> Iterator[list[Rank]]:
    """Ranks that are gone at the end, come what may."""
    started: list[Rank] = []
    try:
        yield started
    finally:
        for rank in started:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
            for stream in (rank.process.stdin, rank.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


def environment(token: bytes) -> dict[str, str]:
    """The variables of a world that meets on loopback."""
    port = free_port()
    prefixes = ("PHALANX_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")
    env = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {
        **env,
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PHALANX_TOKEN": token.decode(),
    }


def run_world(folder: Path, token: bytes, fire: Fire | None, connections: int, seconds: float) -> Result:
    """One world from its first process to its last: in peace, or under fire."""
    result = Result()
    env = environment(token)
    with processes() as ranks:
        watch = Watch([])
        try:
            # Before: only rank 0 is there, with the directory and its own listener.
            ranks.append(Rank(0, env, folder))
            watch.add(ranks[0].pid)
            ranks[0].wait("started")
            ports = ranks[0].ports(2)
            if fire is not None:
                fire.situation.joined.add(0)
                directory = int(env["MASTER_PORT"])
                wait_until(lambda: is_connected(directory), "rank 0 to join its own directory")
                fire.aim(Target(directory, 0, directory=True))
                fire.aim(Target(next(port for port in ports if port != directory), 0, directory=False))
                wait_until(lambda: fire.fewest() >= connections // 4, "the first attacks")
            # While: the others come one by one, and their ports are under fire as soon as they are open.
            for number in range(1, SIZE):
                ranks.append(Rank(number, env, folder))
                watch.add(ranks[-1].pid)
                ranks[-1].wait("started")
                port = ranks[-1].ports(1)[0]
                if fire is not None:
                    fire.aim(Target(port, number, directory=False))
            result.formed = [rank.wait("formed")["seconds"] for rank in ranks]
            for rank in ranks:
                rank.wait("talking")
            # After: barriers and messages.
            if fire is not None:
                fire.situation.joined.update(range(SIZE))
                fire.insiders = True
                enough = max(3, connections // 20)
                wait_until(
                    lambda: fire.fewest() >= connections and fire.from_inside() >= enough,
                    "the attacks",
                    limit=LIMIT + connections / 20,
                )
            time.sleep(seconds if fire is not None else 1.0)
            if fire is not None:
                fire.stop()
            for rank in ranks:
                rank.tell("stop")
            said = [rank.wait("quiet") for rank in ranks]
            result.rounds = min(words["rounds"] for words in said)
            result.slowest = max(words["slowest"] for words in said)
            result.junk = sum(words["junk"] for words in said)
            time.sleep(0.5)
            watch.stop()
            for rank in ranks:
                peaks = watch.peaks[rank.pid]
                now = (resident(rank.pid), descriptors(rank.pid), threads(rank.pid))
                result.needs.append(Needs(*now, peaks.resident, peaks.descriptors))
            for rank in ranks:
                rank.tell("quit")
            for rank in ranks:
                result.left += rank.wait("closed")["threads"]
                if rank.process.wait(LIMIT) != 0:
                    raise RuntimeError(f"rank {rank.rank} ended with {rank.process.returncode}")
        finally:
            watch.stop()
            if fire is not None:
                fire.stop()
    return result


def is_connected(port: int) -> bool:
    """Whether somebody on this machine has a connection to this port."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return any(row[3] == "01" and row[2].endswith(f":{port:04X}") for row in rows)


def lines_of(log: Path) -> Counter[str]:
    """The connections that a rank dropped, by their address."""
    return Counter(DROPPED.findall(log.read_text()))


class Report:
    """Checks, and what they found."""

    def __init__(self) -> None:
        self.failed = 0
        self.text: list[str] = []

    def say(self, line: str = "") -> None:
        """Adds a line."""
        self.text.append(line)

    def check(self, good: bool, what: str) -> None:
        """Adds a verdict."""
        self.failed += not good
        self.text.append(f"  {'ok    ' if good else 'FAILED'}  {what}")


def judge(report: Report, peace: Result, war: Result, fire: Fire, folder: Path, connections: int) -> None:
    """Compares the two worlds."""
    kinds: Counter[str] = sum(fire.count.values(), Counter())
    per_port = [sum(kinds.values()) for kinds in fire.count.values()]
    report.say(f"{sum(per_port)} hostile connections to {len(per_port)} ports of {SIZE} ranks:")
    for kind, count in kinds.most_common():
        report.say(f"  {count:6d}  {kind}")
    report.say()
    report.say(f"  {'rank':>4}  {'memory, MiB':>24}  {'descriptors':>24}  {'threads':>16}  {'log lines':>10}")
    report.say(
        f"  {'':>4}  {'peace':>8}{'peak':>8}{'after':>8}  {'peace':>8}{'peak':>8}{'after':>8}  {'peace':>8}{'after':>8}"
    )
    for rank, (quiet, loud) in enumerate(zip(peace.needs, war.needs, strict=True)):
        memory = "".join(f"{size / 2**20:8.1f}" for size in (quiet.peak_resident, loud.peak_resident, loud.resident))
        opened = "".join(f"{n:8d}" for n in (quiet.descriptors, loud.peak_descriptors, loud.descriptors))
        running = "".join(f"{n:8d}" for n in (quiet.threads, loud.threads))
        lines = sum(lines_of(folder / f"rank-{rank}.log").values())
        report.say(f"  {rank:>4}  {memory}  {opened}  {running}  {lines:10d}")
    report.say()
    report.check(
        min(per_port) >= connections, f"every port had at least {connections} of them (fewest: {min(per_port)})"
    )
    last, all_in = war.formed[-1], max(war.formed)
    report.check(
        all_in < DEADLINE,
        f"the world formed: the last rank was in after {last:.2f} s (peace: {peace.formed[-1]:.2f} s), the first "
        f"had waited {all_in:.2f} s of {DEADLINE:g} s",
    )
    report.check(
        war.rounds > 0,
        f"{war.rounds} rounds of broadcast, barrier and messages, the slowest {war.slowest:.2f} s, nothing changed",
    )
    report.check(war.junk > 0, f"{war.junk} channels with junk were a clear error of one receive")
    grown = max(loud.peak_resident - quiet.peak_resident for quiet, loud in zip(peace.needs, war.needs, strict=True))
    report.check(
        grown < MEMORY, f"no rank's memory rose more than {MEMORY >> 20} MiB above peace (most: {grown / 2**20:.1f})"
    )
    for what, more in (("descriptors", 0), ("threads", 1)):  # a lane has a thread once something took it long
        before, after = ([getattr(needs, what) for needs in result.needs] for result in (peace, war))
        kept = all(there <= here + more for here, there in zip(before, after, strict=True))
        report.check(kept, f"no more {what} than in peace: {after}")
    peak = max(loud.peak_descriptors - quiet.descriptors for quiet, loud in zip(peace.needs, war.needs, strict=True))
    allowed = (
        f"{HANDSHAKES} handshakes a listener and {PARKED} channels of a rank that wait for their groups are allowed"
    )
    report.say(f"          (at most {peak} descriptors more at a time; {allowed})")
    report.check(not war.left, f"no thread was left after close {war.left or ''}")
    missing, twice = Counter[str](), Counter[str]()
    for rank, strangers in fire.strangers.items():
        logged = lines_of(folder / f"rank-{rank}.log")
        missing += strangers - logged
        twice += Counter({name: count for name, count in (logged - strangers).items() if name in strangers})
    total = sum(sum(strangers.values()) for strangers in fire.strangers.values())
    report.check(
        not missing and not twice,
        f"each of {total} strangers is in the log once (missing {missing.total()}, more than once {twice.total()})",
    )
    report.check(not fire.faults, f"attackers saw no fault {fire.faults[:3] or ''}")


def run(connections: int, seconds: float = 0.0, workers: int = WORKERS) -> Report:
    """The whole story: a world in peace, the same under fire, and the comparison."""
    report = Report()
    token = secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(prefix="phalanx-hostile-") as name:
        folders = [Path(name) / kind for kind in ("peace", "war")]
        for folder in folders:
            folder.mkdir()
        began = time.monotonic()
        peace = run_world(folders[0], token, None, 0, 0.0)
        fire = Fire(Situation(SIZE, token), workers=workers)
        war = run_world(folders[1], token, fire, connections, seconds)
        report.say(f"A world of {SIZE} processes under fire ({time.monotonic() - began:.0f} s)")
        judge(report, peace, war, fire, folders[1], connections)
    return report


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.hostile", description=__doc__)
    parser.add_argument("--connections", type=int, default=2000, help="hostile connections to each port, at least")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for so long after they were made")
    parser.add_argument("--workers", type=int, default=WORKERS, help="attackers at the same time")
    arguments = parser.parse_args()
    report = run(arguments.connections, arguments.seconds, arguments.workers)
    print("\n".join(report.text))
    print(f"\n{'FAILED: ' + str(report.failed) + ' checks' if report.failed else 'All checks passed.'}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
