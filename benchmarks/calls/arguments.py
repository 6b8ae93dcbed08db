"""The command line of `python -m benchmarks rpc`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from phalanx.cli.bench.contenders import TRANSPORTS, Contender, Missing
from phalanx.cli.bench.options import command_line, end_on_signals, list_of, of_every_run
from phalanx.cli.bench.plot import check_plot, draw
from phalanx.cli.bench.session import run

from .contenders import PEERS, PIPE, find_peer, ours
from .plan import CELLS, RemoteCallPlan
from .show import all_errors, show
from .worker import IN_FLIGHT

__all__ = ["command"]

_EPILOG = f"""\
\b
Cells:
  8, 1K, 16K   bytes of that size there and back, one call after the other
  in-flight    {IN_FLIGHT} calls of 8 bytes under way at once
  1M, 16M      a float32 array of that size there and back

\b
Contenders:
  Phalanx      over each --transport; always
  pipe         a bare multiprocessing.Pipe, which calls nothing: the yardstick; always
  torch        torch.distributed.rpc (TensorPipe)
  zmq          pyzmq, DEALER and ROUTER over loopback TCP
  grpc         gRPC with plain bytes
  ray          a method of an actor; --ray PATH names the Python that has Ray

Each is two processes on this machine. What came back is checked once before it is timed.

\b
Examples:
  python -m benchmarks rpc
  python -m benchmarks rpc --against torch,zmq,grpc --json rpc.json
  python -m benchmarks rpc --cells 8,16M --transport tcp --against zmq
  python -m benchmarks rpc --against ray --ray .venv-ray/bin/python
"""


@click.command(
    "rpc",
    epilog=_EPILOG,
    short_help="Measure remote calls, beside a pipe and other libraries.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--cells",
    metavar="LIST",
    default=",".join(CELLS),
    show_default=True,
    callback=list_of(list(CELLS)),
    help="What to measure.",
)
@click.option(
    "--transport",
    "transports",
    metavar="LIST",
    default=",".join(TRANSPORTS),
    show_default=True,
    callback=list_of(TRANSPORTS),
    help="How Phalanx moves bytes: auto, tcp, or both.",
)
@click.option(
    "--against",
    metavar="LIST",
    callback=list_of([PIPE.name, *PEERS]),
    help="Peers to measure in the same run: torch, zmq, grpc, ray.",
)
@click.option(
    "--ray",
    metavar="PATH",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A Python that has Ray, if this one has not.",
)
@of_every_run()
def command(
    cells: list[str],
    transports: list[str],
    against: list[str],
    ray: Path | None,
    rounds: int,
    round_ms: float,
    limit: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure remote calls of Phalanx between two processes of this machine, and those of its peers in the same run.

    The contenders take turns in short rounds, so that a noisy moment meets all of them. A bare multiprocessing.Pipe is
    always one of them. The exit code is 1 if Phalanx failed anywhere.
    """
    end_on_signals()
    if not cells or not transports:
        raise click.UsageError("there is nothing to measure: --cells and --transport need at least one name each")
    if plot_file is not None:
        check_plot(plot_file)
    found = [find_peer(name, ray=ray) for name in against if name != PIPE.name]
    missing = [peer for peer in found if isinstance(peer, Missing)]
    for peer in missing:
        click.echo(f"benchmarks: {peer.name} is left out: {peer.reason}", err=True)
    plan = RemoteCallPlan(
        names=cells,
        contenders=[*map(ours, transports), PIPE, *(peer for peer in found if isinstance(peer, Contender))],
        rounds=rounds,
        round_seconds=round_ms / 1000,
        limit=limit,
    )
    report, code = run(plan, missing=missing, command=command_line("python -m benchmarks rpc"), json_file=json_file)
    show(report, sys.stdout)
    for text in all_errors(report):
        click.echo(f"benchmarks: {text}", err=True)
    if plot_file is not None and not report.unmeasured:
        draw(report, plot_file)
    sys.exit(code)
