"""One parser under atheris: `python -m tests.soak.fuzz_atheris PARSER RUNS FOLDER REPORT`; see `tests.soak.fuzz`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["phalanx"]):
    from tests.soak.fuzz_targets import TARGETS, warm_up


def main() -> None:
    """Runs until the number of runs is reached or an input fails; libFuzzer then ends the process."""
    name, runs, folder, report = sys.argv[1:]
    target = TARGETS[name]
    warm_up(target)
    outcomes: Counter[str] = Counter()

    def one(data: bytes) -> None:
        try:
            target.parse(data)
            outcomes["accepted"] += 1
        except target.errors as error:
            outcomes[type(error).__name__] += 1
        calls = outcomes.total()
        if calls % 100 == 0 or calls >= int(runs):  # libFuzzer ends the process without a word to Python
            Path(report).write_text(json.dumps(outcomes))

    flags = [f"-runs={runs}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *flags, folder], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
