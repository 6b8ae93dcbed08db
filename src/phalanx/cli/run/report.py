"""The last words of a job that failed: which rank, how, where, and that rank's last output."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["JobFailure", "describe_status", "failure_report", "last_words", "list_ranks"]

LAST_LINES = 30
"""Lines that are shown of an output without a traceback."""
TRACEBACK_LINES = 200
"""Lines that are shown of a traceback; a deep recursion has more."""

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
    traceback: str = ""
    """As the rank sent it to the directory; only for a rank of another node."""
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
        found = lines[first:]
        if len(found) > TRACEBACK_LINES:
            half = TRACEBACK_LINES // 2
            found = [*found[:half], f"  … {len(found) - 2 * half} lines …", *found[-half:]]
        return "its traceback", found
    if lines:
        return "what it wrote last", lines[-LAST_LINES:]
    lines = _lines(stdout)
    return ("what it wrote last", lines[-LAST_LINES:]) if lines else ("it wrote nothing", [])


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


def failure_report(failure: JobFailure, notes: Sequence[str], *, colour: bool) -> str:
    """The text that is printed last.

    Args:
        failure: Which rank, how and where.
        notes: Lines about the other ranks.
        colour: Whether to use colour.
    """
    head = f"phalanx: rank {failure.rank} {failure.verb}: {failure.how}"
    where = f"  on {failure.host}" + (f", process {failure.pid}" if failure.pid is not None else "")
    if failure.log is not None:
        where += f", log {failure.log}"
    if failure.traceback and not (failure.stderr or failure.stdout):
        title, lines = "its traceback", failure.traceback.rstrip().split("\n")
    elif failure.pid is None:
        title, lines = "what it wrote went to its own node's launcher", []
    else:
        title, lines = last_words(failure.stderr, failure.stdout, failed=not failure.killed)
    title = f"  {title}:" if lines else f"  {title}"
    rule = "-" * 72
    if colour:
        head, rule = f"\x1b[1;31m{head}\x1b[0m", f"\x1b[31m{rule}\x1b[0m"
    return "\n".join([rule, head, where, *(f"  {note}" for note in notes), title, *lines])
