"""Which thread runs asynchronous collectives: the one that waits for them, else the group's own."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import _native
from phalanx.deadline import Deadline
from phalanx.group.worker import SHORT, CollectiveWorker, IssuedWork, QueuedWork
from phalanx.one_event import OneEvent
from phalanx.testing import run_ranks

LONG = 30.0

needs_core = pytest.mark.skipif(not _native.available, reason="the fast path needs the core (PHALANX_PURE is set)")


@pytest.fixture
def worker() -> Iterator[CollectiveWorker]:
    made = CollectiveWorker()
    yield made
    made.stop()


class Issued:
    """What the core issues, for a function."""

    remaining = LONG
    error: BaseException | None = None
    result: Any = None

    def __init__(self, job: Callable[[], Any]) -> None:
        self._job = job
        self._running = self._ended = False
        self.ran_in: list[threading.Thread] = []

    def run(self) -> bool:
        if self._running or self._ended:
            return self._ended
        self._running = True
        self.ran_in.append(threading.current_thread())
        try:
            self.result = self._job()
        except Exception as error:
            self.error = error
        finally:
            self._running = False
        self._ended = True
        return True

    run_to_end = run

    def run_well(self) -> bool:
        return self.run() and self.error is None


def issue(worker: CollectiveWorker, job: Callable[[], Any], at_once: bool = False) -> tuple[IssuedWork, Issued]:
    issued: Any = Issued(job)
    work = IssuedWork("all_reduce", issued, worker, None)
    worker.add(work, at_once=at_once)
    return work, issued


def queue(worker: CollectiveWorker, job: Callable[[], Any]) -> QueuedWork:
    work = QueuedWork("all_reduce_many", Deadline(LONG), job)
    worker.add(work, at_once=True)
    return work


def hold(worker: CollectiveWorker) -> threading.Event:
    """Keeps the group's thread busy until the event is set."""
    began, go_on = threading.Event(), threading.Event()

    def job() -> None:
        began.set()
        go_on.wait(LONG)

    queue(worker, job)
    assert began.wait(LONG)
    return go_on


def without_thread() -> CollectiveWorker:
    """A worker whose thread has ended, so that only waiting threads run anything."""
    worker = CollectiveWorker()
    worker.stop()
    worker.queue = type(worker.queue)()
    return worker


def test_what_no_thread_waits_for_runs_nevertheless(worker: CollectiveWorker) -> None:
    for at_once in (False, True, False):
        done = threading.Event()
        issue(worker, done.set, at_once)
        assert done.wait(LONG)


def test_a_callback_comes_without_a_wait(worker: CollectiveWorker) -> None:
    called = threading.Event()
    work, _ = issue(worker, lambda: 7)
    work.add_done_callback(lambda _work: called.set())
    assert called.wait(LONG)


@pytest.mark.parametrize("first", [issue, queue])
@pytest.mark.parametrize("second", [issue, queue])
def test_a_callback_in_the_groups_thread_can_wait_for_the_next(
    worker: CollectiveWorker, first: Callable[..., Any], second: Callable[..., Any]
) -> None:
    go_on, found = hold(worker), []
    called = threading.Event()

    def then(_work: px.Work[Any]) -> None:
        made = second(worker, lambda: 8)
        made = made[0] if isinstance(made, tuple) else made
        found.append((made.wait(), threading.current_thread().name))
        called.set()

    work = first(worker, lambda: 7)
    work = work[0] if isinstance(work, tuple) else work
    work.add_done_callback(then)
    after = queue(worker, lambda: 9)  # is run by that wait, too: it was issued before
    go_on.set()
    assert called.wait(LONG / 3)
    assert found == [(8, "phalanx-collectives")]
    assert after.wait() == 9
    assert worker.idle or work.wait() == 7


def test_a_callback_that_wants_to_end_the_program_does_not_end_the_groups_thread(worker: CollectiveWorker) -> None:
    go_on = hold(worker)
    work = queue(worker, lambda: 7)
    work.add_done_callback(lambda _work: sys.exit("no"))
    go_on.set()
    assert work.wait() == 7
    assert queue(worker, lambda: 8).wait() == 8


def test_the_waiting_thread_runs_it_and_those_before() -> None:
    worker = without_thread()
    order: list[int] = []
    issues = [issue(worker, lambda number=number: order.append(number)) for number in range(50)]
    issues[40][0].wait()
    assert order == list(range(41))
    assert all(issued.ran_in == [threading.current_thread()] for _, issued in issues[:41])
    assert not worker.idle
    issues[-1][0].wait()
    assert order == list(range(50))
    assert worker.idle


