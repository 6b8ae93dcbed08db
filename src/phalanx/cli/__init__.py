"""The commands that a person types: `phalanx run`, `join`, `top`, `doctor`, `demo`, `bench` and `checkpoint`.

Each command lives in a module of its own that holds a `click.Command` named `command`, imported only when it is used:
`phalanx run` should not wait for what `phalanx doctor` needs.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from dataclasses import dataclass
from typing import NoReturn

import click

from phalanx import config
from phalanx.errors import PhalanxError

__all__ = ["app", "main"]

_COMMANDS = {
    "run": ("phalanx.cli.run", "Start a script on several ranks, on this machine or on many."),
    "join": ("phalanx.cli.join", "Add ranks of this machine to an elastic job."),
    "top": ("phalanx.cli.top", "Show what the ranks of a running job do: who waits for whom, and where."),
    "doctor": ("phalanx.cli.doctor", "Look at this machine and say what would break a job, and what to do."),
    "demo": ("phalanx.cli.demo", "Train a small classifier on four ranks; nothing to configure."),
    "bench": ("phalanx.cli.bench", "Measure collectives, beside Gloo and MPI if you like."),
    "checkpoint": ("phalanx.cli.checkpoint", "Look at checkpoints: what is in them, and whether it is whole."),
}
"""Name, module, and the line of help, which is here so that the list of commands imports none of them."""

_OTHER_NAMES_OF_RUN = ("launch", "start", "exec", "torchrun", "mpirun", "mpiexec", "srun", "train", "python")

_EXAMPLES = """\
  phalanx demo                       see it work
  phalanx run -n 4 train.py          four ranks on this machine
  phalanx run -n 4 -m pkg.train      the same, by module name
  phalanx top                        what its ranks do, and who waits for whom
  phalanx doctor                     what is wrong with this machine
  phalanx bench --against gloo       how fast it is, beside others
"""


class _Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, _COMMANDS, 1, 0.5)
            if name in _OTHER_NAMES_OF_RUN:
                near = ["run"]
            if name.endswith(".py"):
                hint = f"did you mean `phalanx run {name}`?"
            else:
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(_COMMANDS)}"
            ctx.fail(f"there is no command {name!r} ({hint})")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])
        with formatter.section("Examples"):
            formatter.write(_EXAMPLES)


@dataclass
class _Asked:
    """The options before the command's name."""

    debug: bool = False


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import phalanx

        click.echo(f"phalanx {phalanx.__version__}")
        ctx.exit()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'phalanx COMMAND --help' says more about a command.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.option("--debug", is_flag=True, help="Log everything, and show tracebacks of Phalanx's own errors.")
@click.pass_context
def app(ctx: click.Context, debug: bool) -> None:
    """Phalanx moves tensors between ranks: distributed training in Python, on one machine or many."""
    ctx.ensure_object(_Asked).debug = debug
    if debug:
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
        logging.getLogger("phalanx").setLevel(logging.DEBUG)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: list[str] | None = None) -> NoReturn:
    """The program `phalanx`. Ends the process: 0 if all went well, 1 after an error of Phalanx, 2 after a wrong call.

    A command may end with a code of its own: `phalanx run` with that of the rank that failed.
    """
    asked = _Asked()
    try:
        app.main(args, prog_name="phalanx", obj=asked)
    except PhalanxError as error:
        if asked.debug or config.log_level() == logging.DEBUG:
            raise
        click.echo(f"phalanx: {error}", err=True)
    sys.exit(1)  # `app.main` itself ends the process in every other case
