"""The output of `phalanx demo`: a progress bar and colours on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from .report import TrainingStep

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["DemoScreen", "next_steps", "program", "screen"]


def next_steps(ranks: int) -> list[tuple[str, str]]:
    """Commands that work as they stand, and what each is for."""
    other = 2 if ranks != 2 else 4
    source = shlex.quote(_from_here(Path(__file__).with_name("train.py")))
    phalanx = program()
    return [
        (f"{phalanx} demo -n {other}", f"the same on {other} ranks"),
        (
            f"{phalanx} run -n {ranks} -m phalanx.cli.demo.train",
            "the job by itself, as you would start a script of your own",
        ),
        (f"cat {source}", "its source, to start from"),
        (f"{phalanx} doctor", "what on this machine would break a job or slow it down"),
    ]


def program() -> str:
    """The command in words that this shell understands: `make demo` runs it from an environment that is not active."""
    own = Path(sys.executable).with_name("phalanx")
    if not own.exists():
        return f"{shlex.quote(_from_here(Path(sys.executable)))} -m phalanx"
    found = shutil.which("phalanx")
    return "phalanx" if found is not None and Path(found).samefile(own) else shlex.quote(_from_here(own))


def _from_here(path: Path) -> str:
    """The path as seen from the working directory, if it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


class DemoScreen(Protocol):
    """Where the demo shows itself."""

    def say(self, text: str) -> None:
        """A sentence."""

    def progress(self, step: TrainingStep) -> None:
        """How far the training is."""

    def result(self, lines: Sequence[tuple[str, str]]) -> None:
        """Shows the outcome."""

    def next(self, steps: Sequence[tuple[str, str]]) -> None:
        """Shows commands to try next."""


class _Plain:
    """Lines for a log or a pipe. Progress is not worth a line there."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def progress(self, step: TrainingStep) -> None:
        pass

    def result(self, lines: Sequence[tuple[str, str]]) -> None:
        for name, text in lines:
            self.say(f"{name + ':' if name else '':<15}{text}")

    def next(self, steps: Sequence[tuple[str, str]]) -> None:
        self.say("\nTry next:")
        for command, purpose in steps:
            self.say(f"  {command}\n      {purpose}")


class _Terminal:
    """A bar while it runs, then the result in colour."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("starting the ranks", total=None, detail="")

    def say(self, text: str) -> None:
        self._console.print(text, style="bold")

    def progress(self, step: TrainingStep) -> None:
        detail = f"{step.done} of {step.steps} steps  loss {step.loss:.3f}"
        self._bar.update(self._task, description="training", total=step.steps, completed=step.done, detail=detail)

    def result(self, lines: Sequence[tuple[str, str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        self._bar.stop()
        table = Table.grid(padding=(0, 2))
        for name, text in lines:
            table.add_row(Text(name, "cyan"), Text(text))
        self._console.print()
        self._console.print(table)

    def next(self, steps: Sequence[tuple[str, str]]) -> None:
        self._console.print("\nTry next", style="bold")
        for command, purpose in steps:
            # Never wrapped: a command must survive being copied.
            self._console.print(f"  {command}", style="green", soft_wrap=True, highlight=False)
            self._console.print(f"      {purpose}", style="dim", highlight=False)


@contextlib.contextmanager
def screen(out: TextIO) -> Iterator[DemoScreen]:
    """The right kind for this output. On the way out, also after an error, the terminal is as it was before."""
    if not out.isatty():
        yield _Plain(out)
        return
    # Only now: importing them takes longer than a log is worth.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=out)
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield _Terminal(console, bar)
