"""A table of words, for `phalanx.cli.bench.show.present`."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PlainTable"]


@dataclass
class PlainTable:
    """A title, names of columns, and rows."""

    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def value(self, row: int, column: int) -> float | None:
        """None: no cell is a ratio that has a colour."""
        return None
