"""The picture of the layers in docs/architecture.md, drawn from the imports of the source.

What it shows is read from the package: its folders and files, the first line of each docstring, and which layer imports
which. A test compares the picture with the source. This writes it anew:

    python -m docs.architecture
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from tests.imports import FRONT_DOOR, LAYERS, Graph, Source, items, sources

PICTURE = Path(__file__).parent / "img" / "architecture.svg"
HIDDEN = {"__main__", FRONT_DOOR}
"""Two ways into the package, and no layers of their own."""
SHARED = {
    *("deadline", "alarm", "background_thread", "news", "one_event", "arguments", "system_limits"),
    *("errors", "types", "exception_text", "interrupts"),
    "operating_system",
}
"""Small modules that every layer may use: one band of the picture, without arrows."""
CORE = "The core in C++, under cpp/: reductions, shared memory, the fast paths."

WIDTH = 1000
GUTTER = 64
"""Pixels left of the bands, where arrows pass those bands that they skip."""
LANE = 13
"""Pixels between two such arrows."""
GAP = 20
"""Pixels between two bands: room for the arrow to the next one."""
BOX = 132
"""Pixels of the box around a name."""
BOX_X = GUTTER + 10
TEXT_X = BOX_X + BOX + 18
ARROW = "#546e7a"
LINE_HEIGHT = 17
CHARACTERS = 112
"""Characters that fit a line of text."""


class Item(NamedTuple):
    """A folder or module of a layer, with the lines of text beside its name."""

    name: str
    purpose: list[str]
    contents: list[str]

    @property
    def height(self) -> int:
        return max(34, LINE_HEIGHT * (len(self.purpose) + len(self.contents)) + 8)


class Band(NamedTuple):
    """A layer, and where it lies in the picture."""

    items: list[Item]
    top: int

    @property
    def names(self) -> set[str]:
        return {item.name for item in self.items}

    @property
    def bottom(self) -> int:
        return self.top + 12 + sum(item.height for item in self.items)

    @property
    def middle(self) -> int:
        return (self.top + self.bottom) // 2


# -- what is in the package ------------------------------------------------------------------------------------------


def read_item(name: str, found: Sequence[Source]) -> Item:
    """The first line of the docstring, and the names of what is in the folder: its folders first."""
    if name == "_core":
        return Item(name, [CORE], [])
    home = next(source for source in found if source.name == f"phalanx.{name}")
    purpose = (ast.get_docstring(home.tree) or "").partition("\n")[0].replace("`", "")
    inside = [source for source in found if source.name.rpartition(".")[0] == home.name]
    folders = [source.name.rpartition(".")[2] + "/" for source in inside if source.is_package]
    modules = [source.name.rpartition(".")[2] for source in inside if not source.is_package]
    return Item(name, textwrap.wrap(purpose, CHARACTERS), textwrap.wrap(" · ".join(folders + modules), CHARACTERS))


def read_bands(found: Sequence[Source]) -> list[Band]:
    """All layers from top to bottom; the small modules at the bottom are one."""
    lines = [sorted(line) for line in LAYERS if not line & (HIDDEN | SHARED)]
    lines.insert(len(lines) - 1, [name for line in LAYERS for name in sorted(line & SHARED)])
    bands: list[Band] = []
    top = 12
    for names in lines:
        bands.append(Band([read_item(name, found) for name in names], top))
        top = bands[-1].bottom + GAP
    return bands


def read_arrows(bands: Sequence[Band], graph: Graph) -> list[tuple[int, int]]:
    """Which band imports which, by their positions. An arrow that follows from others is left out."""
    place = {name: number for number, band in enumerate(bands) for name in band.names}
    below: dict[int, set[int]] = {number: set() for number in range(len(bands))}
    for importer, imported in graph.items():
        for name in imported - SHARED - HIDDEN:
            if importer in place and place[importer] != place[name]:
                below[place[importer]].add(place[name])
    return [
        (start, end)
        for start, ends in below.items()
        for end in sorted(ends)
        if not any(end in _reached(below, other) for other in ends - {end})
    ]


def _reached(below: dict[int, set[int]], start: int) -> set[int]:
    return set().union(*({end} | _reached(below, end) for end in below[start])) if below[start] else set()


# -- the drawing -----------------------------------------------------------------------------------------------------


def draw_band(band: Band) -> Iterator[str]:
    """A rectangle with the names of a layer on the left and what they are on the right."""
    yield rectangle(GUTTER, band.top, WIDTH - GUTTER - 12, band.bottom - band.top, "#f5f7f8", "#cfd8dc")
    top = band.top + 6
    for item in band.items:
        middle = top + item.height // 2
        yield rectangle(BOX_X, middle - 14, BOX, 28, "#e0f2f1", "#00796b")
        anchor = 'text-anchor="middle" font-weight="600" fill="#263238"'
        yield f'<text x="{BOX_X + BOX // 2}" y="{middle + 5}" {anchor}>{escape(item.name)}</text>'
        lines = [(line, "#263238") for line in item.purpose] + [(line, "#546e7a") for line in item.contents]
        first = middle - LINE_HEIGHT * len(lines) / 2 + 12.5
        for number, (line, colour) in enumerate(lines):
            yield f'<text x="{TEXT_X}" y="{first + number * LINE_HEIGHT:g}" fill="{colour}">{escape(line)}</text>'
        top += item.height


def rectangle(x: int, y: int, width: int, height: int, fill: str, stroke: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" stroke="{stroke}"/>'


def draw_arrows(bands: Sequence[Band], arrows: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Straight down to the next band; to others through the gutter, each in a lane of its own where they meet."""
    lanes: list[int] = []
    for start, end in sorted(arrows, key=lambda arrow: (arrow[0], arrow[1] - arrow[0])):
        if end == start + 1:
            x, y = BOX_X + BOX // 2, bands[end].top
            yield f'<path d="M{x} {bands[start].bottom} V{y - 7}"/>'
            yield f'<path d="M{x - 4} {y - 8} h8 l-4 8 z" fill="{ARROW}"/>'
            continue
        lane = next((number for number, free in enumerate(lanes) if free <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        x = GUTTER - 16 - LANE * lane
        leave, y = bands[start].middle + 6, bands[end].middle - 6
        down = f"Q{x} {leave} {x} {leave + 6} V{y - 6} Q{x} {y} {x + 6} {y}"
        yield f'<path d="M{GUTTER} {leave} H{x + 6} {down} H{GUTTER - 7}"/>'
        yield f'<path d="M{GUTTER - 8} {y - 4} v8 l8 -4 z" fill="{ARROW}"/>'


def draw() -> str:
    """The whole picture, as SVG."""
    found = sources()
    bands = read_bands(found)
    arrows = read_arrows(bands, items(found))
    height = bands[-1].bottom + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">\n'
        "<title>The layers of Phalanx, and which imports which</title>\n"
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" fill="#ffffff" stroke="#cfd8dc"/>\n'
    )
    drawn = [line for band in bands for line in draw_band(band)]
    drawn += [f'<g stroke="{ARROW}" stroke-width="1.5" fill="none">']
    drawn += [*draw_arrows(bands, arrows), "</g>", "</svg>"]
    return head + "\n".join(drawn) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}: written\n")
