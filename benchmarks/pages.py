"""Writes what the benchmarks measured into docs/benchmarks.md, docs/coming-from-gloo.md and the README.

The pages are written by hand, but for what stands between `<!-- measured: NAME -->` and `<!-- end -->`:

    python -m benchmarks.pages FOLDER

FOLDER holds what these benchmarks wrote with `--json`, as far as it is there: `main.json`, `many.json`, `tcp.json`,
`hosts.json`, `torch.json` and `training.json`, and the picture `main.svg`. A part whose file is missing stays as it is.
A run in several parts, as `main-2.json` and `main-16.json`, is taken together as `main.json`.

docs/benchmarks.md has a section for each machine, which begins with `<!-- machine: NAME -->`. A report renews the
section of the machine that it was measured on, and no other; a machine that is new gets a section of its own. The
README claims what the worst of these machines shows.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from phalanx.cli.bench.results import BenchReport, Machine
from phalanx.cli.bench.show import ResultTable, tables
from phalanx.cli.bench.sizes import show_bytes, show_ratio, show_seconds, show_size
from phalanx.cli.bench.summary import geometric_mean, place, primary, standings, summary

from .checkout import ROOT
from .training import show as steps
from .under_torch import goals

PAGES = [ROOT / "docs" / name for name in ("benchmarks.md", "coming-from-gloo.md")]
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SECTION = re.compile(r"<!-- machine: (.+?) -->\n(.*?)(?=<!-- machine: |<!-- end of machines -->)", re.DOTALL)
END = "<!-- end of machines -->"
CLAIM = re.compile(r"(<!-- measured: claim -->).*?(<!-- end -->)")
NOT_MEASURED = "Not measured on this machine."


def name_of(machine: Machine) -> str:
    """The name of a machine, by which its section is found again. A new kernel does not make a new machine."""
    return f"{machine.model}, {machine.cores} cores"


def picture_of(machine: str) -> str:
    """The file name of a machine's picture."""
    return f"benchmarks-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.svg"


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


