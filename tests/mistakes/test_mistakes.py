"""Every mistake in the list is made, on the real thing, and every message has the words that help.

It is one test, because most mistakes share a few processes. It names all messages that have changed for the worse. The
page docs/troubleshooting.md is held to the same messages.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.launchers.processes import clean_environment
from tests.mistakes.mistakes import ALONE, CALLS, COMMANDS, JOBS, Mistake

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "troubleshooting.md"
LIMIT = 120.0
PHALANX = [sys.executable, "-m", "phalanx"]


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT), "PHALANX_TUNING": "off", **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def said_by_calls(folder: Path) -> dict[str, str]:
    """What both ranks of one world were told."""
    command = [*PHALANX, "run", "-n", "2", str(HERE / "in_world.py"), str(folder / "said")]
    done = run(command, folder, PHALANX_MAX_OBJECT="1MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks: list[dict[str, str]] = json.loads((folder / "said").read_text())
    return {mistake.name: "\n".join(rank[mistake.name] for rank in ranks) for mistake in CALLS}


def said_alone(folder: Path) -> dict[str, str]:
    """What a process without a launcher was told."""
    done = run([sys.executable, str(HERE / "alone.py")], folder)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    return said


def said_by_job(mistake: Mistake, folder: Path) -> str:
    """What the launcher says of a script."""
    folder.mkdir()
    (folder / "script.py").write_text(mistake.program + "\n")
    done = run([*PHALANX, "run", "-n", "2", "script.py"], folder)
    assert done.returncode != 0, mistake.name
    return done.stderr


def said_by_commands(folder: Path) -> dict[str, str]:
    """What the command line says, in one process for all."""
    (folder / "folder").mkdir()
    (folder / "script.py").write_text("")
    done = run([sys.executable, str(HERE / "commands.py")], folder)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    return said


def complaints(kind: str, mistakes: list[Mistake], said: Mapping[str, str]) -> list[str]:
    """The mistakes whose messages lack something."""
    found = []
    for mistake in mistakes:
        text = said[mistake.name]
        missing = [word for word in mistake.words if word not in text]
        if "src/phalanx/" in text or "site-packages/phalanx/" in text:
            missing.append("no line of Phalanx itself")
        if kind in ("calls", "alone") and text and "Traceback" in text and 'File "mistake.py", line' not in text:
            missing.append("the user's line")
        if missing:
            found.append(f"{kind}: {mistake.name}: {missing} not in:\n{text}")
    return found


def promised(page: str) -> list[str]:
    """The messages that the page shows, `…` for what differs from case to case."""
    blocks = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def everything_said(folder: Path) -> dict[str, tuple[list[Mistake], dict[str, str]]]:
    """Makes all mistakes: for each kind, the list and what was said."""
    with ThreadPoolExecutor(min(3, (os.cpu_count() or 1) + 1)) as pool:
        calls = pool.submit(said_by_calls, folder)
        alone = pool.submit(said_alone, folder)
        jobs = {
            mistake.name: pool.submit(said_by_job, mistake, folder / f"job-{number}")
            for number, mistake in enumerate(JOBS)
        }
        commands = pool.submit(said_by_commands, folder)
        return {
            "calls": (CALLS, calls.result()),
            "alone": (ALONE, alone.result()),
            "jobs": (JOBS, {name: job.result() for name, job in jobs.items()}),
            "commands": (COMMANDS, commands.result()),
        }


def test_every_mistake_has_a_message_that_helps(tmp_path: Path) -> None:
    said = everything_said(tmp_path)
    assert sum(len(mistakes) for mistakes, _ in said.values()) >= 50
    wrong = [text for kind, (mistakes, texts) in said.items() for text in complaints(kind, mistakes, texts)]
    everything = "\n".join(text for _, texts in said.values() for text in texts.values())
    for line in promised(PAGE.read_text(encoding="utf-8")):
        pattern = ".*".join(re.escape(part) for part in line.strip().split("…"))
        if re.search(pattern, everything) is None:
            wrong.append(f"{PAGE.name} shows what nobody says: {line}")
    assert not wrong, "\n\n".join(wrong)
