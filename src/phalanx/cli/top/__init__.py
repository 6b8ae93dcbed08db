"""`phalanx top`: what the ranks of a running job do, who waits for whom, where, and since when."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import time
from pathlib import Path

import click

from phalanx import config
from phalanx.config.reader import VariableReader
from phalanx.config.secret import find_token
from phalanx.errors import ConfigError, PhalanxError
from phalanx.seeing.picture import Picture, to_plain
from phalanx.seeing.remote import RemoteSlates
from phalanx.seeing.slates import JobHere, SlateSource, jobs_here, read_files
from phalanx.seeing.watch import JobWatch
from phalanx.types import Address

__all__ = ["command"]

FIRST_SPAN = 0.5
"""Seconds between the two looks of --once: rates need two."""

_EPILOG = """\
\b
Examples:
  phalanx top                                  the job that runs on this machine
  phalanx top --once                           one picture, for a script or a bug report
  phalanx top --json --once                    the same as JSON
  phalanx top --address node0:29501            a job on other hosts, with its token in PHALANX_TOKEN

It reads what each rank notes in shared memory: it works while all ranks hang, and costs the job nothing.
"""


@click.command(
    "top",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
    short_help="Show what the ranks of a running job do.",
)
@click.argument("job", required=False)
@click.option("--once", is_flag=True, help="Print one picture and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object on each line.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60),
    default=0.5,
    show_default=True,
    metavar="SECONDS",
    help="Time between two pictures.",
)
@click.option("--address", metavar="HOST:PORT", help="The directory of a job, on this machine or another.")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the job's token (mode 0600); else PHALANX_TOKEN.",
)
def command(
    job: str | None, once: bool, as_json: bool, interval: float, address: str | None, token_file: Path | None
) -> None:
    """Show what the ranks of a running job do: who waits for whom, where, how long, since when.

    JOB is the beginning of a job's name, where several run.
    """
    note = ""
    if address is not None:
        source: SlateSource = _afar(address, token_file)
    else:
        if token_file is not None:
            raise click.UsageError("--token-file goes with --address (a job on this machine needs none)")
        chosen, note = _choose(job)
        source = functools.partial(read_files, chosen.job)
    watch = JobWatch(source)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "…" shows something else there
    if once or as_json or not _can_draw():
        if note:
            click.echo(f"phalanx: {note}", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            _print(watch, once=once, as_json=as_json, interval=interval)
    else:
        from .screen import follow

        follow(watch, interval, note)


def _can_draw() -> bool:
    """True on a terminal whose cursor can be moved."""
    return sys.stdout.isatty() and config.inherited().get("TERM", "dumb") not in ("dumb", "unknown")


def _print(watch: JobWatch, *, once: bool, as_json: bool, interval: float) -> None:
    """Prints pictures below each other."""
    picture = watch.look()
    time.sleep(FIRST_SPAN)
    while True:
        picture = watch.look()
        if picture is None:
            raise ConfigError("no rank of that job answers (is it still running?)")
        _show(picture, as_json=as_json)
        if once or not picture.running:
            return
        time.sleep(interval)


def _show(picture: Picture, *, as_json: bool) -> None:
    """Prints a picture.

    Raises:
        PhalanxError: There is no room for it.
    """
    if as_json:
        import json

        text = json.dumps(to_plain(picture))
    else:
        from .screen import as_text

        text = as_text(picture)
    try:
        click.echo(text)
    except BrokenPipeError:
        raise  # nobody reads on, which is no error
    except OSError as error:
        # What is still held back would be tried again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise PhalanxError(f"the output cannot be written: {error.strerror}") from None


def _afar(address: str, token_file: Path | None) -> RemoteSlates:
    try:
        where = Address.parse(address)
        token = find_token(
            VariableReader({"PHALANX_TOKEN_FILE": str(token_file)}) if token_file is not None else VariableReader()
        )
    except ConfigError as error:
        text = str(error)
        if token_file is not None:
            text = text.replace("PHALANX_TOKEN_FILE=", "--token-file ", 1)
        raise click.UsageError(text) from None
    if token is None:
        raise click.UsageError("--address needs the job's token: PHALANX_TOKEN or --token-file FILE")
    return RemoteSlates(where, token, config.Options.from_env())


def _choose(name: str | None) -> tuple[JobHere, str]:
    """The job that is meant, and a word on the others.

    Raises:
        PhalanxError: There is none, or the name does not say which.
    """
    running = [job for job in jobs_here() if job.alive and job.job.startswith(name or "")]
    running.sort(key=lambda job: job.began_ns, reverse=True)
    if not running:
        which = f"no job {name!r} runs" if name else "no job of this user runs"
        raise PhalanxError(
            f"{which} on this machine (--address HOST:PORT looks at one elsewhere; `phalanx doctor --last` tells of "
            "the last one that failed)"
        )
    if name and len(running) > 1:
        listed = ", ".join(job.job for job in running)
        raise PhalanxError(f"several jobs have a name that begins so: {listed}")
    others = ", ".join(f"{job.job} ({job.program or 'unknown'})" for job in running[1:])
    return running[0], f"the job that began last; others: {others}" if others else ""
