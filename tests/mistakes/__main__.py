"""`python -m tests.mistakes` prints every mistake with the message that it gets, for a person to judge."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mistakes.test_mistakes import everything_said


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind, (mistakes, said) in everything_said(Path(folder)).items():
            sys.stdout.write(f"# {kind}\n\n")
            for mistake in mistakes:
                program = "\n".join(f"    {line}" for line in mistake.program.splitlines())
                sys.stdout.write(f"{mistake.name}\n{program}\n{said[mistake.name].strip()}\n\n")


if __name__ == "__main__":
    main()
