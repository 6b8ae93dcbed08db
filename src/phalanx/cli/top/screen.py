"""A picture of a job for a terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.seeing.picture import Picture, RankPicture, words_without_findings
from phalanx.seeing.watch import JobWatch

__all__ = ["as_text", "follow", "render"]

WIDTH = 120
"""Columns of a picture that is printed to a file."""
RANKS_SHOWN = 64
LEAST = 18
"""Columns that a text has at least, if it needs them."""
GAP = 2
"""Columns between two columns of a table."""
WORTH_SHOWING = 10_000
"""Bytes per second from which the links are shown."""
COLOURS = {
    "blocked": "bold red",
    "mismatch": "bold red",
    "straggler": "bold yellow",
    "once": "yellow",
    "link": "bold magenta",
}


def follow(watch: JobWatch, interval: float, note: str = "") -> None:
    """Shows the job until it ends or the user has seen enough, with a note below it."""
    below = [Text(""), Text(_printable(note), style="dim")] if note else []
    with Live(Text("looking for the ranks …"), screen=True, auto_refresh=False) as live:
        last: RenderableType = Text("")
        try:
            while True:
                picture = watch.look()
                if picture is not None:
                    last = render(picture, live.console.width)
                    live.update(Group(last, *below), refresh=True)
                    if not picture.running:
                        break
                time.sleep(interval)
        except KeyboardInterrupt:
            pass
    Console().print(last)


def as_text(picture: Picture) -> str:
    """The picture as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    console.print(render(picture, WIDTH))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def render(picture: Picture, width: int) -> Group:
    """The picture for rich, on a terminal of so many columns."""
    parts: list[RenderableType] = [_head(picture)]
    found = [Text(_printable(one.text), style=COLOURS.get(one.kind, "")) for one in picture.findings]
    parts += [Padding(text, (0, 0, 0, 2)) for text in found]
    if not picture.findings:
        words, well = words_without_findings(picture)
        parts.append(Text(f"  {words}", style="green" if well else ""))
    parts += [Text(""), _ranks(picture, width)]
    if picture.sites:
        parts += [Text(""), _sites(picture, width)]
    if any(link.bytes_per_second >= WORTH_SHOWING for link in picture.links):
        parts += [Text(""), _links(picture, width)]
    if picture.calls:
        parts += [Text(""), _calls(picture, width)]
    return Group(*parts)


def _head(picture: Picture) -> Text:
    seen = len(picture.ranks)
    ranks = f"{picture.world_size} ranks" if seen == picture.world_size else f"{seen} of {picture.world_size} ranks"
    clock = f", clocks within {picture.clock_error * 1e3:.1f} ms" if picture.clock_error else ""
    script, _, arguments = picture.program.partition(" ")
    text = Text(_printable(f"{Path(script).name or 'a job'} {arguments[:40]}".strip()), style="bold")
    text.append(f"   job {picture.job}, {ranks}, {picture.elapsed:.1f} s{clock}", style="dim")
    return text


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, drop: Sequence[str], styles: Sequence[str] = ()
) -> Table:
    """A table that fits into so many columns of a terminal. Texts are cut, numbers never are.

    Args:
        headings: Those of numbers begin with `>`.
        rows: Shown as they are: rich would take brackets in the name of a file for markup, and `:x:` for a sign.
        drop: The columns to go if there is not enough room, the first one first.
        styles: Of each row.
    """
    names = [heading.lstrip(">") for heading in headings]
    cells = [[_printable(text) for text in column] for column in zip(names, *rows, strict=True)]
    widths = {name: max(map(cell_len, column)) for name, column in zip(names, cells, strict=True)}
    texts = {heading for heading in headings if not heading.startswith(">")}
    least = {name: min(LEAST, wide) if name in texts else wide for name, wide in widths.items()}
    for name in drop:
        if sum(least.values()) + GAP * (len(least) - 1) <= width:
            break
        del least[name]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for name, room in least.items():
        # Only columns that may wrap are made narrower. Their texts do not wrap.
        table.add_column(
            Text(name, no_wrap=True, overflow="ellipsis"),
            justify="left" if name in texts else "right",
            min_width=room,
            no_wrap=name not in texts,
        )
    shown = [column[1:] for name, column in zip(names, cells, strict=True) if name in least]
    for number, row in enumerate(zip(*shown, strict=True)):
        style = styles[number] if styles else ""
        table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in row), style=style)
    return table


