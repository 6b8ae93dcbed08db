"""Types command lines that are wrong, and prints what was said: `commands.py`."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys

from tests.mistakes.mistakes import COMMANDS

from phalanx.cli import main


def said(line: str) -> str:
    """What `phalanx LINE` says."""
    words = io.StringIO()
    with contextlib.redirect_stderr(words), contextlib.suppress(SystemExit):
        main(shlex.split(line))
    return words.getvalue()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({mistake.name: said(mistake.program) for mistake in COMMANDS}))
