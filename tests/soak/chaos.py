"""Worlds in which a rank is killed or stopped at a random moment: who notices, how soon, and what is left behind.

    python -m tests.soak.chaos [--worlds 200] [--stop-worlds 20] [--transport auto|tcp|both] [--seed S]

Every survivor of a killed rank has to raise `PeerLost` with its number within a second, every survivor of a stopped one
`Timeout` that names it; and when a world has ended, no process, thread, descriptor, listening port, shared memory or
private file may be left. Exits with 1 if any of this fails, and says with which seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tests.lateness import bound
from tests.soak.chaos_rank import listening_inodes
from tests.soak.chaos_zygote import Zygote

from phalanx.rendezvous.directory import Directory
from phalanx.types import Address

CONTRACT = 1.0
"""Seconds within which a survivor notices a loss."""
LIMIT = 40.0
"""Seconds after which a world that has not ended counts as hung."""
COLLECTIVE_TIMEOUT = 1.5
"""Of worlds with a stopped rank."""
MESSAGE_TIMEOUT = 2.5
STOP_BOUND = MESSAGE_TIMEOUT + COLLECTIVE_TIMEOUT + 2.0
"""Seconds within which a stopped rank must have been named: both deadlines, and the time to ask what others do."""

Event = dict[str, Any]


@dataclass
class Plan:
    """What will happen in one world, all of it drawn from its seed."""

    kind: str
    seed: int
    size: int
    victim: int
    host: str
    moment: str
    delay: float
    transport: str

    @classmethod
    def draw(cls, kind: str, seed: int, transport: str = "both") -> Plan:
        """Draws a plan."""
        random_ = random.Random(f"{kind}/{seed}")
        size = random_.randint(2, 8)
        moment = "forming" if kind == "kill" and random_.random() < 0.1 else "working"
        delay = random_.random() * (0.03 if moment == "forming" else 0.5)
        victim, host = random_.randrange(size), random_.choice(["rank0", "parent"])
        transport = random_.choice(["auto", "tcp"]) if transport == "both" else transport
        return cls(kind, seed, size, victim, host, moment, delay, transport)

    def __str__(self) -> str:
        host = "rank 0" if self.host == "rank0" else "the parent"
        return (
            f"seed {self.seed}: {self.kind} rank {self.victim} of {self.size} {self.delay:.3f} s into {self.moment}, "
            f"directory hosted by {host}, transport {self.transport}"
        )


@dataclass
class Outcome:
    """What happened in it."""

    plan: Plan
    times: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    formed: bool = True


class Chaos:
    """Runs worlds, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._runtime = folder / "runtime"
        self._runtime.mkdir(mode=0o700)
        self._address = str(folder / "events")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        outer = ("PHALANX_", "TORCHELASTIC_", "MASTER_", "OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        self._zygote = Zygote({**kept, "XDG_RUNTIME_DIR": str(self._runtime)})
        self._shared_memory = _shared_memory()

    def close(self) -> None:
        """Gives everything back."""
        self._zygote.close()
        self._socket.close()

    def run(self, plan: Plan) -> Outcome:
        """Runs one world."""
        outcome = Outcome(plan)
        directory, variables = self._meeting(plan)
        events: list[Event] = []
        pids: list[int] = []
        try:
            pids = self._zygote.start([self._config(plan, rank, variables) for rank in range(plan.size)])
            struck = self._strike(plan, pids, events)
            self._collect(plan, events)
            if plan.kind == "stop":
                self._resume(plan, pids, events)
        except _Hung as hung:
            outcome.faults.append(str(hung))
            struck = float("-inf")
        self._check_events(plan, outcome, events, struck)
        self._end(plan, outcome, pids)
        if directory is not None:
            directory.close()
        self._check_left(plan, outcome, events)
        return outcome

    # -- a world's life ------------------------------------------------------------------------------------------------

    def _meeting(self, plan: Plan) -> tuple[Directory | None, dict[str, str]]:
        sizes = {
            "WORLD_SIZE": str(plan.size),
            "LOCAL_WORLD_SIZE": str(plan.size),
            "PHALANX_TRANSPORT": plan.transport,
        }
        if plan.host == "parent":
            token = secrets.token_hex(16)
            directory = Directory(plan.size, token=token.encode(), bind=Address("127.0.0.1", 0))
            return directory, {**sizes, "PHALANX_DIRECTORY": str(directory.address), "PHALANX_TOKEN": token}
        # As under torchrun on one host: rank 0 takes any port and tells the others by a private file.
        return None, {
            **sizes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        }

    def _config(self, plan: Plan, rank: int, variables: dict[str, str]) -> dict[str, Any]:
        stop = plan.kind == "stop"
        return {
            "rank": rank,
            "variables": {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            "address": self._address,
            "seed": plan.seed,
            # Also how long a rank 0 that hosts the directory waits in close() for a stopped rank to leave.
            "join_timeout": 3.0 if plan.moment == "forming" else 5.0 if stop else 20.0,
            # Without a timeout of its own, a call on plain arrays takes the fast path.
            "timeout": COLLECTIVE_TIMEOUT if stop else None,
            "message_timeout": MESSAGE_TIMEOUT if stop else 20.0,
        }

    def _strike(self, plan: Plan, pids: list[int], events: list[Event]) -> float:
        """Waits for the moment and sends the signal; returns the time just before."""
        if plan.moment == "forming":
            self._wait(events, lambda e: e["event"] == "started" and e["rank"] == plan.victim, 1)
        else:
            self._wait(events, lambda e: e["event"] == "joined", plan.size)
        time.sleep(plan.delay)
        struck = time.monotonic()
        os.kill(pids[plan.victim], signal.SIGKILL if plan.kind == "kill" else signal.SIGSTOP)
        return struck

    def _collect(self, plan: Plan, events: list[Event]) -> None:
        self._wait(events, lambda e: e["event"] in ("closed", "failed") and e["rank"] != plan.victim, plan.size - 1)

    def _resume(self, plan: Plan, pids: list[int], events: list[Event]) -> None:
        """Half of the stopped ranks go on: they must find out that the world has ended without them."""
        if plan.seed % 2:
            os.kill(pids[plan.victim], signal.SIGCONT)
            self._wait(events, lambda e: e["event"] == "closed" and e["rank"] == plan.victim, 1)
        else:
            os.kill(pids[plan.victim], signal.SIGKILL)

    def _wait(self, events: list[Event], wanted: Any, count: int) -> None:
        end = time.monotonic() + LIMIT
        while sum(1 for event in events if wanted(event)) < count:
            left = end - time.monotonic()
            if left <= 0:
                seen = {r: [e["event"] for e in events if e["rank"] == r] for r in {e["rank"] for e in events}}
                raise _Hung(f"hung: not done after {LIMIT:g} s; events by rank: {seen}")
            self._socket.settimeout(left)
            with contextlib.suppress(TimeoutError):
                events.append(json.loads(self._socket.recv(1 << 20)))

    def _end(self, plan: Plan, outcome: Outcome, pids: list[int]) -> None:
        if outcome.faults:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        codes = self._zygote.reap(pids, LIMIT)
        for rank, code in enumerate(codes):
            if code is None:
                outcome.faults.append(f"rank {rank} (process {pids[rank]}) does not end")
                os.kill(pids[rank], signal.SIGKILL)
            elif not outcome.faults:
                killed = rank == plan.victim and (plan.kind == "kill" or not plan.seed % 2)
                if code != (-signal.SIGKILL if killed else 0):
                    outcome.faults.append(f"rank {rank} ended with code {code}")
        # What a rank said after the world was given up must not be taken for the next world's.
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(1 << 20):
                pass

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _check_events(self, plan: Plan, outcome: Outcome, events: list[Event], struck: float) -> None:
        survivors = [rank for rank in range(plan.size) if rank != plan.victim]
        check = self._check_stopped if plan.kind == "stop" else self._check_killed
        for rank in survivors:
            told = {event["event"]: event for event in events if event["rank"] == rank}
            if "failed" in told:
                self._check_not_formed(plan, outcome, told["failed"])
            elif "raised" in told:
                check(plan, outcome, told, struck)
            elif not outcome.faults:
                outcome.faults.append(f"rank {rank} raised nothing: {sorted(told)}")
            end = told.get("closed") or told.get("failed")
            if end is not None and (end["threads"] != 1 or end["files"]):
                outcome.faults.append(f"rank {rank} has {end['threads']} threads and {end['files']} after close()")

    def _check_killed(self, plan: Plan, outcome: Outcome, told: dict[str, Event], struck: float) -> None:
        raised, again = told["raised"], told.get("again")
        rank = raised["rank"]
        if raised["type"] != "PeerLost" or raised["peer"] != plan.victim:
            outcome.faults.append(f"rank {rank} raised {raised['type']}: {raised['text']}")
            return
        took = raised["at"] - max(struck, told["joined"]["at"])
        outcome.times.append(took)
        if took > bound(CONTRACT):
            outcome.faults.append(f"rank {rank} noticed only after {took:.3f} s: {raised['text']}")
        if (
            again is None
            or again["type"] != "PeerLost"
            or again["peer"] != plan.victim
            or again["took"] > bound(CONTRACT)
        ):
            outcome.faults.append(f"rank {rank}: the next call should raise the first cause at once, but: {again}")

    def _check_stopped(self, plan: Plan, outcome: Outcome, told: dict[str, Event], struck: float) -> None:
        raised = told["raised"]
        rank = raised["rank"]
        if raised["type"] != "Timeout" or plan.victim not in raised["missing"]:
            outcome.faults.append(
                f"rank {rank} raised {raised['type']} (missing {raised['missing']}): {raised['text']}"
            )
            return
        took = raised["at"] - struck
        outcome.times.append(took)
        if took > bound(STOP_BOUND):
            outcome.faults.append(f"rank {rank} gave up only after {took:.3f} s: {raised['text']}")

    def _check_not_formed(self, plan: Plan, outcome: Outcome, failed: Event) -> None:
        outcome.formed = False
        if plan.moment != "forming" or plan.victim not in failed["missing"]:
            outcome.faults.append(f"rank {failed['rank']} did not join: {failed['type']}: {failed['text']}")

    def _check_left(self, plan: Plan, outcome: Outcome, events: list[Event]) -> None:
        inodes = {inode for event in events if event["event"] == "joined" for inode in event["listening"]}
        ports = inodes & listening_inodes()
        if ports:
            outcome.faults.append(f"{len(ports)} listening ports are left")
        memory = _shared_memory() - self._shared_memory
        if memory:
            outcome.faults.append(f"left in /dev/shm: {sorted(memory)}")
        for path in list(self._runtime.iterdir()):
            # Nobody can remove the file of a rank 0 that was killed before all others had read it; the next rank 0
            # of that job will.
            known = plan.moment == "forming" and plan.victim == 0 and path.suffix == ".token"
            if not known:
                outcome.faults.append(f"left in the runtime folder: {path.name}")
            path.unlink()


class _Hung(Exception):
    pass


SLATES = f"phalanx-{os.geteuid()}"
"""The folder of what a failed job leaves for `phalanx doctor --last`."""


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return (
        {path.name for path in folder.iterdir() if "phalanx" in path.name and path.name != SLATES}
        if folder.is_dir()
        else set()
    )


# -- what to say -------------------------------------------------------------------------------------------------------


def percentile(ordered: list[float], share: float) -> float:
    """The value below which that share of the values lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(console: Console, title: str, outcomes: list[Outcome], bounds: list[float], seconds: float) -> bool:
    """Prints the distribution and the failures; True if there are none."""
    times = sorted(time_ for outcome in outcomes for time_ in outcome.times)
    failed = [outcome for outcome in outcomes if outcome.faults]
    processes = sum(outcome.plan.size for outcome in outcomes)
    unformed = sum(not outcome.formed for outcome in outcomes)
    console.print(f"\n[bold]{title}[/bold]: {len(outcomes)} worlds, {processes} processes, {seconds:.0f} s")
    if unformed:
        console.print(f"  {unformed} were struck before they had formed; their survivors said who was missing")
    if times:
        names = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        words = ", ".join(f"{name} {percentile(times, share) * 1000:.1f} ms" for name, share in names.items())
        console.print(f"  noticed by {len(times)} survivors: {words}")
        histogram(console, times, bounds)
    for outcome in failed:
        console.print(f"[red]failed[/red] {outcome.plan}", highlight=False)
        for fault in outcome.faults:
            console.print(f"    {fault}", highlight=False, markup=False)
    console.print(f"  {'[green]' if not failed else '[red]'}{len(failed)} worlds failed")
    return not failed


def histogram(console: Console, times: list[float], bounds: Iterable[float]) -> None:
    """A small histogram in text."""
    low = 0.0
    rows = []
    for high in [*bounds, float("inf")]:
        rows.append((low, high, sum(1 for value in times if low <= value < high)))
        low = high
    most = max(count for _, _, count in rows)
    for low, high, count in rows:
        if count or high != float("inf"):
            open_ended = high == float("inf")
            label = f"{low * 1000:.0f} ms and more" if open_ended else f"{low * 1000:.0f} to {high * 1000:.0f} ms"
            console.print(f"  {label:>17}{count:>7} {'█' * round(40 * count / most)}", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--worlds", type=int, default=200, help="with a killed rank (default: 200)")
    parser.add_argument("--stop-worlds", type=int, default=20, help="with a stopped rank (default: 20)")
    parser.add_argument("--transport", choices=["auto", "tcp", "both"], default="both", help="half of each by default")
    parser.add_argument("--seed", type=int, default=None, help="of the first world; the others count on from it")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console = Console(soft_wrap=True)
    logging.getLogger("phalanx").setLevel(logging.ERROR)  # that ranks go away is the point here
    console.print(f"chaos with seeds from {seed} on")
    good = True
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        chaos = Chaos(Path(folder))
        try:
            kills = [Plan.draw("kill", seed + number, options.transport) for number in range(options.worlds)]
            stops = [Plan.draw("stop", seed + number, options.transport) for number in range(options.stop_worlds)]
            for title, plans, bounds in (
                ("A rank was killed", kills, [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]),
                ("A rank was stopped", stops, [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0]),
            ):
                if plans:
                    began = time.monotonic()
                    outcomes = run_all(console, chaos, title, plans)
                    good = report(console, title, outcomes, bounds, time.monotonic() - began) and good
        finally:
            chaos.close()
    return 0 if good else 1


def run_all(console: Console, chaos: Chaos, title: str, plans: list[Plan]) -> list[Outcome]:
    """Runs worlds one after the other, with a bar on a terminal."""
    outcomes = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=len(plans))
        for plan in plans:
            outcome = chaos.run(plan)
            outcomes.append(outcome)
            failed = sum(bool(o.faults) for o in outcomes)
            progress.update(task, advance=1, description=f"{title}{f', {failed} failed' if failed else ''}")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
