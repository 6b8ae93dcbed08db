"""`python -m tests.torch_backend.torch_suite --device cuda`: torch's own tests on Phalanx, beside another backend.

What passes there must pass here, with the same gates lifted (see `lifted`). With `--device cuda` several ranks share
one GPU, and tests that say nothing of a device get their tensors there. Exits with 1 if a test passes on the baseline
only. The baseline begins with the tests that did not pass. With `--results FILE` a run goes on where the last one with
that file has ended, so that `--seconds` may be short.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from .runner import Order, forget, run

LOGGED = re.compile(r"^\[rank\d+\]:\S+ \S+ \d+ \S+\] ?")
"""What torch's log puts before each line of a rank."""
MEANT = {"failed", "crashed", "late"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", default="phalanx")
    parser.add_argument("--baseline", default="gloo", help="an empty name for none")
    parser.add_argument("--only", default="", help="a regular expression for the names of tests")
    parser.add_argument("--jobs", type=int, default=2, help="rows of tests at a time, each with two or four ranks")
    parser.add_argument("--row", type=int, default=8, help="tests that the same ranks do; 1 for new ranks each time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a test")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no test of a backend is begun")
    parser.add_argument("--results", help="a file for all that is found; tests that it knows are not run again")
    parser.add_argument("--again", help="a regular expression for names of tests that are run all the same")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = args.results or str(Path(folder) / "results.jsonl")
        order = Order(args.backend, args.device, results, args.only, (), args.jobs, args.limit, args.seconds, args.row)
        if args.again is not None:
            forget(results, args.again)
        return bool(_compare(order, args.baseline))


def _compare(order: Order, baseline: str) -> list[str]:
    """Runs both; returns the tests that pass on the baseline only."""
    ours = run(order)
    _tell(order.backend, ours)
    if not baseline:
        return []
    first = tuple(name for name, result in ours.items() if result["outcome"] in MEANT)
    theirs = run(order._replace(backend=baseline, first=first))
    _tell(baseline, theirs)
    passed = [name for name in ours if theirs.get(name, {}).get("outcome") == "passed"]
    worse = [name for name in passed if ours[name]["outcome"] != "passed"]
    run_on_both = f"{len(passed)} tests that pass on {baseline} were run on {order.backend}"
    print(f"{run_on_both}; not passed: {len(worse)}", *worse, sep="\n  ")
    return worse


def _tell(backend: str, results: dict[str, dict[str, Any]]) -> None:
    counts = collections.Counter(result["outcome"] for result in results.values())
    print(f"{backend}: {len(results)} tests,", ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    for name, result in sorted(results.items()):
        if result["outcome"] in MEANT:
            print(f"  {result['outcome']:8} {result['seconds']:5.1f} s  {name}: {_last_words(result['told'])}")
    sys.stdout.flush()


def _last_words(told: str) -> str:
    """The line that most likely says what went wrong."""
    lines = [LOGGED.sub("", line).strip() for line in told.splitlines() if LOGGED.sub("", line).strip()]
    errors = [line for line in lines if line.split(":")[0].split(" ")[0].endswith(("Error", "Exception"))]
    return (errors or lines or ["nothing"])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
