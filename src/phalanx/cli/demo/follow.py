"""Reads the events that rank 0 appends to a file, while it does so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from .report import Outcome, TrainingStep

__all__ = ["follow"]

_PAUSE = 0.05


def follow(path: Path, progress: Callable[[TrainingStep], None], *, running: Callable[[], bool]) -> Outcome | None:
    """Calls `progress` for each step until the outcome is there. None if the job ended without one.

    Args:
        path: The file; it need not exist yet.
        progress: Hears of each step.
        running: Whether the job that writes the file still runs.
    """
    seen = 0
    rest = b""
    while True:
        alive = running()  # before reading, so that what a job wrote last is not missed
        if path.exists():
            with path.open("rb") as file:
                file.seek(seen)
                fresh = file.read()
            seen += len(fresh)
            *lines, rest = (rest + fresh).split(b"\n")  # a line may be half written
            for line in lines:
                event = json.loads(line)
                if "accuracy" in event:
                    return Outcome(**event)
                progress(TrainingStep(**event))
        if not alive:
            return None
        time.sleep(_PAUSE)
