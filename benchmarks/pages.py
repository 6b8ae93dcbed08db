"""Writes what the benchmarks measured into docs/benchmarks.md and docs/coming-from-gloo.md.

The pages are written by hand, but for what stands between `<!-- measured: NAME -->` and `<!-- end -->`:

    python -m benchmarks.pages FOLDER

FOLDER holds what these benchmarks wrote with `--json`, as far as it is there: `main.json`, `many.json`, `tcp.json`,
`hosts.json`, `torch.json` and `training.json`. A part whose file is missing stays as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from phalanx.cli.bench.machine import limit
from phalanx.cli.bench.results import BenchReport
from phalanx.cli.bench.show import ResultTable, tables
from phalanx.cli.bench.sizes import show_bytes, show_seconds, show_size
from phalanx.cli.bench.summary import primary, summary

from .checkout import ROOT
from .training import show as steps
from .under_torch import goals

PAGES = [ROOT / "docs" / name for name in ("benchmarks.md", "coming-from-gloo.md")]
BLOCK = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, rule, *rows])


# -- the parts -------------------------------------------------------------------------------------------------------


def where(report: BenchReport) -> str:
    """The machine, the versions, the command, and the peers that were left out."""
    machine = report.machine
    versions = dict.fromkeys(column.version for column in report.columns if column.version and not column.ours)
    lines = [
        f"Measured on {report.date} on {machine.cores} cores, {machine.model}, {machine.kernel}, with Phalanx "
        f"{report.version}, Python {machine.python}, NumPy {machine.numpy}"
        + "".join(f", {version}" for version in versions)
        + ".",
        "",
        f"```bash\n{report.command}\n```",
    ]
    for name, reason in report.missing.items():
        lines += ["", f"{name} was left out: {reason}."]
    return "\n".join(lines) + "\n"


def standing(report: BenchReport) -> str:
    """The summary beside the best peer."""
    rows = [[name, text] for name, text in summary(report)]
    return markdown(["", "Phalanx's speed beside the best peer's, geometric mean of the cells"], rows).replace(
        "---:", "---"
    )


def cells(report: BenchReport) -> str:
    """Every cell. The ratio is bold where Phalanx is slower by more than the noise."""
    return "\n".join(f"**{table.title}**\n\n{markdown(table.head, bold_rows(table))}" for table in tables(report))


def bold_rows(table: ResultTable) -> list[list[str]]:
    """The rows of a table, with bold ratios where Phalanx is slower."""
    rows = []
    for row, ratio in zip(table.rows, table.ratios, strict=True):
        marked = list(row)
        if table.ratio_at is not None and ratio is not None and ratio < 0.95:
            marked[table.ratio_at] = f"**{marked[table.ratio_at]}**"
        rows.append(marked)
    return rows


def limits(report: BenchReport) -> str:
    """The speed of the machine's memory, and how near to it Phalanx comes."""
    speeds = [
        [
            "one core" if found.cores == 1 else f"{found.cores} cores at once",
            f"{found.copy / 1e9:.1f} GB/s",
            f"{found.add / 1e9:.1f} GB/s",
        ]
        for found in report.machine.bandwidth
    ]
    rows = []
    ours = [column for column in report.columns if column.ours]
    for cell in report.cells:
        for column in ours:
            timing = cell.of(column.name)
            if cell.limit is None or timing is None or timing.seconds is None:
                continue
            least = limit(cell.operation, cell.size, cell.ranks, report.machine.bandwidth, in_segment=column.in_segment)
            name = f"{cell.operation}, {column.label}" if column.in_segment else cell.operation
            share = f"{least / timing.seconds:.0%}"
            rows.append(
                [name, str(cell.ranks), show_size(cell.size), show_seconds(least), show_seconds(timing.seconds), share]
            )
    return (
        markdown(["64 MiB arrays", "copy", "`x += y`, of x"], speeds)
        + "\n"
        + markdown(["operation", "ranks", "size", "limit", "Phalanx", "of the limit's speed"], rows)
    )


def memory(report: BenchReport) -> str:
    """The extra memory of an all_reduce."""
    labels = {column.name: column.label for column in report.columns}
    rows = [
        [labels[row.entrant], str(row.ranks), show_size(row.size), show_bytes(row.peak), show_bytes(row.kept)]
        for row in report.memory
    ]
    return markdown(["", "ranks", "all_reduce of", "more at the peak", "kept afterwards"], rows)


def aside(report: BenchReport) -> str:
    """A section for a report of its own: machine, summary and cells."""
    return "\n".join([where(report), standing(report), cells(report)])


def under_torch(report: BenchReport) -> str:
    """The section on torch.distributed."""
    rows = [[name, text] for name, text in goals.summary(report)]
    standing = markdown(["size", "beside Gloo, the slowest cell of all operations"], rows).replace("---:", "---")
    return "\n".join([where(report), standing, cells(report)])


def training(report: BenchReport) -> str:
    """The section on steps of training."""
    found = [f"**{table.title}**\n\n{markdown(table.head, table.rows)}" for table in steps.tables(report)]
    return "\n".join([where(report), *found])


PARTS: dict[str, tuple[str, Callable[[BenchReport], str]]] = {
    "where": ("main", where),
    "summary": ("main", standing),
    "cells": ("main", cells),
    "limits": ("main", limits),
    "memory": ("main", memory),
    "many": ("many", aside),
    "tcp": ("tcp", aside),
    "hosts": ("hosts", aside),
    "torch": ("torch", under_torch),
    "training": ("training", training),
}
"""Name of the part -> file it is made of, and how."""


def renew(page: str, reports: dict[str, BenchReport]) -> str:
    """The page with every part that there is a report for.

    Raises:
        KeyError: The page asks for a part that does not exist.
    """

    def part(match: re.Match[str]) -> str:
        name, make = PARTS[match[2]]
        return f"{match[1]}\n{make(reports[name])}\n{match[3]}" if name in reports else match[0]

    return BLOCK.sub(part, page)


def main(folder: Path) -> None:
    """Writes the pages, and prints the first line of each summary."""
    reports = {
        name: BenchReport.decode((folder / f"{name}.json").read_bytes())
        for name in dict.fromkeys(name for name, _ in PARTS.values())
        if (folder / f"{name}.json").exists()
    }
    for page in PAGES:
        page.write_text(renew(page.read_text(encoding="utf-8"), reports), encoding="utf-8")
    for name, report in reports.items():
        for line, text in summary(report)[:1]:
            click.echo(f"{name}: {primary(report).label}, {line}: {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
