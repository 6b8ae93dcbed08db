"""The command line of `phalanx bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from phalanx.cuda.driver import driver
from phalanx.errors import BackendUnavailable
from phalanx.operating_system import LINUX

from .calibration import show_calibration
from .contenders import MPIS, PEERS, TRANSPORTS, Contender, Missing, find_peer, on_gpu, ours, ours_on
from .operations import DTYPES, OPERATIONS
from .options import command_line, end_on_signals, list_of, of_every_run, ranks_of, sizes_of, unique
from .plan import DEFAULT_OPERATIONS, BenchPlan
from .plot import check_plot, draw
from .session import run
from .show import all_errors, show

__all__ = ["command"]

_EPILOG = f"""\
\b
Operations:
  {", ".join(list(OPERATIONS)[:6])},
  {", ".join(list(OPERATIONS)[6:])}  [default: those of 'make bench']

A size is that of the largest array that a rank holds: the output of all_gather and gather, the input of reduce_scatter,
all_to_all and scatter, and the array itself otherwise. pingpong reports half of a round trip; sendrecv and isend_irecv
pass arrays on around a ring. Every result is checked once before it is timed.

\b
Examples:
  phalanx bench
  phalanx bench all_reduce -n 2,4 --sizes 8..64M --against gloo,openmpi,mpich
  phalanx bench all_reduce --in-segment all_reduce --sizes 64M
  phalanx bench --transport tcp --against gloo,openmpi-tcp --json tcp.json --plot tcp.svg
  phalanx bench --backend mpi --against mpich
  phalanx bench all_reduce --device cuda --against gloo
  phalanx bench --calibrate
"""

BACKENDS = ("mesh", "mpi")


def _operations(ctx: click.Context, param: click.Parameter, value: Sequence[str]) -> list[str]:
    return unique([name for word in value for name in word.split(",")], list(OPERATIONS)) or list(DEFAULT_OPERATIONS)


_MPIRUN = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    "bench",
    epilog=_EPILOG,
    short_help="Measure collectives, beside Gloo and MPI if you like.",
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
    default="8,1K,16K,128K,1M,8M,64M",
    show_default=True,
    callback=sizes_of,
    help="Sizes, as 8,1K,64M; or 8..64M for those between by factors of eight.",
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
    help="How Phalanx moves bytes: auto, tcp, or both. On MPI, with tcp the ranks meet as if on different hosts.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    metavar="NAME",
    default="mesh",
    show_default=True,
    help="What Phalanx runs on. mpi: the first of openmpi and mpich in --against, else that is found; bare mpi4py on "
    "it is measured beside.",
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    metavar="NAME",
    default="cpu",
    show_default=True,
    help="Where the arrays lie. cuda: tensors of torch on the GPUs of this machine, which the ranks take in turn.",
)
@click.option(
    "--in-segment",
    metavar="LIST",
    callback=list_of(list(OPERATIONS)),
    help="Operations that Phalanx also does on arrays from Group.empty().",
)
@click.option(
    "--against",
    metavar="LIST",
    callback=list_of(PEERS),
    help="Peers to measure in the same run: gloo, openmpi, mpich, openmpi-tcp.",
)
@click.option("--openmpi", metavar="PATH", type=_MPIRUN, help="Open MPI's mpirun, if it is not found by its name.")
@click.option("--mpich", metavar="PATH", type=_MPIRUN, help="MPICH's mpirun, if it is not found by its name.")
@click.option(
    "--calibrate", is_flag=True, help="Measure only the settings of shared memory on this machine, anew, and keep them."
)
@click.option("--memory", is_flag=True, help="Also measure the extra memory of an all_reduce of the largest size.")
@of_every_run()
def command(
    operations: list[str],
    ranks: list[int],
    sizes: list[int],
    dtypes: list[str],
    transports: list[str],
    backend: str,
    device: str,
    in_segment: list[str],
    against: list[str],
    openmpi: Path | None,
    mpich: Path | None,
    calibrate: bool,
    memory: bool,
    rounds: int,
    round_ms: float,
    limit: float,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure OPERATIONs of Phalanx on this machine, and those of its peers in the same run.

    The contenders take turns in short rounds, so that a noisy moment meets all of them. The exit code is 1 if Phalanx
    failed anywhere, or if a contender was faster than the limit, which then is none.
    """
    if not LINUX:
        raise click.ClickException("phalanx bench needs Linux: it finds and measures its processes through /proc")
    end_on_signals()
    if calibrate:
        show_calibration(sys.stdout)
        return
    if plot_file is not None:
        check_plot(plot_file)
    unused = [name for name in in_segment if name not in operations]
    if unused:
        raise click.UsageError(
            f"--in-segment {unused[0]}: this operation is not measured (name it as an OPERATION, too)"
        )
    peers, missing = _peers(against, {"openmpi": openmpi, "mpich": mpich})
    if backend == "mpi":
        base = _mpi_of_choice(peers, against, {"openmpi": openmpi, "mpich": mpich})
        mine = [ours_on(base, transport) for transport in transports]
        peers = [base, *(peer for peer in peers if peer.name != base.name)]
        missing = [peer for peer in missing if peer.name in against]
    else:
        mine = [ours(transport) for transport in transports]
    if device == "cuda":
        _check_gpu(backend, in_segment, peers)
        mine, peers = [on_gpu(contender) for contender in mine], [on_gpu(peer) for peer in peers]
    for peer in missing:
        click.echo(f"phalanx: {peer.name} is left out: {peer.reason}", err=True)
    plan = BenchPlan(
        operations=operations,
        sizes=sizes,
        dtypes=dtypes,
        ranks=ranks,
        contenders=[*mine, *peers],
        in_segment=in_segment,
        rounds=rounds,
        round_seconds=round_ms / 1000,
        limit=limit,
        memory=memory,
    )
    report, code = run(plan, missing=missing, command=command_line("phalanx bench"), json_file=json_file)
    show(report, sys.stdout)
    for text in all_errors(report):
        click.echo(f"phalanx: {text}", err=True)
    if plot_file is not None and not report.unmeasured:
        draw(report, plot_file)
    sys.exit(code)


