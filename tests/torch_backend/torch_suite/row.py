"""Several tests one after another in the same ranks: a process's first use of a GPU takes longer than most tests.

Each test makes a process group of its own. What else a test may leave behind is put back: the environment, torch's
defaults. A row ends with the first test that does not pass; the runner has that one done again, alone.
"""

from __future__ import annotations

import gc
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

__all__ = ["done_mark", "run_row", "write_to"]


def run_row(suite: Any, names: list[str], ranks: int, folder: Path) -> None:
    """Starts the ranks, and returns when all of them have ended, or one has ended badly."""
    suite.prepare_row()
    living = {_fork(suite, rank, names, folder) for rank in range(ranks)}
    while living:
        pid, status = os.wait()
        living.discard(pid)
        if status:
            return


def done_mark(folder: Path, name: str, rank: int) -> Path:
    """The file that says that a rank has passed a test."""
    return folder / f"{name}.{rank}.done"


def write_to(path: Path) -> None:
    """Has this process write all that it says to the end of a file."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)


def _fork(suite: Any, rank: int, names: list[str], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _run_tests(suite, rank, names, folder)
    finally:
        os._exit(code)


def _run_tests(suite: Any, rank: int, names: list[str], folder: Path) -> int:
    environment = dict(os.environ)
    for name in names:
        write_to(folder / f"{name}.told")
        _, pipe = torch.multiprocessing.Pipe()
        try:
            suite._run(rank, name, str(folder / f"{name}.store"), pipe)
        except SystemExit as ended:
            if ended.code:
                return 1
        except BaseException:
            traceback.print_exc()
            return 1
        done_mark(folder, name, rank).touch()
        _put_back(environment)
    return 0


def _put_back(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    gc.collect()
