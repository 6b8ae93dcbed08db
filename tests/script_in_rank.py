"""A script on a rank that was forked: what it imports is in memory already, so that it starts in milliseconds."""

from __future__ import annotations

import runpy

__all__ = ["run_script"]


def run_script(path: str, *_: object) -> None:
    """Runs a script as Python would. What else is passed is there to have its package imported before the fork."""
    runpy.run_path(path, run_name="__main__")
