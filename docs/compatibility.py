"""The table of docs/compatibility.md: with which Python, torch and platform Phalanx was tested.

Runs of the tests leave a record each in `build/tested` (`tests/record.py`). This takes them into
`docs/compatibility.json`, which is kept, and writes the page anew:

    python -m docs.compatibility

A run in which a test failed is not taken. Of the same part on the same machine with the same versions the newest run
counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
KEPT = DOCS / "compatibility.json"
RECORDS = DOCS.parent / "build" / "tested"
PARTS = {"whole": "all tests", "torch": "the plug-in for torch", "some of torch": "a part of the plug-in"}
"""Parts of the suite in the words of the page, the largest first."""

Run = dict[str, Any]


def kept() -> list[Run]:
    runs: list[Run] = json.loads(KEPT.read_text(encoding="utf-8"))
    return runs


def take(runs: list[Run], new: list[Run]) -> list[Run]:
    """The runs with the new ones in their places, in the order of the page."""
    found = {_key(run): run for run in runs}
    found.update({_key(run): run for run in new if not run["failed"]})
    return sorted(found.values(), key=lambda run: (_numbers(run["python"]), run["platform"], _numbers(run["torch"])))


def _key(run: Run) -> tuple[str, ...]:
    return run["part"], _minor(run["python"]), run["torch"], run["platform"].split(",")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def table() -> str:
    """The page's table: a line for each Python, platform and torch."""
    rows = [
        "| Python | platform | torch | tested | passed | skipped | on |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for run in kept():
        skipped = "" if run["skipped"] is None else f"{run['skipped']:,}"
        cells = [run["python"], run["platform"], run["torch"] or "none", PARTS[run["part"]], f"{run['passed']:,}"]
        rows.append("| " + " | ".join([*cells, skipped, run["date"]]) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    new = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    runs = take(kept(), new)
    KEPT.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    for run in new:
        if run["failed"]:
            sys.stdout.write(f"not taken: {run['part']} on Python {run['python']}: {run['failed']} failed\n")


if __name__ == "__main__":
    main()