def _printable(text: str) -> str:
    """The text without characters that move the cursor or colour the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _ranks(picture: Picture, width: int) -> Table:
    blamed = {rank for finding in picture.findings for rank in finding.ranks if finding.kind != "link"}
    rows, styles = [], []
    for rank in picture.ranks[:RANKS_SHOWN]:
        bad = rank.state in ("lost", "failed", "stopped")
        styles.append("bold red" if bad else "yellow" if rank.rank in blamed else "")
        rows.append(
            [
                str(rank.rank),
                _does(rank),
                rank.line,
                f"{rank.seconds:.1f} s",
                _listed(rank.waits_for),
                f"{rank.waiting:.0%}",
                f"{rank.moving:.0%}",
                in_units(rank.bytes_per_second),
                f"{rank.operations_per_second:.0f}",
                in_units(rank.memory),
            ]
        )
    if len(picture.ranks) > RANKS_SHOWN:
        styles.append("")
        rows.append(["…", f"{len(picture.ranks) - RANKS_SHOWN} more", *[""] * 8])
    headings = [">rank", "does", "at", ">since", "waits for", ">waiting", ">moving", ">bytes/s", ">ops/s", ">memory"]
    return _table(headings, rows, width, ["ops/s", "memory", "bytes/s", "moving", "waiting"], styles)


def _does(rank: RankPicture) -> str:
    words = rank.operation or "no operation"
    return words if rank.state == "running" else f"{rank.state}: {words}" if rank.operation else rank.state


def _sites(picture: Picture, width: int) -> Table:
    rows = [
        [
            f"{site.verb} at {site.where}",
            str(site.count),
            in_units(site.bytes),
            f"{site.seconds:.2f} s",
            f"{min(1.0, site.waiting / site.seconds):.0%}" if site.seconds else "",
            f"rank {site.last} ({site.often:.0%})" if site.last >= 0 else "",
            f"{site.late:.2f} s" if site.last >= 0 else "",
        ]
        for site in picture.sites[:8]
    ]
    headings = ["call site", ">calls", ">bytes", ">time", ">waiting", "latest", ">by"]
    return _table(headings, rows, width, ["bytes", "calls", "waiting"])


def _links(picture: Picture, width: int) -> Table:
    rows = [
        [
            f"{link.source} → {link.target}",
            in_units(link.bytes_per_second),
            f"{link.busy:.0%}",
            f"{in_units(link.rate)}/s",
            f"{link.round_trip * 1e3:.2f} ms",
            str(link.lost),
        ]
        for link in sorted(picture.links, key=lambda link: -link.busy)[:8]
    ]
    headings = ["link", ">bytes/s", ">busy", ">while busy", ">round trip", ">sent again"]
    return _table(headings, rows, width, ["sent again", "round trip"])


def _calls(picture: Picture, width: int) -> Table:
    rows = [
        [
            f"{call.name}: {call.caller} → {call.server}",
            str(call.count),
            str(call.failed),
            *(f"{seconds * 1e3:.2f} ms" for seconds in (call.seconds, call.queue, call.handler, call.wire)),
        ]
        for call in picture.calls[:8]
    ]
    headings = ["remote call", ">calls", ">failed", ">mean", ">queue", ">handler", ">wire"]
    return _table(headings, rows, width, ["failed", "calls"])


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{', '.join(map(str, ranks[:3]))}, … ({len(ranks)})"


def in_units(count: float) -> str:
    """A number of bytes, short."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
