"""Saves in the middle of which ranks are killed: the checkpoint is the old one or the new one, to the last bit.

    python -m tests.soak.saves [--kills 500] [--ranks 4] [--seed S]

Each world loads what the last one left, saves once, and dies in its second save: one rank or all of them at once, by
SIGKILL, when the code of checkpoints has come to a line that the seed says, or some milliseconds after it, which may be
in the middle of a write. Whatever is left has to load, alone and on all ranks, and every byte is compared. Exits with 1
if any of this fails, and says with which seed.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tests.soak.saves_rank import Plan, run_rank, step_of

import phalanx as px
from phalanx.checkpoint.index import INDEX
from phalanx.testing import Died, run_ranks

__all__ = ["Outcome", "kill_in_a_save"]


LIMIT = 60.0
"""Seconds after which a world counts as hung."""


class Outcome(NamedTuple):
    """What became of a world."""

    plan: Plan
    place: str
    """The module and function in which the victim was."""
    is_new: bool
    """Whether the new checkpoint is there."""


def kill_in_a_save(folder: Path, plan: Plan, ranks: int = 4) -> Outcome:
    """One world.

    Raises:
        AssertionError: The checkpoint is not a whole one, or somebody did not hear of the loss.
    """
    first = px.checkpoint.load(folder)["step"] + 1 if (folder / INDEX).exists() else 0
    may_die = range(ranks) if plan.all_die else [plan.victim]
    results = run_ranks(ranks, run_rank, str(folder), first, plan, backend="mesh", timeout=LIMIT, may_die=may_die)
    assert isinstance(results[plan.victim], Died), f"the victim lives: {results}"
    heard = {result for result in results if not isinstance(result, Died)}
    assert heard <= {"saved", f"lost rank {plan.victim}"}, f"the ranks heard: {results}"
    step = step_of(px.checkpoint.load(folder), 0, ranks, all_parts=True)
    assert step in (first, first + 1), f"step {step} is neither {first} nor {first + 1}"
    px.checkpoint.verify(folder)
    assert step == first + 1 or "saved" not in results, "saved, but it is the old one"
    return Outcome(plan, Path(f"{folder}.place").read_text(), step == first + 1)


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.saves", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="of the first world; the others count on from it")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    console = Console(soft_wrap=True)
    logging.getLogger("phalanx").setLevel(logging.ERROR)
    console.print(f"{options.kills} kills on {options.ranks} ranks, with seeds from {seed} on")
    outcomes: list[Outcome] = []
    failed = 0
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="saves-") as folder,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("Saves", total=options.kills)
        for number in range(options.kills):
            plan = Plan.draw(seed + number, options.ranks)
            try:
                outcomes.append(kill_in_a_save(Path(folder) / "checkpoint", plan, options.ranks))
            except Exception as error:
                failed += 1
                console.print(f"[red]failed[/red] {plan}: {type(error).__name__}: {error}", highlight=False)
            progress.update(task, advance=1, description=f"Saves{f', {failed} failed' if failed else ''}")
    new = sum(outcome.is_new for outcome in outcomes)
    words = f"{new} found the new one, {len(outcomes) - new} the old one"
    console.print(f"{len(outcomes)} in {time.monotonic() - began:.0f} s: {words}")
    for place, count in Counter(outcome.place for outcome in outcomes).most_common():
        console.print(f"  {count:>5}  {place}", highlight=False)
    console.print(f"{'[red]' if failed else '[green]'}{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
