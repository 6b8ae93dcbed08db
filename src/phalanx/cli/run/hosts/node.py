"""The launcher on one host of a job on several: `python -m phalanx.cli.run.hosts.node`, started by the controller.

The job comes on standard input, so that the token is on no command line. The end of the input means that the controller
or its ssh is gone: then everything here is ended.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from dataclasses import replace
from pathlib import Path

import phalanx
from phalanx import config
from phalanx.background_thread import BackgroundThread
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launching.environment import reserve_port
from phalanx.launching.lines import LineOutput
from phalanx.types import Address

from ..events import LauncherMailbox, Signals
from ..launcher import launch
from ..plan import RunPlan
from ..verdict import Verdict
from ..writer import OutputWriter
from .messages import MARK, Message, NodeEnd, NodeEnding, NodeError, NodeHello, NodeJob, NodeView, decode, encode

__all__ = ["main"]


class Controller:
    """The controller at the other end of this process's standard input and error; an `Upstream`.

    Args:
        descriptor: A copy of the standard input.
        rest: Bytes behind the job that were read with it.
    """

    def __init__(self, descriptor: int, rest: bytes, *, colour: bool) -> None:
        self._descriptor = descriptor
        self._rest = rest
        self.colour = colour
        self._screen: LineOutput | None = None
        self._writer: OutputWriter | None = None

    def attach(self, screen: LineOutput, signals: Signals, mailbox: LauncherMailbox, writer: OutputWriter) -> None:
        """Begins to listen, in a thread."""
        self._screen = screen
        self._writer = writer

        def listen() -> None:
            waiting = self._rest
            while True:
                *lines, waiting = waiting.split(b"\n")
                for line in lines:
                    word, _, number = line.partition(b" ")
                    if word == b"signal" and number.isdigit():
                        signals.arrived.append(int(number))
                        mailbox.wake()
                data = os.read(self._descriptor, 4096)
                if not data:
                    signals.arrived.append(signal.SIGHUP)
                    mailbox.wake()
                    return
                waiting += data

        BackgroundThread(listen, "phalanx-controller").start()

    def ending(self, why: str) -> None:
        """Tells that the ranks are being ended."""
        self._tell(NodeEnding(why=why))

    def concluded(self, verdict: Verdict) -> None:
        """Tells the verdict."""
        blamed, suspect = verdict.blamed, verdict.suspect
        verdict = verdict if suspect is None else verdict.blaming(suspect)
        same, because = verdict.victims
        self._tell(
            NodeEnd(
                code=verdict.exit_code,
                failed=verdict.failed,
                blamed=blamed,
                own=None if suspect is None else suspect.rank,
                report=verdict.report(colour=self.colour, end="") if verdict.failed else "",
                same=tuple(same),
                because=because,
                headline=verdict.headline,
            )
        )

    @property
    def busy(self) -> bool:
        """True while the controller does not keep up with what is written here."""
        assert self._writer is not None
        return self._writer.full

    def show(self, what: str, data: bytes) -> None:
        """Hands over what is to be shown. It may come in the middle of a rank's line: the mark says where it begins."""
        assert self._writer is not None
        self._writer.put(2, MARK + encode(NodeView.of(what, data)))

    def _tell(self, message: Message) -> None:
        assert self._screen is not None
        self._screen.write(MARK + encode(message))


def main() -> int:
    """Runs one node's part of a job; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the launcher catches them, without a traceback
        signal.signal(number, signal.SIG_DFL)
    base = config.inherited()
    _say(_hello(base))
    # The ranks must not read what is meant for this process.
    stdin = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    line, rest = _read_line(stdin)
    if not line:
        return 1  # the controller has gone, or another host did not come up
    try:
        job = decode(line)
        assert isinstance(job, NodeJob)
        base = {**base, **job.variables}
        plan = _plan(job)
        return launch(
            plan,
            base=base,
            options=config.Options.from_env(base),
            colour=job.colour,
            upstream=Controller(stdin, rest, colour=job.colour),
        )
    except (PhalanxError, ValueError) as error:
        _say(NodeError(text=str(error)))
        return 1


def _hello(base: dict[str, str]) -> NodeHello:
    with reserve_port() as first, reserve_port() as second:
        ports = first, second
    # "client's address, its port, this host's address, its port", as sshd says.
    connection = base.get("SSH_CONNECTION", "").split()
    return NodeHello(
        version=phalanx.__version__,
        python=platform.python_version(),
        hostname=platform.node(),
        address=connection[2] if len(connection) == 4 else "",
        ports=ports,
    )


def _plan(job: NodeJob) -> RunPlan:
    """The job as a plan.

    Raises:
        ConfigError: Something that it needs is not on this host.
    """
    try:
        os.chdir(job.folder)
    except OSError as error:
        raise ConfigError(
            f"the folder {job.folder!r}, where the job was started, is not there: {error.strerror} (start it in a "
            "folder that all hosts have)"
        ) from None
    plan = RunPlan(
        target=job.target,
        arguments=job.arguments,
        module=job.module,
        python=job.python,
        ranks=job.layout[job.node],
        nodes=len(job.layout),
        node=job.node,
        layout=job.layout,
        names=job.names,
        master=Address(*job.master),
        directory_port=job.directory_port,
        token=job.token.encode("utf-8", "surrogateescape"),
        log_dir=None if job.log_dir is None else Path(job.log_dir),
        grace=job.grace,
        prefix=job.prefix,
        extra=job.extra,
        relayed=job.relayed,
    )
    return replace(plan, directory_port=None) if plan.nodes == 1 else plan


def _read_line(descriptor: int) -> tuple[bytes, bytes]:
    """The first line of the input, and what came with it; nothing if it ends before."""
    data = b""
    while b"\n" not in data:
        more = os.read(descriptor, 1 << 16)
        if not more:
            return b"", b""
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


def _say(message: Message) -> None:
    sys.stderr.flush()
    os.write(2, MARK + encode(message))


if __name__ == "__main__":
    sys.exit(main())
