"""`phalanx demo`: four ranks train a small classifier on real data, with nothing to configure.

The ranks run `phalanx.cli.demo.train` under `phalanx run`, as any script would. Rank 0 writes its progress to a file,
and this process, which has the terminal, draws it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

import click

from .follow import follow
from .report import Outcome
from .screen import DemoScreen, next_steps, screen

__all__ = ["command"]

_GRACE = 15.0
"""Seconds for the launcher to end its ranks: more than its own grace period, since only it can end all of them."""


@click.command(short_help="Train a small classifier on four ranks; nothing to configure.")
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="How many ranks to start on this machine.",
)
@click.option(
    "--steps", type=click.IntRange(1, 100_000), default=600, show_default=True, help="How many steps to train."
)
def command(ranks: int, steps: int) -> None:
    """Train a small classifier of handwritten digits on four ranks of this machine.

    Every rank learns from its own share of the images; the gradients are averaged at every step. Nothing is downloaded,
    and nothing is left behind.
    """
    # Either would end this process at once, and leave the launcher and the folder behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with screen(sys.stdout) as view:
        who = "One rank trains" if ranks == 1 else f"{ranks} ranks on this machine train"
        view.say(f"{who} a classifier of handwritten digits; gradients are averaged over all ranks at every step.")
        with tempfile.TemporaryDirectory(prefix="phalanx-demo-") as folder:
            outcome = _train(view, Path(folder), ranks, steps)
        view.result(outcome.lines())
        view.next(next_steps(ranks))
    sys.exit(0 if outcome.identical else 1)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _train(view: DemoScreen, folder: Path, ranks: int, steps: int) -> Outcome:
    """Runs the job and shows its progress.

    Raises:
        click.ClickException: It failed; what its ranks wrote is in the message.
    """
    events, log = folder / "events", folder / "log"
    script = ["-m", "phalanx.cli.demo.train", "--steps", str(steps), "--events", str(events)]
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "run", "-n", str(ranks), *script],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        outcome = follow(events, view.progress, running=lambda: launcher.poll() is None)
        code = launcher.wait(_GRACE)
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            try:
                launcher.wait(_GRACE)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
    if code or outcome is None:
        said = log.read_text(errors="replace").strip()
        raise click.ClickException(
            f"the demo's job ended with exit code {code}. This is what it wrote:\n\n{said or '(nothing)'}\n\n"
            "'phalanx doctor' looks at what may be wrong with this machine."
        )
    return outcome
