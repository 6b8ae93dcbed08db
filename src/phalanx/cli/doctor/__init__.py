"""`phalanx doctor`: looks at what breaks distributed jobs and says, for each, what was found and what to do.

The checks are in `launching`, `network`, `memory`, `limits` and `software`; importing those enters them in the list
that `findings.examine` runs. `show` prints what they found.
"""

from __future__ import annotations

import sys

import click

from phalanx.types import Address

# isort: off
# In the order in which the findings are shown: importing a module enters its checks.
from . import software, launching, network, memory, limits  # noqa: F401

# isort: on
from .findings import CHECKS, Finding, Severity, Situation, examine
from .launching import present_situation
from .show import as_json, as_lines, show_table

__all__ = ["CHECKS", "Finding", "Severity", "Situation", "command", "examine", "present_situation"]


@click.command(short_help="Look at this machine and say what would break a job, and what to do.")
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="Look at the way to this master. Without it: the one in MASTER_ADDR and MASTER_PORT.",
)
@click.option("--json", "machine_readable", is_flag=True, help="Print JSON.")
def command(master: str | None, machine_readable: bool) -> None:
    """Look at this machine and say what would break a job, and what to do.

    Run it where the job fails: in the same shell or container, or as a rank of the job ('phalanx run -n 2 -m phalanx
    doctor'). The exit code is 1 if there is a problem, and 0 if there are only warnings.
    """
    situation = present_situation(Address.parse(master, what="--master") if master is not None else None)
    if machine_readable or not sys.stdout.isatty():
        findings = list(examine(situation))
        click.echo(as_json(findings) if machine_readable else as_lines(findings))
    else:
        from rich.console import Console

        with Console(stderr=True).status("Looking …"):
            findings = list(examine(situation))
        show_table(findings)
    sys.exit(1 if any(finding.status is Severity.PROBLEM for finding in findings) else 0)