@needs_core
def test_the_fast_path_is_closed_meanwhile() -> None:
    class Path:
        paused = 0

    worker, path = without_thread(), Path()
    first, _ = issue(worker, lambda: 1)
    worker.hold_back(path)  # type: ignore[arg-type]
    second, _ = issue(worker, lambda: 2)
    assert path.paused == 2
    first.wait()
    assert path.paused == 1
    second.wait()
    assert path.paused == 0


def test_all_kinds_run_in_the_order_of_issue(worker: CollectiveWorker) -> None:
    order: list[int] = []
    works: list[Any] = []
    for number in range(60):
        job = lambda number=number: order.append(number)  # noqa: E731
        works.append(queue(worker, job) if number % 3 == 1 else issue(worker, job, number % 5 == 0)[0])
    for work in reversed(works):
        work.wait()
    assert order == list(range(60))


def test_only_the_groups_thread_runs_the_general_way(worker: CollectiveWorker) -> None:
    ran_in: list[threading.Thread] = []
    queue(worker, lambda: ran_in.append(threading.current_thread()))
    work, _ = issue(worker, lambda: 3)
    assert work.wait() == 3
    assert ran_in != [threading.current_thread()]


def test_a_bounded_wait_ends_before_the_collective(worker: CollectiveWorker) -> None:
    go_on = threading.Event()
    work, _ = issue(worker, lambda: go_on.wait(LONG))
    with pytest.raises(px.Timeout):
        work.wait(timeout=0.05)
    go_on.set()
    assert work.wait() is True


def test_a_wait_for_what_another_thread_runs(worker: CollectiveWorker) -> None:
    go_on = hold(worker)
    work, _ = issue(worker, lambda: 7)
    threading.Timer(0.05, go_on.set).start()
    assert work.wait() == 7


def test_an_error_belongs_to_its_own_work() -> None:
    worker = without_thread()

    def fail() -> None:
        raise px.Timeout("too late")

    first, second = issue(worker, fail)[0], issue(worker, lambda: 2)[0]
    assert second.wait() == 2
    with pytest.raises(px.Timeout, match="too late"):
        first.wait()


def test_an_interrupted_wait_leaves_the_collective_to_the_groups_thread(worker: CollectiveWorker) -> None:
    interrupts = [KeyboardInterrupt()]

    def job() -> int:
        if threading.current_thread() is threading.main_thread() and interrupts:
            raise interrupts.pop()
        return 5

    go_on = hold(worker)
    first, first_issued = issue(worker, job)
    second, _ = issue(worker, lambda: 6)
    worker.queue.pop(worker.queue.first())  # what holds the thread: this one goes first now
    with pytest.raises(KeyboardInterrupt):
        second.wait()
    assert not first.done()
    go_on.set()
    assert second.wait() == 6
    assert first.wait() == 5
    assert len(first_issued.ran_in) == 2


