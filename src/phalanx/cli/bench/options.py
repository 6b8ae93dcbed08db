"""The parts of the command line that every benchmark has, `phalanx bench` and those of the repository."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from phalanx.errors import ConfigError

from .sizes import parse_sizes

__all__ = ["command_line", "end_on_signals", "list_of", "of_every_run", "ranks_of", "sizes_of", "unique"]

_MOST_RANKS = 256
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _in_a_folder(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A file that can be written at the end, as far as that can be known before."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder '{value.parent}'.")
    return value


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_OF_EVERY_RUN = (
    click.option(
        "--rounds",
        type=click.IntRange(3, 1000),
        metavar="N",
        default=9,
        show_default=True,
        help="Rounds in each cell; three times as many where Phalanx and a peer are near each other.",
    ),
    click.option(
        "--round-ms",
        type=click.FloatRange(1, 10_000),
        metavar="MS",
        default=30,
        show_default=True,
        help="Milliseconds of one round.",
    ),
    click.option(
        "--limit",
        type=click.FloatRange(1, 3600),
        metavar="SECONDS",
        default=60,
        show_default=True,
        help="Longest wait for one answer; a contender that takes longer has failed.",
    ),
    click.option(
        "--json", "json_file", metavar="FILE", type=_FILE, callback=_in_a_folder, help="Write everything as JSON."
    ),
    click.option(
        "--plot",
        "plot_file",
        metavar="FILE",
        type=_FILE,
        callback=_in_a_folder,
        help="Draw it, as .svg or .png; needs matplotlib.",
    ),
)


def of_every_run(*, plot: bool = True) -> Callable[[_Function], _Function]:
    """The options that follow those of the command itself: how long to measure, and what to write."""

    def add(function: _Function) -> _Function:
        for option in reversed(_OF_EVERY_RUN if plot else _OF_EVERY_RUN[:-1]):
            function = option(function)
        return function

    return add


def list_of(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str | None], list[str]]:
    """The callback of an option that takes names, with commas between them."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
        return unique(value.split(",") if value else [], known)

    return parse


def unique(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Each name once.

    Raises:
        click.BadParameter: One is not known.
    """
    found = list(dict.fromkeys(name.strip() for name in names))
    for name in found:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not valid (expected {', '.join(known)})")
    return found


def sizes_of(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """The callback of `--sizes`."""
    try:
        return parse_sizes(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def ranks_of(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """The callback of `--ranks`."""
    counts = []
    for word in value.split(","):
        number = word.strip()
        if not (number.isascii() and number.isdigit() and 2 <= int(number) <= _MOST_RANKS):
            raise click.BadParameter(f"{word!r} is not valid (expected numbers from 2 to {_MOST_RANKS}, as 2,4)")
        counts.append(int(number))
    return list(dict.fromkeys(counts))


_PATHS = ("--json", "--plot", "--openmpi", "--mpich", "--ray")


def command_line(program: str) -> str:
    """The command line as it was typed, without paths, which say nothing to others.

    Args:
        program: The words before the arguments, as `phalanx bench`.
    """
    last = program.rsplit(maxsplit=1)[-1]
    words = sys.argv[sys.argv.index(last) + 1 :] if last in sys.argv else []
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _PATHS:
            skip = not equals
        elif skip:
            skip = False
        else:
            kept.append(word)
    return shlex.join([*program.split(), *kept])


def end_on_signals() -> None:
    """Ctrl-C, SIGTERM and SIGHUP end this process by an exception: it ends its ranks and shows what it has measured."""
    for number in _ENDING:
        signal.signal(number, _stop)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(number: int, frame: FrameType | None) -> None:
    # `timeout` sends its signal twice, to the process and to its group: the second must not disturb the end.
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)
