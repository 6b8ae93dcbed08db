"""Ranks as processes: started warm, watched until the last one has ended, never left behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any

from ..config import Options, inherited
from ..deadline import Deadline
from ..errors import PhalanxError, UsageError
from ..operating_system import process_state
from ..wire import codec
from . import shipping
from .failures import Died, RankFailed, RankFailure, first_cause, to_error
from .fork_server import ForkServer, borrow_fork_server
from .fork_server_process import Start
from .rank_process import HEADER, LIMITS, START, Task, error_from, read_exactly
from .worlds import Factory, meeting_place

__all__ = ["run_processes"]

GRACE = 5.0
"""Seconds the other ranks have to end once one has failed."""
DUMP_TIME = 2.0
"""Seconds for hung ranks to write down what they are doing."""
KILL_TIME = 20.0
"""Seconds for processes to end after SIGKILL."""
LOOK = 0.1
MOST = 120
"""Ranks at once: as many descriptors as one message can carry."""


def run_processes(
    n: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    backend: str | Factory,
    timeout: float,
    patience: float,
    options: Options | None,
    env: Mapping[str, str] | None,
    may_die: Collection[int],
) -> list[Any]:
    """`run_ranks` for ranks that are processes; see there."""
    if n > MOST:
        raise UsageError(f"n={n} is too many (at most {MOST} processes can be run at once)")
    deadline = Deadline(timeout)
    environment = inherited() | dict(env or {})
    modules = shipping.modules_of(fn)
    with meeting_place(backend, n, options) as place:
        task = shipping.dumps(Task(place, patience, fn, args))
        with borrow_fork_server(environment, modules) as server, contextlib.ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(n)]
            for mine, its in pairs:
                stack.enter_context(mine)
                stack.enter_context(its)
            stacks = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(n)]
            fds = [fd for (_, its), file in zip(pairs, stacks, strict=True) for fd in (its.fileno(), file.fileno())]
            request = Start(n, modules, sys.path, os.getcwd(), environment)
            with _outputs() as outputs:
                pids = server.start(request, [*outputs, *fds])
            for _, its in pairs:
                its.close()
            run = _RunningRanks(server, pids, [mine for mine, _ in pairs], stacks, deadline, frozenset(may_die))
            try:
                return run.run(START.pack(deadline.at, len(task)) + task)
            finally:
                run.end()


@contextlib.contextmanager
def _outputs() -> Iterator[list[int]]:
    """The current standard output and error of this process, be it a terminal or a test's capture."""
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
        pids: list[int],
        sockets: list[socket.socket],
        stacks: Sequence[IO[bytes]],
        deadline: Deadline,
        may_die: frozenset[int],
    ) -> None:
        self._server = server
        self._pids = pids
        self._sockets = sockets
        self._stacks = stacks
        self._deadline = deadline
        self._may_die = may_die
        self._results: dict[int, Any] = {}
        self._failures: list[RankFailure] = []
        self._alive = set(range(len(pids)))
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ, None)
        for rank, sock in enumerate(sockets):
            self._selector.register(sock, selectors.EVENT_READ, rank)

    @property
    def _unsettled(self) -> set[int]:
        return set(range(len(self._pids))) - self._results.keys() - {failure.rank for failure in self._failures}

    def run(self, task: bytes) -> list[Any]:
        for sock in self._sockets:
            sock.settimeout(self._deadline.remaining() + 1)
            with contextlib.suppress(OSError):  # it died already: seen below
                sock.sendall(task)
        limit = self._deadline
        while self._unsettled:
            self._look(min(LOOK, limit.remaining()))
            if self._failures and limit is self._deadline:
                limit = limit.sooner(GRACE)
            if limit.expired:
                break
            self._end_stopped()
        if self._failures:
            raise to_error(first_cause(self._failures), self._failures)
        if self._unsettled:
            raise self._hung(sorted(self._unsettled))
        return [self._results[rank] for rank in range(len(self._pids))]

    def end(self) -> None:
        """Kills what still runs, and waits until nothing does."""
        # A rank that is done only has to exit; one that does not is killed, too.
        limit = Deadline(0.5 if not self._unsettled and not self._failures else 0.0)
        while self._alive and not limit.expired:
            self._look(limit.remaining())
        limit = Deadline(KILL_TIME)
        self._server.kill([self._pids[rank] for rank in self._alive])
        while self._alive:
            self._look(limit.remaining())
            if limit.expired:
                self._server.close()  # takes its children with it
                break
        self._selector.close()

    def _look(self, seconds: float) -> None:
        """Waits for a report or the end of a rank, and notes it."""
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._read_report(key.data)
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
            kind, value = "failure", (time.monotonic(), f"its result cannot be read here: {error}", "", None, b"")
        self._selector.unregister(sock)
        if kind == "result":
            self._results[rank] = value
        elif kind == "failure":
            at, summary, traceback, echo, data = value
            self._failures.append(RankFailure(rank, at, summary, traceback, error_from(data) if data else None, echo))

    def _died(self, rank: int, status: int) -> None:
        if os.WIFSIGNALED(status):
            died = Died(rank, signal=os.WTERMSIG(status))
        else:
            died = Died(rank, code=os.WEXITSTATUS(status))
        if rank in self._may_die:
            self._results[rank] = died
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
        return os.pread(file.fileno(), min(size, 1 << 20), 0).decode(errors="replace")
