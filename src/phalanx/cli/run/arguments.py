"""The command line of `phalanx run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from phalanx import config
from phalanx.config.reader import VariableReader
from phalanx.config.secret import find_token
from phalanx.errors import ConfigError
from phalanx.launching.environment import new_token
from phalanx.types import Address

from .hosts.asked import DEFAULT_SSH, hosts_plan
from .hosts.controller import HostsPlan, run_on_hosts
from .hosts.hostfile import parse_hosts, read_hostfile
from .launcher import launch
from .plan import MAX_PORT, RunPlan, cores

__all__ = ["command", "count_of", "pairs_of", "token_of"]

_EPILOG = """\
\b
Examples:
  phalanx run -n 4 train.py --epochs 3
  phalanx run -n auto -m package.train
  phalanx run --hosts node0:8,node1:8 train.py
  phalanx run -n 8 --nnodes 2 --node-rank 0 --master node0:29500 train.py
  phalanx run --elastic 2:4 train.py

What stands after the script or module belongs to it. Each rank finds the variables that torchrun sets; rank 0 reads the
launcher's standard input, the others read nothing.

With --hosts or --hostfile, the ranks of all hosts are started from here over ssh, which must get in without a
password. Every host has the script, the folder and Phalanx in the same places. The ranks read no input.

Without ssh, run the same command on each host, with its own --node-rank and the same token in PHALANX_TOKEN or
--token-file. MASTER_PORT is kept for the script (torch's store listens there); Phalanx itself uses the next port.

The first rank to fail ends all, and its exit code is the launcher's (128 and the signal's number after a signal).
"""


ELASTIC_RESTARTS = 10
"""How many ranks an elastic job starts again if it is not told."""
TORCHRUN_PORT = 29500
"""The port of --master-addr where none is given."""

_OF_TORCHRUN = {
    "--rdzv-id": "leave it out: jobs are told apart by their tokens",
    "--rdzv-conf": "leave it out: the launchers meet at --master",
    "--start-method": "leave it out: ranks are processes of their own",
    "--role": "leave it out: all ranks have the role 'default'",
    "--tee": "leave it out: output is shown and, with --log-dir, copied to files",
    "--redirects": "leave it out: output is shown and, with --log-dir, copied to files",
    "--np": "-n says how many ranks",
    "--host": "--hosts names several hosts",
    "--machinefile": "--hostfile FILE",
    "--oversubscribe": "leave it out: there may be more ranks than cores",
}
"""Options of torchrun and mpirun that have no counterpart of the same name."""


class _RunCommand(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = _OF_TORCHRUN.get(error.option_name.replace("_", "-"))
            if hint is None:
                raise
            raise click.UsageError(f"there is no option {error.option_name} ({hint})", ctx) from None


def count_of(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """The number of ranks that `-n` says."""
    if value in ("auto", "cpu"):
        return cores()
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        if value.startswith("p"):
            raise click.UsageError("there is no option -np (the number of ranks is -n: `phalanx run -n 4 train.py`)")
        raise click.BadParameter(
            f"{value!r} is not valid (expected a number from 1, or auto for one rank per core)", param_hint="-n"
        )
    return int(value)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keeps a word of torchrun's for the option that it is a part of."""
    ctx.meta[f"{__name__}.{param.name}"] = value


def _kept(ctx: click.Context, name: str) -> Any:
    return ctx.meta.get(f"{__name__}.{name}")