def test_an_interrupt_while_the_end_is_noted_loses_nothing(
    worker: CollectiveWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ran it is interrupted before the others hear of it: the group's thread tells them."""
    go_on = hold(worker)
    work, issued = issue(worker, lambda: 5)
    worker.queue.pop(worker.queue.first())  # what holds the thread: this one goes first now
    called: list[int] = []
    work.add_done_callback(lambda ended: called.append(ended.result()))
    slept: list[bool] = []
    sleeper = threading.Thread(target=lambda: slept.append(work._sleep(LONG)))
    sleeper.start()
    while work._ended is None:
        time.sleep(1e-3)
    finish = OneEvent.set

    def interrupted(event: OneEvent) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        finish(event)

    monkeypatch.setattr(OneEvent, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert work.done()
    go_on.set()
    sleeper.join(LONG)
    assert slept == [True]
    worker.stop()
    assert called == [5]
    assert len(issued.ran_in) == 1


def test_stopping_runs_the_rest() -> None:
    worker = CollectiveWorker()
    works = [issue(worker, lambda: None)[0] for _ in range(10)]
    worker.stop()
    assert all(work.done() for work in works)


def test_what_comes_after_the_end_is_refused() -> None:
    worker = CollectiveWorker()
    worker.stop()
    with pytest.raises(px.Closed, match="closed"):
        issue(worker, lambda: None)
    with pytest.raises(px.Closed, match="closed"):
        queue(worker, lambda: None)
    assert worker.idle


def test_a_worker_that_is_stopped_in_the_middle_of_a_collective_ends() -> None:
    worker = CollectiveWorker()
    go_on = hold(worker)
    worker._alarm.stop()
    go_on.set()
    worker._thread.join(LONG)
    assert not worker._thread.is_alive


# -- on ranks ----------------------------------------------------------------------------------------------------------


def asynchronous(group: px.Group) -> list[Any]:
    x, y = np.full(4, group.rank + 1.0), np.zeros(8)
    group.all_reduce(x)
    works = [group.all_reduce(x, async_op=True), group.all_gather(x, y, async_op=True), group.barrier(async_op=True)]
    results = [work.wait() for work in reversed(works)]
    assert results[0] is None
    assert results[1] is y
    assert results[2] is x
    group.broadcast(x, 1, async_op=True)  # nobody waits
    total = group.all_reduce(x[:1].copy())
    return [*x, *y, *total]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_asynchronous_collectives_come_in_order(transport: str) -> None:
    options = px.Options(transport=transport)
    assert run_ranks(2, asynchronous, backend="mesh", options=options) == [[6.0] * 12 + [12.0]] * 2


def every_verb(group: px.Group) -> list[Any]:
    """All verbs on arrays of a length, asynchronous, all at once and waited for backwards."""
    n, r = group.world_size, group.rank
    group.barrier()
    for size in (3, SHORT // 4):
        mine = np.full(size, r, np.int64)
        parts, whole = np.full(n * size, r, np.int64), np.arange(n * size)
        calls: dict[str, tuple[Any, Any]] = {
            "broadcast": (group.broadcast(mine.copy(), 1, async_op=True), np.full(size, 1)),
            "all_reduce": (group.all_reduce(mine.copy(), async_op=True), np.full(size, n * (n - 1) // 2)),
            "all_gather": (
                group.all_gather(mine, np.zeros(n * size, int), async_op=True),
                np.repeat(np.arange(n), size),
            ),
            "gather": (
                group.gather(mine, 0, np.zeros(n * size, int) if r == 0 else None, async_op=True),
                np.repeat(np.arange(n), size) if r == 0 else None,
            ),
            "scatter": (
                group.scatter(whole if r == 1 else None, 1, np.zeros(size, int), async_op=True),
                whole[r * size : (r + 1) * size],
            ),
            "reduce_scatter": (
                group.reduce_scatter(parts, out=np.zeros(size, int), async_op=True),
                np.full(size, n * (n - 1) // 2),
            ),
            "all_to_all": (
                group.all_to_all(parts, np.zeros(n * size, int), async_op=True),
                np.repeat(np.arange(n), size),
            ),
            "reduce": (group.reduce(mine.copy(), 0, "max", async_op=True), np.full(size, n - 1 if r == 0 else r)),
        }
        for verb, (work, expected) in reversed(calls.items()):
            found = work.wait()
            assert (found is None) == (expected is None), verb
            if expected is not None:
                assert np.array_equal(found, expected), verb
    return [group._worker is not None and group._worker.idle]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_verb(n: int, transport: str) -> None:
    assert run_ranks(n, every_verb, backend="mesh", options=px.Options(transport=transport)) == [[True]] * n


@needs_core
def test_an_issued_scatter_that_does_not_fit() -> None:
    def body(group: px.Group) -> str:
        group.barrier()
        out = np.zeros(2 + group.rank)
        work = group.scatter(np.ones(4) if group.rank == 0 else None, 0, out, async_op=True)
        assert isinstance(work, IssuedWork)
        error = work.exception()
        try:
            work.wait()
        except px.UsageError as raised:
            error = raised
        return str(error) + str(group.all_reduce(np.ones(1)))

    first, second = run_ranks(2, body, backend="mesh")
    assert first == "None[2.]"
    assert "rank 0" in second
    assert second.endswith("[2.]")


def wait(work: Any) -> None:
    if isinstance(work, px.Work):
        work.wait()


@needs_core
def test_the_time_of_a_call_is_its_own() -> None:
    def body(group: px.Group, asynchronous: bool) -> tuple[str, float]:
        x = np.ones(4)
        group.all_reduce(x)
        if group.rank == 1:  # never comes, and does not leave either
            with pytest.raises(px.PhalanxError):
                group.recv(np.ones(1), 0)
            return "", 0.0
        with pytest.raises(px.Timeout) as caught:
            wait(group.all_reduce(x, timeout=0.25, async_op=asynchronous))
        return str(caught.value), caught.value.seconds

    for transport in ("auto", "tcp"):
        for asynchronous in (False, True):
            said = run_ranks(2, body, asynchronous, backend="mesh", options=px.Options(transport=transport))[0]
            assert "not done within 0.25 s" in said[0]
            assert said[1] == 0.25


def odd_times(group: px.Group) -> list[str]:
    group.barrier()
    found = []
    for timeout in (-1.0, "soon", float("nan"), float("inf"), 10**400):
        for asynchronous in (False, True):
            with pytest.raises(px.UsageError) as caught:
                group.barrier(timeout=timeout, async_op=asynchronous)  # type: ignore[arg-type]
            found.append(str(caught.value))
    for fine in (5, np.float64(5), 1e8):
        group.barrier(timeout=fine)  # type: ignore[arg-type]
    return found


def test_times_that_are_none() -> None:
    for found in run_ranks(2, odd_times, backend="mesh"):
        assert all("timeout=" in words for words in found)
