"""`phalanx join`: ranks of this machine for an elastic job that runs on another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from phalanx import config
from phalanx.cli.run.arguments import count_of, pairs_of, token_of
from phalanx.cli.run.launcher import launch
from phalanx.cli.run.plan import RunPlan
from phalanx.errors import ConfigError
from phalanx.types import Address

__all__ = ["command"]

_EPILOG = """\
\b
Example:
  phalanx run --elastic 2:8 --master node0:29500 train.py     on node0
  phalanx join -n 4 node0:29501 train.py                      on another host

`phalanx run` prints the address. Both need the same token, in PHALANX_TOKEN or --token-file. The ranks come in between
two steps of the others, with their state.
"""


def _address(ctx: click.Context, param: click.Parameter, value: str) -> Address:
    try:
        return Address.parse(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="HOST:PORT") from None


@click.command(
    "join",
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
    short_help="Add ranks of this machine to an elastic job.",
)
@click.option(
    "-n", "--nproc", "ranks", metavar="N|auto", default="1", show_default=True, callback=count_of, help="Ranks to add."
)
@click.option("-m", "--module", "module", is_flag=True, help="Run a module instead of a script, as `python -m` does.")
@click.option(
    "--token-file", type=click.Path(dir_okay=False, path_type=Path), help="File with the job's token (mode 0600)."
)
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Copy each rank's output to files.")
@click.option("--grace", type=click.FloatRange(0), default=5.0, show_default=True, metavar="SECONDS")
@click.option("--no-prefix", is_flag=True, help="Do not put the rank in front of each line.")
@click.option(
    "--env", "extra", metavar="KEY=VALUE", multiple=True, callback=pairs_of, help="Set a variable for the ranks."
)
@click.argument("address", metavar="HOST:PORT", callback=_address)
@click.argument("target", metavar="SCRIPT|MODULE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int,
    module: bool,
    token_file: Path | None,
    log_dir: Path | None,
    grace: float,
    no_prefix: bool,
    extra: dict[str, str],
    address: Address,
    target: str,
    arguments: Sequence[str],
) -> None:
    """Start SCRIPT (or a MODULE) on ranks that join the elastic job whose directory is at HOST:PORT."""
    base = config.inherited()
    try:
        token = token_of(token_file, several_nodes=True)
        if token is None:
            raise ConfigError(
                "there is no token: set PHALANX_TOKEN or give --token-file, the same as for `phalanx run --elastic`"
            )
        plan = RunPlan(
            target=target,
            arguments=tuple(arguments),
            module=module,
            ranks=ranks,
            token=token,
            log_dir=log_dir,
            grace=grace,
            prefix=not no_prefix,
            extra=extra,
            join=address,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    colour = not base.get("NO_COLOR") and base.get("TERM") != "dumb"
    sys.exit(launch(plan, base=base, options=config.Options.from_env(), colour=colour))