def where_with_picture(report: BenchReport) -> str:
    """The same, and the picture of the machine if there is one."""
    picture = picture_of(name_of(report.machine))
    if not (PAGES[0].parent / "img" / picture).exists():
        return where(report)
    return f"{where(report)}\n![Time per call over size, for each operation and number of ranks](img/{picture})\n"


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
    """The speed of the machine's memory, and how near to the limit Phalanx comes."""
    speeds = [
        [
            "one core" if found.cores == 1 else f"{found.cores} cores at once",
            show_size(found.size),
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
            name = f"{cell.operation}, {column.label}" if column.in_segment else cell.operation
            limit, times = show_seconds(cell.limit), show_ratio(timing.seconds / cell.limit)
            rows.append([name, str(cell.ranks), show_size(cell.size), limit, show_seconds(timing.seconds), times])
    return (
        markdown(["", "arrays of a core", "copy", "`x += y`, of x"], speeds)
        + "\n"
        + markdown(["operation", "ranks", "size", "limit", "Phalanx", "times the limit"], rows)
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
    rows = [[name, text] for name, text in goals.standing(report)]
    standing = markdown(["", "beside Gloo, the slowest cell of all operations"], rows).replace("---:", "---")
    return "\n".join([where(report), standing, cells(report)])


def training(report: BenchReport) -> str:
    """The section on steps of training."""
    found = [f"**{table.title}**\n\n{markdown(table.head, table.rows)}" for table in steps.tables(report)]
    return "\n".join([where(report), *found])


PARTS: dict[str, tuple[str, Callable[[BenchReport], str]]] = {
    "where": ("main", where_with_picture),
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


def section(machine: str) -> str:
    """A new section, with nothing measured yet."""
    parts = [f"<!-- machine: {machine} -->\n## {machine}\n"]
    for title, names in SECTIONS.items():
        parts += [f"### {title}\n"] if title else []
        parts += [f"<!-- measured: {name} -->\n\n{NOT_MEASURED}\n\n<!-- end -->\n" for name in names]
    return "\n".join(parts) + "\n"


SECTIONS = {
    "": ["where"],
    "In short": ["summary"],
    "Every cell": ["cells"],
    "How far from the limit": ["limits"],
    "Memory": ["memory"],
    "More ranks than cores": ["many"],
    "TCP only": ["tcp"],
    "Two hosts": ["hosts"],
}
"""The parts of a machine's section under their titles."""


def renew(page: str, reports: dict[str, BenchReport]) -> str:
    """The page with every part that there is a report for, each in the section of its machine.

    Raises:
        KeyError: The page asks for a part that does not exist.
    """
    if END not in page:
        return _renew_parts(page, reports)
    known = {match[1] for match in SECTION.finditer(page)}
    of_machines = {name for names in SECTIONS.values() for name in names}
    files = {PARTS[name][0] for name in of_machines}
    for machine in dict.fromkeys(name_of(report.machine) for name, report in reports.items() if name in files):
        if machine not in known:
            page = page.replace(END, section(machine) + END)

    def renew_section(match: re.Match[str]) -> str:
        its = {name: report for name, report in reports.items() if name_of(report.machine) == match[1]}
        return _renew_parts(match[0], its)

    page = SECTION.sub(renew_section, page)
    return BLOCK.sub(lambda match: _renew_machines(match, reports) if match[2] == "machines" else match[0], page)


def _renew_parts(text: str, reports: dict[str, BenchReport]) -> str:
    def part(match: re.Match[str]) -> str:
        name, make = PARTS[match[2]]
        return f"{match[1]}\n{make(reports[name])}\n{match[3]}" if name in reports else match[0]

    return BLOCK.sub(part, text)


MACHINES = ["machine", "cells", "mean", "worst cell", "more than 5 % slower"]


def _renew_machines(match: re.Match[str], reports: dict[str, BenchReport]) -> str:
    """The table of all machines: one row is renewed, the others stay."""
    rows = {row[0]: row for row in machine_rows(match[0])}
    report = reports.get("main")
    found = standings(report) if report is not None else []
    if report is not None and found:
        worst = min(found, key=lambda standing: standing.ratio)
        machine = name_of(report.machine)
        rows[machine] = [
            machine,
            str(len(found)),
            show_ratio(geometric_mean(standing.ratio for standing in found)),
            f"{show_ratio(worst.ratio)}, {place(worst.cell)}, beside {worst.peer.label}",
            str(sum(1 for standing in found if standing.ratio < 0.95)),
        ]
    return f"{match[1]}\n{markdown(MACHINES, list(rows.values()))}\n{match[3]}"


def machine_rows(text: str) -> list[list[str]]:
    """The rows of the table of machines, as they stand on the page."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [line for line in lines if line != MACHINES and not line[0].startswith("---")]


def claim(page: str) -> str:
    """What the README says: the machine with the least mean, not the best one."""
    table = next(match[0] for match in BLOCK.finditer(page) if match[2] == "machines")
    rows = machine_rows(table)
    worst = min(rows, key=lambda row: float(row[2].replace(",", "")))
    where = f"{worst[0]}, the worst of {len(rows)} machines" if len(rows) > 1 else worst[0]
    return (
        f"{worst[2]} times the speed of the best of Gloo, Open MPI and MPICH, the geometric mean of {worst[1]} cells "
        f"from 8 B to 64 MiB, on {where}"
    )


def read(folder: Path, name: str) -> BenchReport | None:
    """The report of this name, or what its parts are together; None if there is none.

    Raises:
        click.ClickException: The parts are of several machines.
    """
    whole = folder / f"{name}.json"
    paths = (
        [whole] if whole.exists() else sorted(folder.glob(f"{name}-*.json"), key=lambda path: (len(path.name), path))
    )
    parts = [BenchReport.decode(path.read_bytes()) for path in paths]
    if not parts:
        return None
    if len({name_of(part.machine) for part in parts}) > 1:
        raise click.ClickException(f"{', '.join(path.name for path in paths)} are of several machines")
    return msgspec.structs.replace(
        parts[-1],
        command="\n".join(part.command for part in parts),
        columns=list(dict.fromkeys(column for part in parts for column in part.columns)),
        missing={name: why for part in parts for name, why in part.missing.items()},
        cells=[cell for part in parts for cell in part.cells],
        memory=[row for part in parts for row in part.memory],
        errors=[error for part in parts for error in part.errors],
        unmeasured=[cell for part in parts for cell in part.unmeasured],
    )


def main(folder: Path) -> None:
    """Writes the pages, and prints the first line of each summary.

    Raises:
        click.ClickException: A report was cut short. A mean of some of the cells would stand there as that of all.
    """
    names = dict.fromkeys(name for name, _ in PARTS.values())
    reports = {name: found for name in names if (found := read(folder, name)) is not None}
    for name, report in reports.items():
        if report.unmeasured:
            first = report.unmeasured[0]
            raise click.ClickException(
                f"{folder / name}.json was cut short: {len(report.unmeasured)} cells from {first.operation} on "
                f"{first.ranks} ranks on were not measured (measure it again, or take it out of the folder)"
            )
    if "main" in reports and (folder / "main.svg").exists():
        picture = PAGES[0].parent / "img" / picture_of(name_of(reports["main"].machine))
        picture.parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / "main.svg", picture)
    for page in PAGES:
        page.write_text(renew(page.read_text(encoding="utf-8"), reports), encoding="utf-8")
    said = claim(PAGES[0].read_text(encoding="utf-8"))
    README.write_text(CLAIM.sub(rf"\g<1>{said}\g<2>", README.read_text(encoding="utf-8")), encoding="utf-8")
    for name, report in reports.items():
        for line, text in summary(report)[:1]:
            click.echo(f"{name}: {primary(report).label}, {line}: {text}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except click.ClickException as error:
        sys.exit(f"benchmarks.pages: {error.format_message()}")
