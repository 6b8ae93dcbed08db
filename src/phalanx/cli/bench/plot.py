"""The picture: time per call over size, one field for each operation and number of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from phalanx.errors import BackendUnavailable, ConfigError

from .results import BenchReport, CellResult
from .sizes import show_size
from .summary import operations

__all__ = ["check_plot", "draw"]

_KINDS = (".svg", ".png")
_COLOURS = {
    "phalanx": "#0b7a75",
    "phalanx-tcp": "#7fb800",
    "phalanx-empty": "#58b09c",
    "phalanx-tcp-empty": "#58b09c",
    "gloo": "#d1495b",
    "openmpi": "#3d5a99",
    "openmpi-tcp": "#7a93c8",
    "mpich": "#e39b2d",
    "pipe": "#777777",
    "torch": "#d1495b",
    "zmq": "#3d5a99",
    "grpc": "#e39b2d",
    "ray": "#8e5aa8",
}


def check_plot(path: Path) -> None:
    """Checks before the run that a picture can be drawn after it.

    Raises:
        ConfigError: It would be neither SVG nor PNG.
        BackendUnavailable: There is no matplotlib.
    """
    if path.suffix.lower() not in _KINDS:
        raise ConfigError(f"--plot {path} is not valid (expected a name that ends in .svg or .png)")
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw(report: BenchReport, path: Path) -> None:
    """Writes the picture. The same report gives the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cells = [cell for cell in report.cells if cell.size and any(timing.rounds for timing in cell.timings)]
    if not cells:
        raise ConfigError("there is nothing to draw: no operation with an array was measured")
    ranks = list(dict.fromkeys(cell.ranks for cell in cells))
    names = operations(cells)
    # Text stays text, so that the file is small and can be searched; no date, no random names.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "phalanx", "font.size": 8}):
        figure = Figure(figsize=(2.6 * len(names) + 0.6, 2.4 * len(ranks) + 0.7), layout="constrained")
        fields = figure.subplots(len(ranks), len(names), squeeze=False, sharex=True)
        for row, count in enumerate(ranks):
            for column, name in enumerate(names):
                field = fields[row][column]
                _draw_field(field, report, [c for c in cells if (c.ranks, c.operation) == (count, name)])
                field.set_title(f"{name}, {count} ranks", fontsize=8)
                if column == 0:
                    field.set_ylabel("time per call")
        lines = {line.get_label(): line for row in fields for field in row for line in field.get_lines()}
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=130)


def _draw_field(field: Any, report: BenchReport, cells: list[CellResult]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    dtypes = list(dict.fromkeys(cell.dtype for cell in cells))
    for column in report.columns:
        for dtype in dtypes:
            points = [
                (cell.size, timing.seconds)
                for cell in cells
                if cell.dtype == dtype and (timing := cell.of(column.name)) is not None and timing.seconds is not None
            ]
            if points:
                field.plot(
                    *zip(*points, strict=True),
                    label=column.label if len(dtypes) == 1 else f"{column.label}, {dtype}",
                    color=_COLOURS.get(column.name),
                    linewidth=1.8 if column.ours else 1.1,
                    linestyle="--" if column.in_segment else "-",
                    marker="o",
                    markersize=2.5,
                    zorder=3 if column.ours else 2,
                )
    field.set_xscale("log", base=2)
    field.set_yscale("log")
    field.xaxis.set_major_locator(LogLocator(base=2**6))
    field.xaxis.set_major_formatter(FuncFormatter(lambda size, _: show_size(round(size)).replace("iB", "")))
    field.yaxis.set_major_formatter(FuncFormatter(_short_time))
    field.minorticks_off()
    field.grid(alpha=0.25, linewidth=0.5)


def _short_time(seconds: float, _: object) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.999:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds * 1e9:g} ns"
