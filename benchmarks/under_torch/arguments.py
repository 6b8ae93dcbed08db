"""The command line of `python -m benchmarks torch`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from phalanx.cli.bench.contenders import TRANSPORTS
from phalanx.cli.bench.operations import DTYPES, OPERATIONS
from phalanx.cli.bench.options import command_line, end_on_signals, list_of, of_every_run, ranks_of, sizes_of, unique
from phalanx.cli.bench.plan import BenchPlan
from phalanx.cli.bench.plot import check_plot, draw
from phalanx.cli.bench.session import run
from phalanx.cli.bench.show import all_errors, show
from phalanx.errors import BackendUnavailable

from .contenders import gloo, plugin
from .goals import summary
from .operations import LISTS, MESSAGES, POSTED

__all__ = ["DEFAULT_OPERATIONS", "command"]

_KNOWN = [*OPERATIONS, POSTED, *LISTS]
DEFAULT_OPERATIONS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"),
    *LISTS,
    *MESSAGES,
)

_EPILOG = f"""\
\b
Operations:
  {", ".join(_KNOWN[:6])},
  {", ".join(_KNOWN[6:11])},
  {", ".join(_KNOWN[11:])}

Those that end in _list have a list of one tensor per rank on one side, as dist.all_gather; the others are one tensor,
as dist.all_gather_into_tensor. A message there and back is dist.send and dist.recv in pingpong, dist.isend and
dist.irecv in pingpong_async; its time is that of one way. A size is that of the largest tensor, or of the whole list.
Every result is checked once before it is timed.

\b
Examples:
  python -m benchmarks torch --against gloo
  python -m benchmarks torch all_reduce -n 2,4 --sizes 4,16K,1M,64M --against gloo --json torch.json
"""


def _operations(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> list[str]:
    return unique([name for word in value for name in word.split(",")], _KNOWN) or list(DEFAULT_OPERATIONS)


@click.command(
    "torch",
    epilog=_EPILOG,
    short_help="Measure torch.distributed on Phalanx, beside Gloo.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("operations", metavar="[OPERATION]...", nargs=-1, callback=_operations)
@click.option(
    "-n", "--ranks", metavar="LIST", default="2", show_default=True, callback=ranks_of, help="Numbers of ranks, as 2,4."
)
@click.option(
    "-s",
    "--sizes",
    metavar="LIST",
    default="4,1K,16K,128K,1M,8M,64M",
    show_default=True,
    callback=sizes_of,
    help="Sizes, as 4,1K,64M; or 8..64M for those between by factors of eight.",
)
@click.option(
    "--dtype",
    "dtypes",
    metavar="LIST",
    default="float32",
    show_default=True,
    callback=list_of(DTYPES),
    help="Types of the elements, as float32,int8.",
)
@click.option(
    "--transport",
    "transports",
    metavar="LIST",
    default="auto",
    show_default=True,
    callback=list_of(TRANSPORTS),
    help="How Phalanx moves bytes: auto, tcp, or both.",
)
@click.option("--against", metavar="LIST", callback=list_of(("gloo",)), help="Measured in the same run: gloo.")
@of_every_run()
def command(
    operations: list[str],
    ranks: list[int],
    sizes: list[int],
    dtypes: list[str],
    transports: list[str],
    against: list[str],
    rounds: int,
    round_ms: float,
    limit: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure OPERATIONs of torch.distributed on Phalanx, and on Gloo in the same run.

    The contenders take turns in short rounds, so that a noisy moment meets both. The exit code is 1 if Phalanx failed
    anywhere.
    """
    end_on_signals()
    if not transports or not dtypes:
        raise click.UsageError("there is nothing to measure: --transport and --dtype need at least one name each")
    if importlib.util.find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed (pip install torch; its CPU build is enough)")
    if plot_file is not None:
        check_plot(plot_file)
    plan = BenchPlan(
        operations=operations,
        sizes=sizes,
        dtypes=dtypes,
        ranks=ranks,
        contenders=[*map(plugin, transports), *([gloo()] if against else [])],
        rounds=rounds,
        round_seconds=round_ms / 1000,
        limit=limit,
    )
    report, code = run(plan, command=command_line("python -m benchmarks torch"), json_file=json_file)
    show(report, sys.stdout, list(summary(report)))
    for text in all_errors(report):
        click.echo(f"benchmarks: {text}", err=True)
    if plot_file is not None and not report.unmeasured:
        draw(report, plot_file)
    sys.exit(code)
