"""Ranks as processes: started warm, watched until the last one has ended, never left behind."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .. import background_thread
from ..deadline import Deadline
from ..errors import PhalanxError, RankFailed
from ..frames import frames_are_hidden
from ..operating_system import process_state
from ..wire import codec
from .failures import Died, RankFailure, first_cause, to_error
from .fork_server import ForkServer, borrow_fork_server
from .fork_server_process import Start
from .rank_process import HEADER, LIMITS, START, failure_from, read_exactly
from .shown_output import RankPipe, ShownOutput

__all__ = ["Manners", "run_task"]

DUMP_TIME = 5.0
"""Seconds for hung ranks to write down what they are doing, on a machine that may be busy."""
KILL_TIME = 20.0
"""Seconds for processes to end after SIGKILL."""
LOOK = 0.1
_OUR_FRAMES = (f'  File "{Path(background_thread.__file__).parent}/', '  File "<string>", line 1 in <module>')
"""The beginnings of lines about functions of Phalanx, and about the program of the fork server."""


@dataclass(frozen=True)
class Manners:
    """How ranks are brought to their end. All times are seconds."""

    notice: float = 5.0
    """For the other ranks to end by themselves once one has failed."""
    grace: float = 0.0
    """Between SIGTERM (after Ctrl-C: SIGINT) and SIGKILL; 0: SIGKILL at once."""
    exit_time: float = 0.5
    """For a rank that is done to exit."""


def run_task(
    task: bytes,
    environments: Sequence[Mapping[str, str]],
    *,
    server_environment: Mapping[str, str],
    modules: list[tuple[str, str | None]],
    deadline: Deadline,
    manners: Manners,
    may_die: Collection[int] = (),
    output: ShownOutput | None = None,
    on_exit: Callable[[int, str], None] = lambda _rank, _how: None,
) -> list[Any]:
    """Runs a task on ranks that are processes, and returns what each returned, in the order of ranks.

    Args:
        task: A `Task`, pickled.
        environments: One for each rank.
        server_environment: What modules see that are imported ahead of time.
        modules: Those modules.
        may_die: Ranks whose death is a result.
        output: Where their output goes; None: where that of this process does.
        on_exit: Called with a rank and the way it ended, unless it failed.

    Raises:
        RankFailed: A rank failed or was not done in time.
    """
    n = len(environments)
    with borrow_fork_server(server_environment, modules) as server, contextlib.ExitStack() as stack:
        if output is not None:
            stack.callback(output.close)
        stacks = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(n)]
        run = _RunningRanks(server, stacks, deadline, manners, frozenset(may_die), output, on_exit)
        try:
            for rank, environment in enumerate(environments):
                mine, its = socket.socketpair()
                stack.enter_context(mine)
                with its, _outputs(output, rank) as outputs:
                    request = Start(rank, modules, sys.path, sys.argv, os.getcwd(), dict(environment))
                    pid = server.start(request, [*outputs, its.fileno(), stacks[rank].fileno()])
                run.add(pid, mine)
            return run.run(START.pack(deadline.at, len(task)) + task)
        finally:
            run.end()


@contextlib.contextmanager
def _outputs(output: ShownOutput | None, rank: int) -> Iterator[list[int]]:
    """The standard output and error for a rank: pipes, or those of this process (a terminal, a test's capture)."""
    if output is not None:
        yield output.descriptors(rank)
        output.started(rank)
        return
    with open(os.devnull, "w") as nothing:
        found = []
        for fd in (1, 2):
            try:
                os.fstat(fd)
                found.append(fd)
            except OSError:
                found.append(nothing.fileno())
        yield found


class _RunningRanks:
    """The ranks of one call, until all have ended."""

    def __init__(
        self,
        server: ForkServer,
        stacks: Sequence[IO[bytes]],
        deadline: Deadline,
        manners: Manners,
        may_die: frozenset[int],
        output: ShownOutput | None,
        on_exit: Callable[[int, str], None],
    ) -> None:
        self._server = server
        self._stacks = stacks
        self._deadline = deadline
        self._manners = manners
        self._may_die = may_die
        self._output = output
        self._on_exit = on_exit
        self._pids: list[int] = []
        self._sockets: list[socket.socket] = []
        self._results: dict[int, Any] = {}
        self._failures: list[RankFailure] = []
        self._ended: set[int] = set()
        """Ranks that ended after they were told to: that says nothing about them."""
        self._signalled = False
        self._alive: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, None)
        for pipe in output.pipes() if output is not None else ():
            self._selector.register(pipe, selectors.EVENT_READ, pipe)

    def add(self, pid: int, sock: socket.socket) -> None:
        """Takes care of the next rank."""
        rank = len(self._pids)
        self._pids.append(pid)
        self._sockets.append(sock)
        self._alive.add(rank)
        self._selector.register(sock, selectors.EVENT_READ, rank)

    @property
    def _unsettled(self) -> set[int]:
        settled = self._results.keys() | self._ended | {failure.rank for failure in self._failures}
        return set(range(len(self._pids))) - settled

    def run(self, task: bytes) -> list[Any]:
        for sock in self._sockets:
            sock.settimeout(None if self._deadline.at == math.inf else self._deadline.remaining() + 1)
            with contextlib.suppress(OSError):  # it died already: seen below
                sock.sendall(task)
        try:
            self._wait_for_all()
        except KeyboardInterrupt:
            self._tell(signal.SIGINT, {*self._alive})
            raise
        if self._failures:
            raise to_error(first_cause(self._failures), self._failures, len(self._ended))
        if self._unsettled:
            raise self._hung(sorted(self._unsettled))
        return [self._results[rank] for rank in range(len(self._pids))]

    def _wait_for_all(self) -> None:
        limit = self._deadline
        while self._unsettled:
            self._look(min(LOOK, limit.remaining()))
            if not all(failure.mild for failure in self._failures) and limit is self._deadline:
                limit = limit.sooner(self._manners.notice)
            if limit.expired:
                if self._failures:
                    self._tell(signal.SIGTERM, self._unsettled)
                return
            self._end_stopped()

    def _tell(self, number: int, ranks: set[int]) -> None:
        """Asks ranks to end, and waits for as long as they have."""
        self._signalled = True
        limit = Deadline(self._manners.grace)
        if limit.expired:
            return
        self._server.send_signal([self._pids[rank] for rank in ranks], number)
        while ranks & self._alive and not limit.expired:
            self._look(min(LOOK, limit.remaining()))

    def end(self) -> None:
        """Kills what still runs, and waits until nothing does."""
        # A rank that is done only has to exit; one that does not is killed, too.
        limit = Deadline(self._manners.exit_time if not self._unsettled and not self._signalled else 0.0)
        try:
            while self._alive and not limit.expired:
                self._look(min(LOOK, limit.remaining()))
        finally:
            limit = Deadline(KILL_TIME)
            self._server.send_signal([self._pids[rank] for rank in self._alive], signal.SIGKILL)
            while self._alive:
                self._look(min(LOOK, limit.remaining()))
                if limit.expired:
                    self._server.close()  # takes its children with it
                    break
            self._selector.close()

    def _look(self, seconds: float) -> None:
        """Waits for output, a report or the end of a rank, and notes it."""
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, RankPipe):
                if not key.data.read():
                    self._selector.unregister(key.data)
            elif key.data is not None:
                self._read_report(key.data)
        if self._output is not None:
            self._output.show_unfinished()
        try:
            ended = self._server.ended()
        except PhalanxError:
            ended = []
            self._alive.clear()
            for rank in self._unsettled:
                self._fail(rank, "the fork server that started it is gone")
        for end in ended:
            rank = self._pids.index(end.pid)
            self._alive.discard(rank)
            self._read_report(rank)
            if rank in self._unsettled:
                self._died(rank, end.status)
            elif rank in self._results:
                self._on_exit(rank, f"exit code {os.waitstatus_to_exitcode(end.status)}")

    def _read_report(self, rank: int) -> None:
        sock = self._sockets[rank]
        if sock.fileno() not in self._selector.get_map():
            return
        try:
            if rank not in self._alive:
                sock.settimeout(0.1)  # all it had to say is here
            head_size, payload_size = HEADER.unpack(read_exactly(sock, HEADER.size))
            head = read_exactly(sock, head_size)
            plan = codec.decode_head(head, payload_bytes=payload_size, limits=LIMITS, allow_pickle=True)
            target = plan.allocate()
            view = target
            while view:
                count = sock.recv_into(view)
                if not count:
                    raise EOFError
                view = view[count:]
            kind, value = plan.build(target)
        except (EOFError, OSError):
            kind, value = "", None  # it ended before it could say how: its status will tell
        except Exception as error:
            kind, value = "unreadable", error
        self._selector.unregister(sock)
        if kind == "result":
            self._results[rank] = value
        elif kind == "unreadable":
            self._failures.append(RankFailure(rank, time.monotonic(), f"its result cannot be read here: {value}", ""))
        elif kind == "failure" and not self._signalled:
            self._failures.append(failure_from(rank, value))
        elif kind == "failure":
            self._ended.add(rank)

    def _died(self, rank: int, status: int) -> None:
        if os.WIFSIGNALED(status):
            died = Died(rank, signal=os.WTERMSIG(status))
        else:
            died = Died(rank, code=os.WEXITSTATUS(status))
        if rank in self._may_die:
            self._results[rank] = died
        elif self._signalled:
            self._ended.add(rank)
        else:
            self._fail(rank, str(died), self._stack_of(rank))

    def _fail(self, rank: int, summary: str, stack: str = "") -> None:
        self._failures.append(RankFailure(rank, time.monotonic(), summary, stack, died=True))

    def _end_stopped(self) -> None:
        """Ends ranks that were stopped on purpose, once no other is left: they would never end by themselves."""
        left = self._unsettled
        if left and left <= self._may_die and all(self._is_stopped(rank) for rank in left):
            for rank in left:
                self._results[rank] = Died(rank, stopped=True)

    def _is_stopped(self, rank: int) -> bool:
        return process_state(self._pids[rank]) in ("T", "t")

    def _hung(self, ranks: list[int]) -> RankFailed:
        limit = Deadline(DUMP_TIME)
        while not limit.expired:
            if all(self._is_stopped(rank) or self._stack_of(rank) for rank in ranks):
                break
            time.sleep(0.01)
        parts = []
        for rank in ranks:
            doing = self._stack_of(rank) or "  (it did not answer)\n"
            parts.append(f"rank {rank} is stopped\n" if self._is_stopped(rank) else f"rank {rank} was in:\n{doing}")
        stacks = "\n".join(parts)
        names = ", ".join(map(str, ranks))
        return RankFailed(f"not done within {self._deadline.seconds:g} s: ranks {names}\n\n{stacks}", ranks[0], stacks)

    def _stack_of(self, rank: int) -> str:
        file = self._stacks[rank]
        size = os.fstat(file.fileno()).st_size
        return _of_users(os.pread(file.fileno(), min(size, 1 << 20), 0).decode(errors="replace"))


def _of_users(stacks: str) -> str:
    """The stacks that `faulthandler` wrote, without Phalanx's own threads and frames."""
    if not frames_are_hidden():
        return stacks
    # The first line says that faulthandler's own time is over.
    stacks = re.sub(r"\ATimeout \([\d:.]+\)!\n", "", stacks)
    threads = [part for part in stacks.split("\n\n") if background_thread.__file__ not in part]
    return "\n\n".join(
        "\n".join(line for line in part.split("\n") if not line.startswith(_OUR_FRAMES)) for part in threads
    )
