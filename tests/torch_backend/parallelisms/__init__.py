"""Everything that torch builds on a process group, on one backend or another: `run` gives its losses and hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["run"]

ROOT = Path(__file__).resolve().parents[3]


def run(backend: str, ranks: int, *, only: str = "", without: str = "-", limit: float = 600.0) -> dict[str, list[Any]]:
    """What each part gives on each rank: a list of one result for every rank, or of an error in words.

    Args:
        only: A word that is in the names of the parts to run; all of them, if it is empty.
        without: A word that is in the names of those to leave out.
        limit: Seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.torch_backend.parallelisms.rank"]
        command += [backend, str(ranks), only, without, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        words = Path(folder) / "words"  # torch warns of much
        with words.open("w") as out:
            processes = [
                subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=out, stderr=out)
                for rank in range(ranks)
            ]
            try:
                codes = [process.wait(limit) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        assert codes == [0] * ranks, f"the ranks ended with {codes}:\n{words.read_text()}"
        everyone = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {part: [found[part] for found in everyone] for part in everyone[0]}
