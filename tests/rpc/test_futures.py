"""Remote calls that are under way: futures, how they are cancelled, and who waits for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from typing import Any

import pytest
from tests.lateness import bound
from tests.rpc.support import at_once, error_of, run, until

from phalanx.deadline import Deadline
from phalanx.errors import Timeout
from phalanx.rpc import Agent, current_call
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.future import RpcFuture
from phalanx.rpc.payload import Limits, encode_call, fast_value
from phalanx.rpc.pending_call import PendingCall
from phalanx.rpc.served_call import ServedCall
from phalanx.wire.packing import pack


def cancel(agent: Agent) -> None:
    told: list[str] = []
    agent.register("tell", told.append)
    first = agent.call_async(1, "work")
    until(lambda: told == ["begun"], "the first call")
    queued = [agent.call_async(1, "work") for _ in range(20)]
    assert all(future.cancel() for future in queued)
    assert all(future.cancelled() for future in queued)
    assert isinstance(error_of(queued[0].result), concurrent.futures.CancelledError)
    assert first.cancel()
    until(lambda: told == ["begun", "saw it"], "the handler that sees it")
    assert agent.call(1, "begun") == 1  # those in the queue never did
    done = agent.call_async(1, "begun")
    assert done.result(5) == 1
    assert not done.cancel()
    assert done.result() == 1


def serve_work(agent: Agent) -> None:
    counts = {"saw_it": 0, "begun": 0}

    def work() -> None:
        context = current_call()
        assert context is not None
        assert not context.cancelled
        counts["begun"] += 1
        agent.notify(0, "tell", "begun")
        until(lambda: context.cancelled, "the cancellation")
        counts["saw_it"] += 1
        agent.notify(0, "tell", "saw it")

    async def work_soon() -> None:
        counts["begun"] += 1
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            counts["saw_it"] += 1
            raise

    agent.register(work)
    agent.register(work_soon)
    if agent.rank:
        agent.register("tell", lambda words: None)
    for name in counts:
        agent.register(name, functools.partial(counts.__getitem__, name))


def test_cancel(where: str) -> None:
    run(where, 2, serve_work, cancel, workers=1)


def test_a_call_given_up_just_before_its_handler_is_never_run() -> None:
    class Link:
        """Reads the word that the caller has given up after the request was taken, and before there is a context."""

        peer, queued_bytes, ended, limits = 0, 0, None, Limits()

        def __init__(self) -> None:
            self.served: dict[int, ServedCall] = {}
            self.asked_for_handler = False

        @property
        def closing(self) -> bool:
            self.served[1].cancel()
            return False

        def registry(self) -> None:
            self.asked_for_handler = True

        def send(self, *frame: Any) -> bool:
            return True

    link: Any = Link()
    call = ServedCall(link, encode_call("work", 0, 30.0, (), {}, Limits()).head, 1, time.monotonic())
    link.served[1] = call
    call()
    assert not link.served
    assert not link.asked_for_handler


async def cancel_task(agent: Agent) -> None:
    agent.register("tell", lambda words: None)
    for name in ("work", "work_soon"):
        seen = agent.call(1, "saw_it")
        task = asyncio.ensure_future(agent.acall(1, name))
        await asyncio.sleep(0)  # it is sent
        await asyncio.to_thread(until, lambda seen=seen: agent.call(1, "begun") == seen + 1, "the handler")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        until(lambda seen=seen: agent.call(1, "saw_it") == seen + 1, f"the cancellation of {name}")


def test_cancelling_a_task_cancels_the_call(where: str) -> None:
    run(where, 2, serve_work, lambda agent: asyncio.run(cancel_task(agent)))


def a_timeout_is_seen(agent: Agent) -> None:
    agent.register("tell", lambda words: None)
    for number in range(3):
        assert isinstance(error_of(agent.call, 1, "work", timeout=0.1), Timeout)
        until(lambda number=number: agent.call(1, "saw_it") == number + 1, "the handler that sees it")


def test_a_handler_sees_that_its_caller_timed_out(where: str) -> None:
    run(where, 2, serve_work, a_timeout_is_seen, workers=1)


def cancelled_by_another(agent: Agent) -> list[float]:
    """One thread waits for a future, another gives it up."""
    agent.register("tell", lambda words: None)
    times = []
    for wait in ("result", "exception"):
        future = agent.call_async(1, "work", timeout=20)
        waiter = threading.Thread(target=error_of, args=(getattr(future, wait),))
        waiter.start()
        time.sleep(0.2)
        began = time.monotonic()
        assert future.cancel()
        waiter.join()
        times.append(time.monotonic() - began)
    return times


def test_who_waits_for_a_future_that_is_cancelled_is_woken(where: str) -> None:
    assert max(run(where, 2, serve_work, cancelled_by_another)) < 2


def cancelled_twice(agent: Agent) -> list[bool]:
    """The first time is cut short, as by a signal handler that raises."""
    agent.register("tell", lambda words: None)
    found = []
    for place in ("set_running_or_notify_cancel", "_invoke_callbacks"):
        future, called = agent.call_async(1, "work", timeout=20), []
        future.add_done_callback(called.append)

        def cut_short(future: Any = future, place: str = place) -> None:
            delattr(future, place)
            raise KeyboardInterrupt

        setattr(future, place, cut_short)
        with pytest.raises(KeyboardInterrupt):
            future.cancel()
        found += [future.cancel(), future.cancel(), future.cancelled()]
        until(lambda called=called: called, "the callback")
        time.sleep(0.05)
        found.append(called == [future])
    return found


def test_a_cancel_that_was_cut_short_is_done_by_the_next(where: str) -> None:
    assert all(run(where, 2, serve_work, cancelled_twice))


def cancelled_among_others(agent: Agent) -> list[tuple[int, int]]:
    """Futures that are given up before they are waited for, and while they are."""
    agent.register("tell", lambda words: None)
    found = []
    for seconds in (0.0, 0.2):
        futures = [agent.call_async(1, "work", timeout=20), agent.call_async(1, "begun")]
        later = threading.Timer(seconds, futures[0].cancel)
        later.start()
        if not seconds:
            later.join()
        done, _ = concurrent.futures.wait(futures, timeout=5)
        found.append((len(done), len(list(concurrent.futures.as_completed(futures, timeout=5)))))
        assert futures[0].cancel()  # once more
    return found


def test_a_future_that_is_cancelled_counts_as_done_where_several_are_waited_for(where: str) -> None:
    assert run(where, 2, serve_work, cancelled_among_others) == [(2, 2), (2, 2)]


def waited_for_by_many(agent: Agent) -> list[float]:
    """Seconds until each of several threads that wait for one future has its result."""
    times = []
    for how in ("result", "exception"):
        future = agent.call_async(1, "wait", 0.3, timeout=20)
        began = time.monotonic()
        wait = future.result if how == "result" else future.exception
        found = at_once(6, lambda _number, wait=wait: (wait(), time.monotonic()))
        assert {value for value, _ in found} == {0.3 if how == "result" else None}
        times += [at - began for _, at in found]
    return times


def serve_wait(agent: Agent) -> None:
    agent.register("wait", lambda seconds: (time.sleep(seconds), seconds)[1])


def test_every_thread_that_waits_for_a_future_is_woken(where: str) -> None:
    assert max(run(where, 2, serve_wait, waited_for_by_many)) < bound(5.0)


def test_a_result_that_another_thread_reads_just_now_is_the_same_one() -> None:
    """One thread has seen that the answer came, and reads it. Another needs the base class, and is a step behind."""
    call = PendingCall("echo", Deadline(10.0), None)
    call.head, call.done = pack([1]), True
    read = [1]

    def the_other_reads() -> None:
        future.__dict__.setdefault("_value", read)
        call.head = None

    class Link:
        def plain_result(self, _call: PendingCall, head: bytes) -> Any:
            the_other_reads()
            return fast_value(head)

        def result(self, call: PendingCall) -> Any:
            the_other_reads()
            return CallerLink.result(self, call)  # type: ignore[arg-type]

    future = RpcFuture(Link(), call)  # type: ignore[arg-type]
    assert future.exception() is None
    assert future.result() is read
    assert concurrent.futures.Future.result(future) is read
