"""Remote calls from everybody to everybody, of all kinds at once: is each answered once, and with the right answer?

    python -m tests.soak.calls [--calls 100000] [--ranks 4] [--transport auto|tcp] [--seed S]
    python -m tests.soak.calls --kill 50       worlds in which a rank is killed under that load
    python -m tests.soak.calls --flood 60      a caller that is faster than the handler, for so many seconds

Sizes, depths, cancellations, deadlines and errors are random. What a call must come to is known before it is made, and
a server counts how often it ran each. Descriptors, threads and mappings must be the same at the end as after the first
calls, and memory must not grow. Exits with 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import Counter
from typing import Any

from rich.console import Console
from tests.soak.calls_rank import PATIENCE, pour, under_fire, work

import phalanx as px
from phalanx.testing import run_ranks

GROWTH = 40 << 20
"""Bytes by which a rank may grow: what the allocator keeps of the largest arrays, not something for each call."""
SETTLE = 15.0
"""Seconds after which threads without work have ended."""
CONTRACT = 1.0
"""Seconds within which the loss of a rank is noticed."""


def run_calls(calls: int, ranks: int, transport: Any, seed: str, console: Console, *, short: bool = False) -> bool:
    """Many calls; True if all is well. A short run says nothing about what is held at its end."""
    options = px.Options(transport=transport)
    settle = 0.0 if short else SETTLE
    results = run_ranks(ranks, work, calls, seed, settle, backend="mesh", options=options, timeout=3600)
    outcomes: Counter[str] = Counter()
    good = True
    for rank, result in enumerate(results):
        outcomes.update(result["outcomes"])
        before, after = result["before"], result["after"]
        held = ", ".join(f"{name} {_shown(name, before[name])} -> {_shown(name, after[name])}" for name in before)
        console.print(f"rank {rank}: {held}", highlight=False)
        for name in before:
            if not short and after[name] > before[name] + (GROWTH if name == "memory" else 0):
                good = False
                console.print(f"[red]rank {rank}: {name} grew")
        for words in result["wrong"]:
            good = False
            console.print(f"rank {rank}: {words}", style="red", markup=False)
    made = sum(result["calls"] for result in results)
    seconds = max(result["seconds"] for result in results)
    words = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    console.print(f"{made} calls in {seconds:.1f} s, {made / seconds:.0f} a second: {words}", highlight=False)
    return good


def run_kills(worlds: int, ranks: int, transport: Any, seed: str, console: Console) -> bool:
    """Worlds with a rank that is killed; True if all is well."""
    notices: list[float] = []
    outcomes: Counter[str] = Counter()
    good = True
    for number in range(worlds):
        chance = random.Random(f"{seed}/{number}")
        victim = chance.randrange(ranks)
        results = run_ranks(
            ranks,
            under_fire,
            f"{seed}/{number}",
            backend="mesh",
            options=px.Options(transport=transport),
            may_die=[victim],
            timeout=90,
        )
        for rank, result in enumerate(results):
            if rank == victim:
                continue
            notices += result["notices"]
            outcomes.update(result["outcomes"])
            late = [notice for notice in result["notices"] if notice > CONTRACT]
            if late:
                result["wrong"].append(f"noticed the loss after {max(late):.3f} s")
            for words in result["wrong"]:
                good = False
                console.print(f"world {number}, rank {rank}: {words}", style="red", markup=False)
    if not notices:
        console.print("[red]no call was under way when a rank was killed")
        return False
    words = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    console.print(
        f"{worlds} ranks killed: {len(notices)} calls found it lost, the median after "
        f"{statistics.median(notices) * 1e3:.1f} ms, the last after {max(notices) * 1e3:.0f} ms; {words}",
        highlight=False,
    )
    return good


def run_flood(seconds: float, transport: Any, console: Console) -> bool:
    """A caller that is faster than the handler; True if all is well."""
    results = run_ranks(
        2, pour, seconds, backend="mesh", options=px.Options(transport=transport), timeout=seconds + 3 * PATIENCE
    )
    samples = results[0]["samples"]
    settled = samples[len(samples) // 5]
    good = not results[0]["wrong"]
    for words in results[0]["wrong"]:
        console.print(words, style="red", markup=False)
    for who, place in (("caller", 0), ("server", 1)):
        most = max(sample[place] for sample in samples)
        line = " -> ".join(_shown("memory", sample[place]) for sample in (samples[0], settled, samples[-1]))
        console.print(f"{who}: memory {line}, {_shown('memory', most)} at most", highlight=False)
        if most > settled[place] + GROWTH:
            good = False
            console.print(f"[red]the {who}'s memory grew")
    rate = results[0]["sent"] / seconds
    console.print(f"{results[0]['sent']} calls in {seconds:g} s, {rate:.0f} a second, none lost", highlight=False)
    return good


def _shown(name: str, value: int) -> str:
    return f"{value / (1 << 20):.1f} MiB" if name == "memory" else str(value)


def main(arguments: list[str] | None = None) -> int:
    """Runs what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.calls", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, default=0, metavar="WORLDS")
    parser.add_argument("--flood", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--transport", choices=["auto", "tcp"], default="auto")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(1 << 32)))
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True)
    console.print(f"seed {options.seed}", highlight=False)
    if options.kill:
        good = run_kills(options.kill, options.ranks, options.transport, options.seed, console)
    elif options.flood:
        good = run_flood(options.flood, options.transport, console)
    else:
        good = run_calls(options.calls, options.ranks, options.transport, options.seed, console)
    console.print("[green]all is well" if good else "[red]something is wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
