"""Ranks that are forked from a process which has imported everything: a start costs milliseconds of a processor.

The server has no thread and no world. A forked rank leaves the server's code and runs its script as the main program,
so that it ends as every interpreter does: by the hook for exceptions, `atexit`, and the wait for its threads.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import IO, Any

LONGEST = 1 << 20


class ForkServer:
    """The test's side: asks for ranks, and for their exit codes."""

    def __init__(self, environment: dict[str, str]) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment
            )
        self._sock = mine
        atexit.register(self.close)

    def start(self, script: Path, environment: dict[str, str], errors: IO[bytes]) -> Forked:
        """Forks a rank that runs a script."""
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        try:
            request = json.dumps({"script": str(script), "environment": environment}).encode()
            socket.send_fds(self._sock, [request], [to_read, from_write, errors.fileno()])
            pid = json.loads(self._sock.recv(LONGEST))
        finally:
            os.close(to_read)
            os.close(from_write)
        return Forked(self, pid, open(to_write, "wb"), open(from_read, "rb"))

    def reap(self, pid: int) -> int | None:
        """The exit code of a rank; None while it runs."""
        self._sock.send(json.dumps({"reap": pid}).encode())
        code: int | None = json.loads(self._sock.recv(LONGEST))
        return code

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


class Forked:
    """What `subprocess.Popen` would be for a rank of the server."""

    def __init__(self, server: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._server = server
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.reap(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            ended = os.pidfd_open(self.pid)
            try:
                select.select([ended], [], [], timeout)
            finally:
                os.close(ended)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve(sock: socket.socket) -> Any:
    """Forks and reaps ranks; returns in each of them, with what was asked for."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, LONGEST, 3)
        if not data:
            sys.exit(0)  # the tests have ended
        request = json.loads(data)
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                sock.close()
                os.setpgid(0, 0)  # what it starts and leaves behind can be told by that
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                    os.close(fd)
                return request
            with contextlib.suppress(OSError):
                os.setpgid(answer, answer)
            for fd in fds:
                os.close(fd)
        sock.send(json.dumps(answer).encode())


def _main_module(path: str) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv = [path]
    return module.__dict__


if __name__ == "__main__":
    import inside  # type: ignore[import-not-found]  # noqa: F401 - the folder of the tests is on the path

    import phalanx.testing
    import phalanx.world  # noqa: F401
    from phalanx.config import adopt

    gc.collect()
    gc.freeze()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    adopt(asked["environment"])
    exec(compile(Path(asked["script"]).read_bytes(), asked["script"], "exec"), _main_module(asked["script"]))
