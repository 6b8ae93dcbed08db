"""A process that has imported everything and forks ranks from there: a start costs milliseconds, not half a second.

It has no thread and no world of its own when it forks, so a rank begins as a fresh interpreter would.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any


class Zygote:
    """The parent's side: asks for ranks, and for their exit codes."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.chaos_zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._ask({"command": "hello"})

    def start(self, configs: list[dict[str, Any]]) -> list[int]:
        """Forks one rank for each config; returns their process numbers."""
        pids: list[int] = self._ask({"command": "start", "configs": configs})
        return pids

    def reap(self, pids: list[int], limit: float) -> list[int | None]:
        """Waits for the end of ranks; returns their exit codes, None for one that still runs."""
        codes: list[int | None] = self._ask({"command": "reap", "pids": pids, "limit": limit})
        return codes

    def close(self) -> None:
        """Ends the zygote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the zygote ended with code {self._process.wait()}")
        return json.loads(answer)


def serve() -> None:
    """The zygote's side."""
    from tests.soak import chaos_rank

    logging.getLogger("phalanx").setLevel(logging.ERROR)
    gc.freeze()  # what is here now is shared with the children, and none of their garbage
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        if question["command"] == "start":
            answer = [_fork(chaos_rank, config) for config in question["configs"]]
        elif question["command"] == "reap":
            answer = _reap(question["pids"], question["limit"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _fork(chaos_rank: Any, config: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The pipes to the parent are the zygote's.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        chaos_rank.run(config)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        os._exit(code)


def _reap(pids: list[int], limit: float) -> list[int | None]:
    codes: dict[int, int] = {}
    end = time.monotonic() + limit
    while True:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if len(codes) == len(pids) or time.monotonic() > end:
            return [codes.get(pid) for pid in pids]
        time.sleep(0.002)


if __name__ == "__main__":
    serve()