def _master(ctx: click.Context, param: click.Parameter, value: str | None) -> Address | None:
    host, port = _kept(ctx, "master_addr"), _kept(ctx, "master_port")
    try:
        if value is not None and (host, port) != (None, None):
            raise click.UsageError("--master and --master-addr or --master-port say the same: give one of them")
        if host is not None:
            return Address(host, port or TORCHRUN_PORT)
        if port is not None:
            raise click.UsageError("--master-port needs --master-addr (or --master HOST:PORT, which says both)")
        return None if value is None else Address.parse(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--master") from None


def _nodes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    fewest, colon, most = value.partition(":")
    if colon and fewest != most:
        raise click.BadParameter(
            f"{value!r} is not valid (the number of nodes is fixed: give one number)", param_hint="--nnodes"
        )
    if not (fewest.isascii() and fewest.isdigit() and int(fewest) > 0):
        raise click.BadParameter(f"{value!r} is not valid (expected a number from 1)", param_hint="--nnodes")
    if _kept(ctx, "standalone") and int(fewest) > 1:
        raise click.UsageError(f"--standalone is for a job on one node, but --nnodes is {fewest}")
    return int(fewest)


def _elastic(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    fewest, _, most = value.partition(":")
    most = most or fewest
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in (fewest, most)):
        raise click.BadParameter(f"{value!r} is not valid (expected MIN:MAX, as 2:4)", param_hint="--elastic")
    if int(fewest) > int(most):
        raise click.BadParameter(f"{value!r} is not valid (MIN is above MAX)", param_hint="--elastic")
    return int(fewest), int(most)


def pairs_of(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """The variables that `--env` sets."""
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not valid (expected KEY=VALUE)")
        pairs[key] = text
    return pairs


def _print_token(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(new_token())
        ctx.exit()


def _of_torchrun(*names: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A word that torchrun's users type. Read before our own options, and not in the help."""
    return click.option(*names, hidden=True, is_eager=True, expose_value=False, callback=_keep, **options)


@click.command(
    "run",
    cls=_RunCommand,
    # Options after the script are the script's.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
    short_help="Start a script on several ranks.",
)
@click.option(
    "-n",
    "--nproc",
    "--nproc-per-node",
    "--nproc_per_node",
    "ranks",
    metavar="N|auto",
    default="1",
    show_default=True,
    callback=count_of,
    help="Ranks on this node, or on each host; auto: one per core.",
)
@click.option("-m", "--module", "module", is_flag=True, help="Run a module instead of a script, as `python -m` does.")
@click.option("--no-python", "--no_python", is_flag=True, help="Run a program of another kind instead of a script.")
@click.option(
    "--hostfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Start the ranks of several hosts over ssh: a file with 'host slots=4' or 'host:4' on each line.",
)
@click.option("--hosts", metavar="A:4,B:4", help="The same, with the hosts on the command line.")
@click.option("--ssh", metavar="COMMAND", help=f"How to reach a host.  [default: {DEFAULT_SSH}]")
@click.option("--remote-python", metavar="PATH", help="Python on the hosts.  [default: the path of this one]")
@click.option("--nnodes", metavar="N", default="1", show_default=True, callback=_nodes, help="Nodes of the job.")
@click.option(
    "--node-rank", "--node_rank", type=click.IntRange(0), default=0, show_default=True, help="This node, from 0."
)
@click.option(
    "--master",
    "--rdzv-endpoint",
    "--rdzv_endpoint",
    "master",
    metavar="HOST:PORT",
    callback=_master,
    help="Node 0 and a free port there: the ranks' MASTER_ADDR and MASTER_PORT.",
)
@_of_torchrun("--master-addr", "--master_addr")
@_of_torchrun("--master-port", "--master_port", type=click.IntRange(1, MAX_PORT))
@_of_torchrun("--standalone", is_flag=True)
@_of_torchrun("--rdzv-backend", "--rdzv_backend", type=click.Choice(["c10d", "static"]))  # both meet at the endpoint
@click.option(
    "--directory-port",
    type=click.IntRange(0, MAX_PORT),
    help="Where node 0 hosts the directory.  [default: the master's port + 1; on a single node any]",
)
@click.option(
    "--token-file", type=click.Path(dir_okay=False, path_type=Path), help="File with the job's token (mode 0600)."
)
@click.option(
    "--new-token",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_token,
    help="Print a new token and exit.",
)
@click.option(
    "--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Copy each rank's output to files there."
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(0),
    help="Start all ranks again after a failure, so many times; with --elastic, the ranks that were lost.  "
    f"[default: 0; with --elastic {ELASTIC_RESTARTS}]",
)
@click.option(
    "--elastic",
    metavar="MIN:MAX",
    callback=_elastic,
    help="Go on without ranks that are lost, and start others for them. -n is how many there are at first, else MAX.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between SIGTERM and SIGKILL.",
)
@click.option("--page", is_flag=True, help="Show the job on a web page; its address is printed.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write every operation to a file for Perfetto (ui.perfetto.dev) and Chrome.",
)
@click.option(
    "--metrics", type=click.Path(path_type=Path), metavar="FILE", help="Keep a file of Prometheus metrics up to date."
)
@click.option(
    "--as-gloo", is_flag=True, help='Have torch\'s "gloo" mean Phalanx, for programs that take no other name.'
)
@click.option("--no-prefix", is_flag=True, help="Do not put the rank in front of each line.")
@click.option(
    "--env",
    "extra",
    metavar="KEY=VALUE",
    multiple=True,
    callback=pairs_of,
    help="Set a variable for the ranks. May be repeated.",
)
@click.argument("target", metavar="SCRIPT|MODULE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int,
    module: bool,
    no_python: bool,
    hostfile: Path | None,
    hosts: str | None,
    ssh: str | None,
    remote_python: str | None,
    nnodes: int,
    node_rank: int,
    master: Address | None,
    directory_port: int | None,
    token_file: Path | None,
    log_dir: Path | None,
    max_restarts: int | None,
    elastic: tuple[int, int] | None,
    grace: float,
    page: bool,
    trace: Path | None,
    metrics: Path | None,
    as_gloo: bool,
    no_prefix: bool,
    extra: dict[str, str],
    target: str,
    arguments: Sequence[str],
) -> None:
    """Start SCRIPT (or a MODULE) on several ranks, and end all of them when one fails."""
    base = config.inherited()
    _refuse_misplaced(arguments)
    colour = not base.get("NO_COLOR") and base.get("TERM") != "dumb"
    extra = {"PHALANX_AS_GLOO": "1", **extra} if as_gloo else extra
    on_hosts: HostsPlan | None = None
    if elastic is not None:
        ranks = ranks if _given("ranks") else elastic[1]
    if max_restarts is None:
        max_restarts = 0 if elastic is None else ELASTIC_RESTARTS
    try:
        if hostfile is not None or hosts is not None:
            if elastic is not None:
                raise ConfigError("--elastic starts the ranks of one host; others join with `phalanx join`")
            _check_hosts_alone(hostfile, hosts, max_restarts)
            on_hosts = hosts_plan(
                read_hostfile(hostfile) if hostfile is not None else parse_hosts(hosts or ""),
                ranks=ranks if _given("ranks") else None,
                target=target,
                arguments=arguments,
                module=module,
                python=not no_python,
                master=master,
                directory_port=directory_port,
                token=token_of(token_file, several_nodes=False),
                log_dir=log_dir,
                grace=grace,
                prefix=not no_prefix,
                extra=extra,
                ssh=ssh or DEFAULT_SSH,
                remote_python=remote_python,
                base=base,
                colour=colour,
                page=page,
                trace=trace,
                metrics=metrics,
            )
        else:
            for option, value in (("--ssh", ssh), ("--remote-python", remote_python)):
                if value is not None:
                    raise ConfigError(f"{option} is for --hosts or --hostfile")
        plan = on_hosts or RunPlan(
            target=target,
            arguments=tuple(arguments),
            module=module,
            python=not no_python,
            ranks=ranks,
            nodes=nnodes,
            node=node_rank,
            master=master,
            directory_port=directory_port,
            token=token_of(token_file, several_nodes=nnodes > 1 or (elastic is not None and master is not None)),
            log_dir=log_dir,
            max_restarts=max_restarts,
            grace=grace,
            prefix=not no_prefix,
            page=page,
            trace=trace,
            metrics=metrics,
            extra=extra,
            elastic=elastic,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if isinstance(plan, HostsPlan):
        sys.exit(run_on_hosts(plan))
    sys.exit(launch(plan, base=base, options=config.Options.from_env(), colour=colour))


def _given(name: str) -> bool:
    """True if an option stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _check_hosts_alone(hostfile: Path | None, hosts: str | None, max_restarts: int) -> None:
    """Refuses options that contradict a list of hosts.

    Raises:
        ConfigError: There is one.
    """
    if hostfile is not None and hosts is not None:
        raise ConfigError("--hosts and --hostfile both name the hosts: give one of them")
    if _kept(click.get_current_context(), "standalone"):
        raise ConfigError("--standalone is for a job on one node, and does not go with --hosts or --hostfile")
    for name, option in (("nnodes", "--nnodes"), ("node_rank", "--node-rank")):
        if _given(name):
            raise ConfigError(f"{option} does not go with --hosts or --hostfile, which say it already")
    if max_restarts:
        raise ConfigError("--max-restarts is for a single node (several would have to agree when to begin again)")


_ABOUT_RANKS = ("-n", "--nproc", "--nproc-per-node", "--nproc_per_node")


def _refuse_misplaced(arguments: Sequence[str]) -> None:
    """Refuses a number of ranks behind the script, unless one was given before it: it would be the script's, silently.

    Raises:
        click.UsageError: There is one.
    """
    found = next((word for word in arguments if word.partition("=")[0] in _ABOUT_RANKS), None)
    if found is not None and not _given("ranks"):
        raise click.UsageError(
            f"{found} stands behind the script, so the script would get it, and there would be one rank (put it before "
            "the script; if it is the script's own, say -n 1 before the script)"
        )


def token_of(file: Path | None, *, several_nodes: bool) -> bytes | None:
    """The token that was given; None for a fresh one.

    A single node has a fresh one for each job even where PHALANX_TOKEN is set: inside another job it is that one's.
    """
    if file is not None:
        try:
            token = find_token(VariableReader({"PHALANX_TOKEN_FILE": str(file)}))
        except ConfigError as error:
            raise ConfigError(str(error).replace("PHALANX_TOKEN_FILE=", "--token-file ", 1)) from None
    else:
        token = find_token(VariableReader()) if several_nodes else None
    if token is not None and b"\0" in token:
        raise ConfigError("the token has a zero byte, which an environment variable cannot hold")
    return token
