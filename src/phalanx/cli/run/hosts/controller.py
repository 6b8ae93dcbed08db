"""Runs one job on several hosts from here: starts a node on each, shows what all of them write, and ends all together.

One thread. The job begins once every host has answered; from then on the nodes decide by themselves, over the
directory on the first of them, who failed, and tell it here. What this process adds: signals reach all hosts, a host
that is lost ends the others, and there is one verdict.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import selectors
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import phalanx
from phalanx.errors import ConfigError
from phalanx.launching.lines import LineOutput, LineStream

from ..events import LauncherMailbox, Signals, logs_to
from ..report import victims_line
from ..verdict import BROKEN_PIPE
from ..writer import OutputWriter
from .connection import Connection, is_local
from .explain import why_no_hello
from .hostfile import Host
from .messages import Message, NodeEnd, NodeEnding, NodeError, NodeHello, NodeJob, NodeView
from .views import HostsViews

__all__ = ["HostsPlan", "run_on_hosts"]

ANSWER = 45.0
"""Seconds that a host has for its first word: ssh's own limit, and the start of Python from a slow disk."""
TOGETHER = 1.0
"""Seconds after the first host that did not come up, in which others may show that they do not either."""
PATIENCE = 5.0
"""Seconds, beyond the grace period, that a host has to end its ranks after it was told or another host has ended."""
FLUSH = 0.5
"""Seconds that a job that was told to end waits for its output to be read."""


@dataclass(frozen=True, kw_only=True)
class HostsPlan:
    """A job, and the hosts that it runs on."""

    hosts: Sequence[Host]
    layout: tuple[int, ...]
    """The ranks of each host."""
    job: NodeJob
    """The job as the first node sees it, but for what is known only once the hosts have answered."""
    master: tuple[str, int] | None
    """Where the ranks meet, if the user says so."""
    directory_port: int | None
    ssh: Sequence[str]
    python: str
    colour: bool
    page: bool = False
    trace: Path | None = None
    metrics: Path | None = None


class _Node:
    """One host, and what is known of it."""

    def __init__(self, host: Host, connection: Connection, out: LineStream, err: LineStream) -> None:
        self.host = host
        self.connection = connection
        self.streams = {connection.stdout: out, connection.stderr: err}
        self.hello: NodeHello | None = None
        self.end: NodeEnd | None = None
        self.error = ""
        self.given_up = False

    @property
    def open(self) -> bool:
        """False once the process has ended and all that it wrote was read."""
        return bool(self.connection.reading) or self.connection.code is None


def run_on_hosts(plan: HostsPlan) -> int:
    """Runs the job until its end on all hosts; returns the exit code.

    Raises:
        ConfigError: A host did not come up, the hosts cannot work together, or the job cannot be shown as it should.
    """
    with contextlib.ExitStack() as stack:
        mailbox = LauncherMailbox()
        stack.callback(mailbox.close)
        signals = stack.enter_context(Signals.caught(mailbox))
        stack.enter_context(logs_to(mailbox))
        writer = OutputWriter(mailbox.wake)
        stack.callback(writer.close)
        return stack.enter_context(_controller(plan, mailbox, signals, writer)).run()


@contextlib.contextmanager
def _controller(
    plan: HostsPlan, mailbox: LauncherMailbox, signals: Signals, writer: OutputWriter
) -> Iterator[_Controller]:
    controller = _Controller(plan, mailbox, signals, writer)
    try:
        yield controller
    finally:
        controller.close()


