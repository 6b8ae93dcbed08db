"""Findings for a person at a terminal, for a log, and for a program."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from .findings import Finding, Severity

__all__ = ["as_json", "as_lines", "show_table", "summary"]

_COLOURS = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
_MARKS = {Severity.OK: "✓", Severity.WARNING: "!", Severity.PROBLEM: "✗"}


def show_table(findings: Sequence[Finding]) -> None:
    """A table on the terminal, as wide as it is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column()
    for finding in findings:
        colour = _COLOURS[finding.status]
        text = Text(finding.found)
        if finding.advice:
            text = Text.assemble(finding.found, "\n", ("→ ", "bold cyan"), (finding.advice, "cyan"))
        table.add_row(Text(_MARKS[finding.status], colour), Text(finding.topic, colour), text)
    console = Console(highlight=False)
    console.print(table)
    console.print()
    console.print(summary(findings), style="bold")


def as_lines(findings: Sequence[Finding]) -> str:
    """One line for each finding, a second one for its advice: to be read in a log and found by grep."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.status.value:<8} {finding.topic}: {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8} -> {finding.advice}")
    return "\n".join([*lines, summary(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """For programs: `{"status": worst, "findings": [{topic, status, found, advice}, …]}`."""
    rows = [
        {"topic": row.topic, "status": row.status.value, "found": row.found, "advice": row.advice} for row in findings
    ]
    worst = max((row.status for row in findings), key=list(Severity).index, default=Severity.OK)
    return json.dumps({"status": worst.value, "findings": rows}, indent=2, ensure_ascii=False)


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    count = Counter(finding.status for finding in findings)
    parts = [
        f"{count[status]} {status.value}{'s' if count[status] > 1 else ''}"
        for status in (Severity.PROBLEM, Severity.WARNING)
        if count[status]
    ]
    if count[Severity.PROBLEM]:
        return f"{' and '.join(parts)}: a job would fail here until this is repaired."
    if parts:
        return f"No problems, {parts[0]}: nothing here would stop a job."
    return "No problems: nothing here would stop a job."
