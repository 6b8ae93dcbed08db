"""The command line of `python -m benchmarks training`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from phalanx.cli.bench.options import command_line, end_on_signals, list_of, of_every_run, ranks_of
from phalanx.cli.bench.session import run
from phalanx.errors import BackendUnavailable

from .operations import TRAINING
from .plan import CONTENDERS, TrainingPlan
from .show import all_errors, show

__all__ = ["command"]

_EPILOG = """\
\b
Models:
  gpt       a small GPT: 4 blocks of width 128, 0.8 million parameters, AdamW
  layers    120 small layers with normalisation between them, 480 tensors of parameters, SGD

\b
Examples:
  python -m benchmarks training
  python -m benchmarks training --models gpt -n 2,4 --json training.json
"""


@click.command(
    "training",
    epilog=_EPILOG,
    short_help="Measure steps of data-parallel training, beside torch's DDP on Gloo.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--models",
    metavar="LIST",
    default=",".join(TRAINING),
    show_default=True,
    callback=list_of(list(TRAINING)),
    help="What to train.",
)
@click.option(
    "-n", "--ranks", metavar="LIST", default="2", show_default=True, callback=ranks_of, help="Numbers of ranks, as 2,4."
)
@of_every_run(plot=False)
def command(
    models: list[str], ranks: list[int], rounds: int, round_ms: float, limit: float, json_file: Path | None
) -> None:
    """Measure steps of training with torch's DDP on Gloo, torch's DDP on Phalanx, and Phalanx's own DDP.

    The contenders take turns in short rounds, so that a noisy moment meets all of them. Every process computes with
    one thread. The exit code is 1 if Phalanx failed anywhere.
    """
    end_on_signals()
    if not models:
        raise click.UsageError("there is nothing to measure: --models needs at least one name")
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed (pip install torch; its CPU build is enough)")
    plan = TrainingPlan(
        operations=models,
        ranks=ranks,
        contenders=list(CONTENDERS.values()),
        rounds=rounds,
        round_seconds=round_ms / 1000,
        limit=limit,
    )
    report, code = run(plan, command=command_line("python -m benchmarks training"), json_file=json_file)
    show(report, sys.stdout)
    for text in all_errors(report):
        click.echo(f"benchmarks: {text}", err=True)
    sys.exit(code)