def _check_gpu(backend: str, in_segment: Sequence[str], peers: Sequence[Contender]) -> None:
    """Refuses a run on a GPU that cannot be.

    Raises:
        click.UsageError: Another option does not go with it.
        click.ClickException: There is no GPU.
    """
    others = [f"--against {peer.name}" for peer in peers if peer.name != "gloo"]
    others += [f"--backend {backend}"] * (backend != "mesh") + ["--in-segment"] * bool(in_segment)
    if others:
        raise click.UsageError(f"--device cuda does not go with {others[0]}")
    try:
        driver()
    except BackendUnavailable as error:
        raise click.ClickException(str(error)) from None


def _mpi_of_choice(peers: Sequence[Contender], against: Sequence[str], mpiruns: dict[str, Path | None]) -> Contender:
    """The MPI that Phalanx runs on.

    Raises:
        click.UsageError: There is none.
    """
    named = [peer for peer in peers if peer.name in MPIS]
    if named:
        return named[0]
    wanted = [name for name in against if name in MPIS] or list(MPIS)
    found = [find_peer(name, mpiruns) for name in wanted]
    usable = [peer for peer in found if isinstance(peer, Contender)]
    if not usable:
        reasons = "; ".join(f"{peer.name}: {peer.reason}" for peer in found if isinstance(peer, Missing))
        raise click.UsageError(f"--backend mpi: there is no MPI ({reasons})")
    return usable[0]


def _peers(names: Sequence[str], mpiruns: dict[str, Path | None]) -> tuple[list[Contender], list[Missing]]:
    found = [find_peer(name, mpiruns) for name in names]
    return [peer for peer in found if isinstance(peer, Contender)], [p for p in found if isinstance(p, Missing)]
