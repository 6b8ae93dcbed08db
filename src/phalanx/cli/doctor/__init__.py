"""`phalanx doctor`: looks at what breaks distributed jobs and says, for each, what was found and what to do.

The checks are in `launching`, `network`, `memory`, `limits`, `gpus`, `nccl` and `software`; importing those enters
them in the list that `findings.examine` runs. `show` prints what they found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from phalanx import config
from phalanx.errors import ConfigError
from phalanx.types import Address

# isort: off
# In the order in which the findings are shown: importing a module enters its checks.
from . import software, gpus, nccl, launching, network, memory, limits  # noqa: F401

# isort: on
from .findings import CHECKS, Finding, Severity, Situation, examine
from .launching import present_situation
from .selftest import self_test
from .show import as_json, as_lines, show_table

__all__ = ["CHECKS", "Finding", "Severity", "Situation", "command", "examine", "present_situation"]


@click.command(short_help="Look at this machine and say what would break a job, and what to do.")
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="Look at the way to this master. Without it: the one in MASTER_ADDR and MASTER_PORT.",
)
@click.option("--selftest", is_flag=True, help="Form a world, here or on several hosts, and move bytes in it.")
@click.option("-n", "--nproc", "ranks", type=click.IntRange(1, 64), help="Ranks of the self-test.  [default: 4]")
@click.option("--hosts", metavar="A:4,B:4", help="Hosts of the self-test, as for `phalanx run`.")
@click.option("--hostfile", type=click.Path(dir_okay=False), help="File with the hosts of the self-test.")
@click.option("--ssh", metavar="COMMAND", help="How the self-test reaches a host.")
@click.option("--remote-python", metavar="PATH", help="Python on the hosts of the self-test.")
@click.option("--last", is_flag=True, help="Tell the last seconds of the last job that failed on this machine.")
@click.option(
    "--flight-recorder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="With --last: write its last collectives for torch's flight-recorder analyser.",
)
@click.option("--json", "machine_readable", is_flag=True, help="Print JSON.")
def command(
    master: str | None,
    selftest: bool,
    ranks: int | None,
    hosts: str | None,
    hostfile: str | None,
    ssh: str | None,
    remote_python: str | None,
    last: bool,
    flight_recorder: Path | None,
    machine_readable: bool,
) -> None:
    """Look at this machine and say what would break a job, and what to do.

    Run it where the job fails: in the same shell or container, or as a rank of the job ('phalanx run -n 2 -m phalanx
    doctor'). The exit code is 1 if there is a problem, and 0 if there are only warnings.

    With --selftest it starts ranks and moves bytes through shared memory, from process to process, over TCP and between
    the hosts, checks them, and says roughly how fast each was.

    With --last it tells of the last job that failed here: what each rank was doing, where, and who waited for whom.
    """
    if last or flight_recorder is not None:
        _tell_last(last, flight_recorder)
        return
    given = {"--hosts": hosts, "--hostfile": hostfile, "--ssh": ssh, "--remote-python": remote_python, "-n": ranks}
    where = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    if where and not selftest:
        raise click.UsageError(f"{where[0]} is for the self-test (say --selftest as well)")
    if selftest and master is not None:
        raise click.UsageError("--master does not go with --selftest (--hosts chooses the hosts)")
    if selftest and hosts is None and hostfile is None and ranks is None:
        where += ["-n", "4"]
    look: Callable[[Callable[[str], None]], Iterable[Finding]]
    if selftest:

        def look(progress: Callable[[str], None]) -> Iterable[Finding]:
            return self_test(where, config.inherited(), progress=progress, tell=lambda text: click.echo(text, err=True))

    else:
        situation = present_situation(Address.parse(master, what="--master") if master is not None else None)

        def look(progress: Callable[[str], None]) -> Iterable[Finding]:
            return examine(situation)

    if machine_readable or not sys.stdout.isatty():
        findings = list(look(lambda text: None))
        click.echo(as_json(findings) if machine_readable else as_lines(findings))
    else:
        from rich.console import Console

        with Console(stderr=True).status("Looking …") as status:
            findings = list(look(status.update))
        show_table(findings)
    sys.exit(1 if any(finding.status is Severity.PROBLEM for finding in findings) else 0)


def _tell_last(last: bool, folder: Path | None) -> None:
    from .last import tell_last, write_last_records

    if not last:
        raise click.UsageError("--flight-recorder goes with --last")
    click.echo(tell_last())
    if folder is not None:
        try:
            written = write_last_records(folder)
        except OSError as error:
            raise ConfigError(f"--flight-recorder {folder} cannot be written: {error.strerror}") from None
        click.echo(
            f"\n{len(written)} files for `python -m torch.distributed.flight_recorder.fr_trace {folder}` are written"
        )
