"""The pictures of docs/screens.md: what a terminal shows when real commands run.

Each command runs in a terminal of its own, and the last screen is drawn as SVG. Times, process numbers and figures are
those of the machine that draws them; only the name of the temporary folder is replaced:

    python -m docs.screens            all pictures
    python -m docs.screens failure    one of them
"""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "img"
WIDTH = 100
LARGEST = 200 << 10
"""Bytes of a picture: a page should not be heavier than its words."""


class Screen(NamedTuple):
    """A command, in a folder with the script that it runs or in the checkout."""

    command: str
    page: str = ""
    """The page that shows the script."""


SCREENS = {
    "failure": Screen("phalanx run -n 8 raises.py", "failures.md"),
    "late": Screen("phalanx run -n 4 late.py", "failures.md"),
    "doctor": Screen("phalanx doctor"),
    "demo": Screen("phalanx demo"),
}


def script_of(page: str, name: str) -> str:
    """The script that a page shows under this title."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf'^```python title="{re.escape(name)}"\n(.*?)^```$', text, re.M | re.DOTALL)
    if found is None:
        raise SystemExit(f"{page} has no script {name}")
    return found[1]


def run(screen: Screen) -> bytes:
    """What the command writes to a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        if screen.page:
            name = next(word for word in screen.command.split() if word.endswith(".py"))
            Path(folder, name).write_text(script_of(screen.page, name), encoding="utf-8")
        main, other = pty.openpty()
        size = {"COLUMNS": str(WIDTH), "LINES": "100"}
        bin_folder = str(Path(sys.executable).parent)
        keep = {name: os.environ[name] for name in ("HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        env = {**keep, **size, "TERM": "xterm-256color", "PATH": f"{bin_folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        process = subprocess.Popen(
            screen.command.split(),
            cwd=folder if screen.page else DOCS.parent,
            env=env,
            stdin=other,
            stdout=other,
            stderr=other,
        )
        os.close(other)
        seen = b""
        try:
            while block := os.read(main, 65536):
                seen += block
        except OSError:  # how a terminal says that its last writer is gone
            pass
        process.wait()
        os.close(main)
        return seen.replace(folder.encode(), b"~/job")


def last_screen(written: bytes) -> list[list[Any]]:
    """The cells that a terminal shows at the end, line by line."""
    import pyte

    screen = pyte.Screen(WIDTH, 400)
    stream = pyte.ByteStream(screen)
    stream.feed(written.replace(b"\n", b"\r\n").replace(b"\r\r\n", b"\r\n"))
    lines = [[screen.buffer[row][column] for column in range(WIDTH)] for row in range(400)]
    while lines and not "".join(cell.data for cell in lines[-1]).strip():
        lines.pop()
    return lines


def draw(name: str, screen: Screen) -> str:
    """The picture. Fonts are those of the reader: nothing is fetched from elsewhere."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (screen.command, "bold")))
    for line in last_screen(run(screen)):
        text = Text(no_wrap=True)
        for (fg, bold, italics), cells in itertools.groupby(line, key=lambda cell: (cell.fg, cell.bold, cell.italics)):
            text.append("".join(cell.data for cell in cells), Style(color=colour(fg), bold=bold, italic=italics))
        text.rstrip()
        console.print(text)
    svg = console.export_svg(title=screen.command, unique_id=f"screen-{name}")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: arial", "font-family: sans-serif")
    svg = svg.replace("Fira Code", "ui-monospace, DejaVu Sans Mono, Menlo, Consolas")
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def colour(name: str) -> str | None:
    """A colour of the terminal in the words of rich."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return {"brown": "yellow", "brightbrown": "bright_yellow"}.get(name, name.replace("bright", "bright_"))


def main(names: list[str]) -> None:
    for name in names or SCREENS:
        svg = draw(name, SCREENS[name])
        if len(svg.encode()) > LARGEST:
            raise SystemExit(f"{name} has {len(svg.encode()):,} bytes, more than {LARGEST:,}")
        (PICTURES / f"screen-{name}.svg").write_text(svg, encoding="utf-8")
        sys.stdout.write(f"{name}: {len(svg.encode()):,} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