class _Controller:
    def __init__(self, plan: HostsPlan, mailbox: LauncherMailbox, signals: Signals, writer: OutputWriter) -> None:
        self._plan = plan
        self._mailbox = mailbox
        self._signals = signals
        self._writer = writer
        self._selector = selectors.DefaultSelector()
        self._selector.register(mailbox.descriptor, selectors.EVENT_READ, None)
        self._reading: set[int] = set()
        self._nodes: list[_Node] = []
        self._began = False
        """The job was sent to the hosts."""
        self._signal = 0
        self._output_closed = False
        self._announced = False
        self._give_up_at = math.inf
        """When hosts that have still not ended are left to themselves."""
        self._answer_until = time.monotonic() + ANSWER
        self._lost: list[str] = []
        self._err = self._screen(2)
        out = self._err if os.path.sameopenfile(1, 2) else self._screen(1)
        self._out = out
        self._how = ""
        """A few words on what was wrong with the job."""
        # A job of one rank waits for nobody: its node says that there is nothing to show.
        wanted = (plan.page, plan.trace, plan.metrics) if sum(plan.layout) > 1 else (False, None, None)
        self._views = HostsViews(*wanted, self._err.say)

    def _screen(self, descriptor: int) -> LineOutput:
        terminal = os.isatty(descriptor)
        colour = self._plan.colour and terminal
        return LineOutput(lambda data: self._writer.put(descriptor, data), terminal=terminal, colour=colour)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Runs until all hosts are done."""
        for host in self._plan.hosts:
            connection = Connection(host, ssh=self._plan.ssh, python=self._plan.python)
            node = _Node(host, connection, LineStream(self._out, b""), LineStream(self._err, b""))
            self._nodes.append(node)
        while any(node.open and not node.given_up for node in self._nodes):
            self._wait()
            now = time.monotonic()
            self._take_signals(now)
            self._take_notes()
            if self._writer.failures() and not self._output_closed:
                self._output_closed = True
                self._tell_all(signal.SIGTERM, now)
            if not self._began and not self._greet(now):
                break
            self._look_for_losses(now)
            if now >= self._give_up_at:
                self._give_up()
        return self._conclude()

    def _wait(self) -> None:
        """Waits for the next event, and reads what the hosts wrote."""
        by_descriptor = {d: node for node in self._nodes if not node.given_up for d in node.connection.reading}
        wanted = set() if self._writer.full else set(by_descriptor)
        for descriptor in self._reading - wanted:
            self._selector.unregister(descriptor)
        for descriptor in wanted - self._reading:
            self._selector.register(descriptor, selectors.EVENT_READ, descriptor)
        self._reading = wanted
        streams = [stream for node in self._nodes for stream in node.streams.values()]
        wake_at = min(self._give_up_at, math.inf if self._began else self._answer_until)
        wake_at = min(wake_at, *(stream.due() for stream in streams))
        # A process that has ended may have left its outputs to another, and then no event tells of its end.
        ready = self._selector.select(max(0.0, min(wake_at - time.monotonic(), 1.0)))
        now = time.monotonic()
        for key, _ in ready:
            if key.data is None:
                self._mailbox.clear()
                continue
            node, stream = by_descriptor[key.data], by_descriptor[key.data].streams[key.data]
            for message in node.connection.read(key.data, lambda data, to=stream: to.feed(data, now)):  # type: ignore[misc]
                self._hear(node, message, now)
            if key.data not in node.connection.reading:
                stream.finish()
        for stream in streams:
            if stream.due() <= now:
                stream.flush(now)

    def _hear(self, node: _Node, message: Message, now: float) -> None:
        if isinstance(message, NodeHello):
            node.hello = message
        elif isinstance(message, NodeError):
            node.error = message.text
            self._tell_others(node, now)
        elif isinstance(message, NodeEnding):
            if not self._announced:
                self._announced = True
                self._say(f"{message.why}; ending all ranks")
        elif isinstance(message, NodeEnd):
            node.end = message
            if message.failed:  # the others hear of it from the directory
                self._give_up_after(now)
        elif isinstance(message, NodeView):
            self._views.take(message)

    # -- the beginning -----------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> bool:
        """Sends the job once all hosts have answered. False if one did not come up: then its error is in `_lost`."""
        if self._signal:
            return False
        failed = [node for node in self._nodes if node.hello is None and not node.open]
        if failed:
            self._answer_until = min(self._answer_until, now + TOGETHER)
        silent = [node for node in self._nodes if node.hello is None and node not in failed]
        if now >= self._answer_until or (failed and not silent):
            if not failed:
                failed = silent
            self._lost += [self._why(node) for node in failed]
            return False
        if failed or silent:
            return True
        problem = self._other_versions()
        if problem:
            self._lost.append(problem)
            return False
        self._begin()
        return True

    def _why(self, node: _Node) -> str:
        return why_no_hello(
            node.host.name,
            code=None if node.open else node.connection.code,
            said=node.connection.early.decode("utf-8", "backslashreplace"),
            python=self._plan.python,
            command=shlex.join(self._plan.ssh),
        )

    def _other_versions(self) -> str:
        here = f"{phalanx.__version__}"
        others = [
            f"host {node.host.name} has {node.hello.version}"
            for node in self._nodes
            if node.hello is not None and node.hello.version != here
        ]
        return f"here is Phalanx {here}, but {', '.join(others)} (install the same on all)" if others else ""

    def _begin(self) -> None:
        host, port, directory = self._meeting_point()
        for number, node in enumerate(self._nodes):
            fields = {**vars(self._plan.job), "node": number, "master": (host, port), "directory_port": directory}
            if number:
                fields["relayed"] = ()
            node.connection.send(NodeJob(**fields))
        self._began = True

    def _meeting_point(self) -> tuple[str, int, int]:
        """The first host as the others find it, the port for the script, and the directory's.

        Raises:
            ConfigError: The others cannot find the first host.
        """
        first = self._nodes[0]
        assert first.hello is not None
        port, directory = first.hello.ports
        if self._plan.master is not None:
            name, port = self._plan.master
        elif is_local(first.host):
            name = first.host.address
        else:
            name = first.hello.address or first.host.address
        elsewhere = [node.host.name for node in self._nodes[1:] if not self._on_this_machine(node)]
        if _is_loopback(name) and elsewhere:
            raise ConfigError(
                f"the first host is called {name}, where {elsewhere[0]} would look for itself (write the name or "
                "address by which the others reach it, in the list of hosts or as --master HOST:PORT)"
            )
        return name, port, self._plan.directory_port or directory

    @staticmethod
    def _on_this_machine(node: _Node) -> bool:
        return is_local(node.host) or (node.hello is not None and _is_loopback(node.hello.address))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _take_signals(self, now: float) -> None:
        while self._signals.arrived:
            number = self._signals.arrived.popleft()
            if number in Signals.FORWARDED:
                for node in self._nodes:
                    node.connection.send_signal(number)
                continue
            if not self._signal:
                self._signal = number
                if not self._announced:
                    self._announced = True
                    self._say(f"got {signal.Signals(number).name}; ending all ranks")
            self._tell_all(number, now)

    def _tell_all(self, number: int, now: float, *, but: _Node | None = None) -> None:
        for node in self._nodes:
            if node is not but:
                node.connection.send_signal(number)
        self._give_up_after(now)

    def _tell_others(self, node: _Node, now: float) -> None:
        self._tell_all(signal.SIGTERM, now, but=node)

    def _give_up_after(self, now: float) -> None:
        self._give_up_at = min(self._give_up_at, now + self._plan.job.grace + PATIENCE)

    def _look_for_losses(self, now: float) -> None:
        if not self._began:
            return
        for node in self._nodes:
            if not node.open and node.end is None and not node.error and not node.given_up:
                node.given_up = True
                code = node.connection.code
                self._lost.append(f"host {node.host.name} was lost: its connection ended (exit code {code})")
                if not self._announced:
                    self._announced = True
                    self._say(f"host {node.host.name} was lost; ending all ranks")
                self._tell_others(node, now)

    def _give_up(self) -> None:
        """Leaves those that did not end to themselves: without their input they end, if they are still there."""
        for node in self._nodes:
            if node.open and not node.given_up:
                node.given_up = True
                node.connection.end()
                if node.end is None and not self._signal:
                    self._lost.append(f"host {node.host.name} was lost: nothing was heard of it any more")

    def _conclude(self) -> int:
        for node in self._nodes:
            for stream in node.streams.values():
                stream.finish()
        code = self._verdict()
        self._views.close(self._how)
        self._take_notes()
        until = time.monotonic() + FLUSH if self._signal or self._output_closed else math.inf
        while not self._writer.drained(0.05) and time.monotonic() < until and not self._signals.told_to_end:
            pass
        return code

    def _verdict(self) -> int:
        """Says how the job ended; returns the exit code."""
        if self._output_closed:
            self._how = "its output was closed"
            return BROKEN_PIPE
        if self._signal:
            self._how = f"it was ended by {signal.Signals(self._signal).name}"
            return 128 + self._signal
        errors = _grouped([(node.host.name, node.error) for node in self._nodes if node.error])
        ends = [node.end for node in self._nodes if node.end is not None]
        failures = [end for end in ends if end.failed]
        # The first node hears the directory's own verdict. The report with all details is that of the rank's own node.
        blamed = [end.blamed for end in failures if end.blamed is not None]
        known = next((end for rank in blamed for end in failures if end.own == rank), None)
        if known is None and (errors or self._lost):
            self._how = (errors or self._lost)[0]
            for text in errors or self._lost:
                self._say(text)
            return 1
        if not failures:
            return max((end.code for end in ends), default=1)
        chosen = known or failures[0]
        self._how = chosen.headline
        same = sorted(rank for end in failures for rank in end.same)
        line = victims_line(same, sum(end.because for end in failures))
        self._err.say(f"{chosen.report}\n{line}" if line else chosen.report)
        return chosen.code

    def _take_notes(self) -> None:
        while self._mailbox.notes:
            self._err.say(self._mailbox.notes.popleft())

    def _say(self, text: str) -> None:
        self._err.say(f"phalanx: {text}")

    def close(self) -> None:
        """Ends every connection, and what shows the job."""
        self._selector.close()
        self._views.close(self._how)
        for node in self._nodes:
            node.connection.hang_up()
        for node in self._nodes:
            node.connection.close(0.0 if node.given_up else PATIENCE)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _grouped(errors: Sequence[tuple[str, str]]) -> list[str]:
    """Each text once, with the hosts that it came from."""
    hosts: dict[str, list[str]] = {}
    for host, text in errors:
        hosts.setdefault(text, []).append(host)
    return [f"{', '.join(names)}: {text}" for text, names in hosts.items()]
