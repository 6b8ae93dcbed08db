"""`python -m benchmarks rpc | torch | torch-calls | training | checkpoint | memory | pipeline | seeing | elastic`."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from phalanx.errors import PhalanxError

from .calls.arguments import command as rpc
from .checkpoint.arguments import command as checkpoint
from .elastic.arguments import command as elastic
from .memory.arguments import command as memory
from .pipelines.arguments import command as pipeline
from .seeing.arguments import command as seeing
from .training.arguments import command as training
from .under_torch.added import command as torch_calls
from .under_torch.arguments import command as torch

__all__ = ["app", "main"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'python -m benchmarks COMMAND --help' says more about a command; 'phalanx bench' measures the collectives.",
)
def app() -> None:
    """Measure Phalanx beside other libraries, and hold it to its goals."""


for command in (rpc, torch, torch_calls, training, checkpoint, memory, pipeline, seeing, elastic):
    app.add_command(command)


def main() -> NoReturn:
    """Runs one benchmark and ends the process: with 1 if Phalanx failed, with 2 after a wrong call."""
    try:
        app.main(prog_name="python -m benchmarks")
    except PhalanxError as error:
        click.echo(f"benchmarks: {error}", err=True)
    sys.exit(1)  # `app.main` itself ends the process in every other case


if __name__ == "__main__":
    main()
