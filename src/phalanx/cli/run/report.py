"""The last words of a job that failed: which rank, how, where, and that rank's last output."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "LEFT",
    "RAISED",
    "TRACEBACK",
    "JobFailure",
    "describe_status",
    "failure_report",
    "last_words",
    "list_ranks",
    "victims_line",
]

LAST_LINES = 30
"""Lines that are shown of an output without a traceback."""
TRACEBACK_LINES = 200
"""Lines that are shown of a traceback; a deep recursion has more."""

LEFT = "it left before the others were done"
"""How a rank failed that ended, or was about to, while others still needed it."""
RAISED = "it raised an exception"
"""How a rank failed that has left its traceback, and did not end by itself."""
TRACEBACK = "its traceback"
"""The title of a traceback."""

_TRACEBACK = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):")
_LINK = re.compile(r"^(During handling of the above exception|The above exception was the direct cause)")


@dataclass(frozen=True)
class JobFailure:
    """The rank that failed, and all that is known of it."""

    rank: int
    how: str
    """An exit code, a signal, or the words of the directory."""
    host: str
    pid: int | None = None
    log: Path | None = None
    stderr: bytes = b""
    stdout: bytes = b""
    last_words: str = ""
    """The traceback that the rank has left for the launcher, or that came from another node."""
    killed: bool = False
    verb: str = "failed"


def describe_status(status: int) -> str:
    """How a process ended, in words, from what `Popen.returncode` would be."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory? the kernel's log says)" if -status == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def list_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 and 3`, `ranks 0 to 5 and 7`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[str] = []
    for first, last in runs:
        if last == first + 1:
            parts += [str(first), str(last)]
        else:
            parts.append(str(first) if first == last else f"{first} to {last}")
    many = len(parts) > 1 or "to" in parts[0]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'ranks' if many else 'rank'} {text}"


def last_words(stderr: bytes, stdout: bytes = b"", *, failed: bool = True) -> tuple[str, list[str]]:
    """The last output of a rank, with a title: its traceback where there is one, else the last lines.

    Args:
        stderr: The end of its standard error.
        stdout: The end of its standard output, which counts where the other is empty.
        failed: The rank ended by itself. One that was killed did not die of the last exception that it wrote about.
    """
    lines = _lines(stderr)
    first = _traceback_start(lines) if failed else None
    if first is not None:
        return TRACEBACK, _cut(lines[first:])
    if lines:
        return "what it wrote last", lines[-LAST_LINES:]
    lines = _lines(stdout)
    return ("what it wrote last", lines[-LAST_LINES:]) if lines else ("it wrote nothing", [])


def _cut(lines: list[str]) -> list[str]:
    """The first and the last lines of a traceback that is too long."""
    if len(lines) <= TRACEBACK_LINES:
        return lines
    half = TRACEBACK_LINES // 2
    return [*lines[:half], f"  … {len(lines) - 2 * half} lines …", *lines[-half:]]


def _traceback_start(lines: list[str]) -> int | None:
    """Where the last traceback begins; exceptions that were raised while others were handled belong together."""
    start, linked = None, True
    for index in range(len(lines) - 1, -1, -1):
        if _TRACEBACK.match(lines[index]):
            if not linked:
                break
            start, linked = index, False
        elif _LINK.match(lines[index]):
            linked = True
    return start


def _lines(data: bytes) -> list[str]:
    text = data.decode("utf-8", "backslashreplace")
    # Of a progress bar only its last state says something.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def failure_report(
    failure: JobFailure, notes: Sequence[str], *, victim: tuple[int, str] | None = None, end: str = "", colour: bool
) -> str:
    """The text that is printed last.

    Args:
        failure: Which rank, how and where.
        notes: Lines about the other ranks.
        victim: A rank that failed because of it, and what that rank said: for a failure without a traceback.
        end: The line after the traceback.
        colour: Whether to use colour.
    """
    head = f"phalanx: rank {failure.rank} {failure.verb}: {failure.how}"
    where = f"  on {failure.host}" + (f", process {failure.pid}" if failure.pid is not None else "")
    if failure.log is not None:
        where += f", log {failure.log}"
    title, lines = _said(failure)
    rule = "-" * 72
    if colour:
        head, rule = f"\x1b[1;31m{head}\x1b[0m", f"\x1b[31m{rule}\x1b[0m"
    parts = [rule, head, where, *(f"  {note}" for note in notes), f"  {title}:" if lines else f"  {title}", *lines]
    if victim is not None and title != TRACEBACK:
        parts += [f"  rank {victim[0]} ended because of it:", *_cut(_lines(victim[1].encode()))]
    return "\n".join([*parts, end] if end else parts)


def victims_line(same: Sequence[int], because: int) -> str:
    """The line that stands for the tracebacks that are not shown; empty if there are none.

    Args:
        same: The ranks that failed in the same way.
        because: How many others ended because of the failure.
    """
    parts = [f"the same on {list_ranks(same)}"] if same else []
    if because:
        parts.append(f"{because} rank{'s' if because > 1 else ''} ended because of it")
    return f"phalanx: {', '.join(parts)}" if parts else ""


def _said(failure: JobFailure) -> tuple[str, list[str]]:
    """The last output of the rank, as far as it is known, with a title."""
    if failure.last_words:
        return TRACEBACK, _cut(_lines(failure.last_words.encode()))
    if failure.pid is None:
        return "what it wrote went to its own node's launcher", []
    return last_words(failure.stderr, failure.stdout, failed=not failure.killed)
