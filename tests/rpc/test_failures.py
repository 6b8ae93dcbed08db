"""What goes wrong: ranks that die, worlds that end, forks and interrupts. Nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.lateness import bound
from tests.rpc.served import CONTRACT, TRANSPORTS, Watch, outcome, serve, use_everything
from tests.rpc.support import at_once, error_of, held, run, until, world_of

import phalanx as px
from phalanx.deadline import Deadline
from phalanx.errors import ChannelClosed, Closed, PeerLost, PhalanxError, ProtocolError, Timeout
from phalanx.rpc import Agent, current_call
from phalanx.rpc.caller import CallerLink
from phalanx.rpc.connect import Connections
from phalanx.rpc.frame_reader import Frame
from phalanx.rpc.pending_call import PendingCall
from phalanx.testing import run_ranks
from phalanx.transports.lending import NOTHING
from phalanx.wire.calls import CallKind

# -- a rank that dies ------------------------------------------------------------------------------------------------


def killed_under_load(world: px.Group, victim: int) -> Any:
    agent = Agent(world, timeout=20, workers=32)
    serve(agent)
    loaded = threading.Semaphore(0)
    agent.register("loaded", loaded.release)
    world.barrier()
    pids = world.all_gather_object(os.getpid())
    if world.rank == victim:
        time.sleep(30)
    survivors = [rank for rank in range(world.world_size) if rank != victim]
    watch = Watch()
    thing = agent.create(victim, "Thing")
    stream = agent.call(victim, "drip")
    assert next(stream) == 1
    for _ in range(2):
        watch.start(agent.call, victim, "sleep", 15)
        watch.start(agent.call, victim, "sleep_soon", 15)
        watch.start(agent.call_async(victim, "sleep", 15).result)
    watch.start(asyncio.run, agent.acall(victim, "sleep", 15))
    watch.start(thing.sleep, 15)
    watch.start(next, stream)

    def flood() -> None:
        while True:
            agent.notify(victim, "echo", b"x" * 1000)

    def load() -> None:
        while True:
            agent.call(victim, "echo", np.zeros(20_000))

    watch.start(flood)
    watch.start(load)
    slowest = [0.0]
    stop = threading.Event()

    def others() -> int:
        done = 0
        while not stop.is_set():
            for rank in survivors:
                began = time.monotonic()
                assert agent.call(rank, "echo", done, timeout=5) == done
                slowest[0] = max(slowest[0], time.monotonic() - began)
                done += 1
        return done

    going_on: list[Any] = []
    other = threading.Thread(target=lambda: going_on.append(outcome(others)))
    other.start()
    time.sleep(0.5)
    agent.notify(survivors[0], "loaded")
    killed_at = None
    if world.rank == survivors[0]:
        assert all(loaded.acquire(timeout=10) for _ in survivors)
        killed_at = time.monotonic()  # the clock is the same for all processes
        os.kill(pids[victim], signal.SIGKILL)
    watch.join()
    latest = watch.latest(PeerLost, victim)
    time.sleep(0.2)
    stop.set()
    other.join()
    began = time.monotonic()
    again = error_of(agent.call, victim, "echo", 1)
    assert isinstance(again, PeerLost)
    assert time.monotonic() - began < bound(0.5)
    for rank in survivors:
        assert agent.call(rank, "echo", 5) == 5
    # The group is broken, so the survivors wait for each other by calls.
    agent.register("done", lambda: True)
    for rank in survivors:
        until(lambda rank=rank: outcome(agent.call, rank, "done") is True, f"rank {rank}")
    time.sleep(0.3)
    agent.close()
    return killed_at, latest, going_on[0], slowest[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_killed_under_load(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(3, killed_under_load, 1, backend="mesh", may_die=[1], options=options, timeout=40)
    killed_at = results[0][0]
    for rank in (0, 2):
        _, latest, done, slowest = results[rank]
        assert latest - killed_at < bound(CONTRACT), f"rank {rank} noticed after {latest - killed_at:.3f} s"
        assert isinstance(done, int), f"a call to a survivor failed: {done!r}"
        assert done > 20
        assert slowest < bound(CONTRACT)


def killed_while_it_calls(world: px.Group) -> Any:
    """The handlers of a caller that dies see it; what it had queued is not begun."""
    agent = Agent(world, workers=1)
    seen: list[str] = []

    def work() -> None:
        context = current_call()
        assert context is not None
        seen.append("begun")
        until(lambda: context.cancelled, "the word that the caller is gone", 5.0)
        seen.append("saw it")

    agent.register(work)
    world.barrier()
    if world.rank == 0:
        for _ in range(5):
            agent.call_async(1, "work", timeout=20)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: "saw it" in seen, "the handler")
    time.sleep(0.3)
    agent.close()
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handlers_see_that_their_caller_died(transport: str) -> None:
    options = px.Options(transport=transport)
    results = run_ranks(2, killed_while_it_calls, backend="mesh", may_die=[0], options=options, timeout=20)
    assert results[1] == ["begun", "saw it"]


def killed_during_the_first_call(world: px.Group) -> Any:
    """It dies while the others are about to connect to it."""
    agent = Agent(world, timeout=10)
    serve(agent)
    world.barrier()
    through = np.zeros(1)
    if world.rank == 0:
        for rank in (1, 2):
            world.recv(through, rank)  # not before they have left the barrier
        time.sleep(0.01 * random.random())
        os.kill(os.getpid(), signal.SIGKILL)
    world.send(through, 0)
    began = time.monotonic()
    while True:
        error = outcome(agent.call, 0, "echo", 1)
        if isinstance(error, BaseException):
            break
    took = time.monotonic() - began
    time.sleep(0.2)
    other = agent.call(3 - world.rank, "echo", 5)
    time.sleep(0.3)
    agent.close()
    return type(error), took, other


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_while_others_connect(transport: str) -> None:
    options = px.Options(transport=transport)
    for _ in range(3):
        results = run_ranks(3, killed_during_the_first_call, backend="mesh", may_die=[0], options=options, timeout=20)
        for error, took, other in results[1:]:
            assert issubclass(error, PeerLost)
            assert took < bound(CONTRACT + 0.1)
            assert other == 5


# -- a world that ends -----------------------------------------------------------------------------------------------


def aborted(world: px.Group) -> Any:
    agent = Agent(world, timeout=20)
    serve(agent)
    world.barrier()
    watch = Watch()
    for dst in range(3):
        watch.start(agent.call, dst, "sleep", 1.5)
        watch.start(agent.call_async(dst, "sleep_soon", 1.5).result)
    time.sleep(0.5)
    began = time.monotonic()
    if world.rank == 1:
        world.abort("enough")
    watch.join()
    latest = max(at for at, _ in watch.ended) - began
    errors = [error for _, error in watch.ended]
    assert len(errors) == 6
    assert all(isinstance(error, PhalanxError) for error in errors), errors
    after = error_of(agent.call, (world.rank + 1) % 3, "echo", 1)
    assert isinstance(after, PhalanxError)
    began = time.monotonic()
    with contextlib.suppress(PhalanxError):
        agent.close(drain=False)
    return latest, sum("enough" in str(error) for error in errors), time.monotonic() - began


def test_the_world_is_aborted(where: str) -> None:
    """A classic world is not among them: it has nobody who could tell third ranks."""
    for rank, (latest, named, closing) in enumerate(run_ranks(3, aborted, timeout=30, **world_of(where))):
        assert latest < bound(CONTRACT), (rank, latest)
        assert named >= 4, f"rank {rank} is not told why"  # a call to itself need not be
        assert closing < bound(3)


def world_closed_first(world: px.Group) -> Any:
    agent = Agent(world, timeout=5)
    serve(agent)
    world.barrier()
    agent.call((world.rank + 1) % 2, "echo", 1)
    world.barrier()
    before = held()["threads"]
    world.close()
    error = error_of(agent.call, (world.rank + 1) % 2, "echo", 1)
    agent.close()
    until(lambda: held()["threads"] < before, "the agent's threads")
    return type(error)


@pytest.mark.parametrize("kind", ["mesh", "simulated"])
def test_a_world_that_is_closed_before_its_agent(kind: str) -> None:
    for error in run_ranks(2, world_closed_first, backend=kind, timeout=20):
        assert issubclass(error, Closed | PeerLost)


# -- many threads ----------------------------------------------------------------------------------------------------


def threads_of_a_lost_rank(agent: Agent) -> list[float]:
    """No connection can be made, and that takes a moment to find out: all threads hear of it then."""

    def dial(_dst: int, _deadline: Deadline) -> Any:
        time.sleep(0.3)
        raise PeerLost(1, "nobody listens there any more")

    agent._connections.port.dial = dial  # type: ignore[method-assign]

    def one(_number: int) -> float:
        began = time.monotonic()
        assert isinstance(error_of(agent.call, 1, "echo", 1, timeout=20), PeerLost)
        return time.monotonic() - began

    return at_once(8, one)


def test_threads_do_not_find_out_one_after_another_that_a_rank_is_lost() -> None:
    times = run("simulated", 2, serve, threads_of_a_lost_rank)
    assert max(times) < 1.5, times  # eight times 0.3 s would be 2.4


# -- forks and interrupts --------------------------------------------------------------------------------------------


def forked(agent: Agent) -> None:
    use_everything(agent)
    stream = agent.call(1, "count", 100)
    assert next(stream) == 0
    thing = agent.create(1, "Thing")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            error = error_of(agent.call, 1, "echo", 1, timeout=2)
            thing_error = error_of(thing.sleep, 0.001)
            del stream, thing
            gc.collect()
            agent.close()
            code = 0 if isinstance(error, PhalanxError) and isinstance(thing_error, PhalanxError) else 2
            import atexit

            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    thing.sleep(0.001)
    assert sum(stream) == 4950
    use_everything(agent)


def test_a_fork_leaves_the_parents_agent_alone(processes: str) -> None:
    run(processes, 2, serve, forked)


def wait_in_a_child(agent: Agent) -> tuple[list[str], Any]:
    """What a forked child hears of a call that its parent has begun, and what the parent gets."""
    future = agent.call_async(1, "wait", 0.5)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = [type(error_of(future.result)).__name__, type(error_of(future.exception)).__name__]
            os.write(writing, " ".join(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 10.0)
    heard = os.read(reading, 1000).decode().split() if ready else ["nothing"]
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    return heard, future.result()


def test_a_forked_child_does_not_wait_for_the_answers_of_its_parent(processes: str) -> None:
    heard, result = run(processes, 2, serve_wait, wait_in_a_child)
    assert heard == ["Closed", "Closed"]
    assert result == 0.5


def serve_wait(agent: Agent) -> None:
    agent.register("wait", lambda seconds: (time.sleep(seconds), seconds)[1])


def interrupted(agent: Agent, seed: int) -> list[str]:
    """Ctrl-C again and again, wherever the main thread is; another thread calls all the time."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(seed)
    stop = threading.Event()
    beside = Watch()

    def go_on() -> None:
        while not stop.is_set():
            assert agent.call(1, "echo", 3, timeout=10) == 3

    beside.start(go_on)
    interrupts = 0
    for number in range(150):
        timer = threading.Timer(rng.uniform(0.0005, 0.005), os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                timer.start()
                if number % 3 == 0:
                    agent.call(1, "sleep", 0.02)
                while True:
                    agent.call(1, "echo", number)
                    if number % 3 == 2:
                        agent.call_async(1, "echo", np.zeros(3000)).result()
            except KeyboardInterrupt:
                interrupts += 1
        finally:
            timer.join()
    stop.set()
    beside.join()
    errors = [repr(error) for _, error in beside.ended if error is not None]
    for number in range(50):
        assert agent.call(1, "echo", number, timeout=5) == number
    use_everything(agent)
    assert interrupts == 150
    return errors


def count_ones(agent: Agent) -> None:
    found = []

    def count(x: np.ndarray[Any, Any]) -> int:
        found.append(len(np.unique(x)))
        return int(x.sum())

    agent.register("count", count)
    agent.register("found", lambda: max(found, default=1))


def torn_while_others_send(agent: Agent, size: int) -> tuple[list[str], int]:
    """A signal handler raises in the middle of a frame, just before another thread sends."""
    agent._connections._lending, agent._connections._lanes = NOTHING, 0
    assert agent.call(1, "found") == 1
    link, main = agent._connections.callers[1], threading.current_thread()
    send, end = link.pipe.send, link._end_if_cut_short
    beside = Watch()

    def torn(*args: Any) -> int:
        count = send(*args)
        if threading.current_thread() is main:
            beside.start(agent.call, 1, "count", np.ones(size))
            time.sleep(0.05)  # it waits for its turn now
            raise KeyboardInterrupt
        return count

    def late() -> None:
        if threading.current_thread() is main:
            time.sleep(0.2)
        end()

    link.pipe.send, link._end_if_cut_short = torn, late  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        agent.call(1, "count", np.zeros(size))
    beside.join()
    heard = [str(error) for _, error in beside.ended]
    assert agent.call(1, "count", np.ones(size)) == size  # over a new connection
    return heard, agent.call(1, "found")


@pytest.mark.parametrize("size", [10_000, 1 << 20])
def test_nothing_follows_a_frame_that_was_cut_short(processes: str, size: int) -> None:
    heard, kinds = run(processes, 2, count_ones, torn_while_others_send, size)
    assert len(heard) == 1
    assert "cut a message short" in heard[0]
    assert kinds == 1


def interrupted_before_it_connects(agent: Agent) -> int:
    """Ctrl-C at every line from the beginning of a first call to where it connects."""
    place = reached = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        if frame.f_code is Connections._connect.__code__:
            sys.settrace(None)
        if frame.f_code is not Connections.link_to.__code__:
            return None
        if event == "line":
            reached += 1
            if reached == place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    while reached >= place:
        place, reached = place + 1, 0
        sys.settrace(trace)
        try:
            agent.call(1, "echo", 1)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        until(lambda: answers(agent), "a connection")
        agent._connections.callers[1].end(ChannelClosed(1, "the next call connects"))
    return place


def answers(agent: Agent) -> bool:
    """Whether a call goes through; one that meets the end of the last connection does not."""
    try:
        return bool(agent.call(1, "echo", 2, timeout=2) == 2)
    except PhalanxError:
        return False


def test_ctrl_c_before_a_connection_leaves_the_agent_usable() -> None:
    assert run("simulated", 2, serve, interrupted_before_it_connects) > 5


def test_ctrl_c_in_a_call_leaves_the_agent_usable(processes: str) -> None:
    errors = run(processes, 2, serve, interrupted, 7)
    # A message that was torn in the middle ends its link, which others may see: but never as a call without an answer.
    assert not any(Timeout.__name__ in error for error in errors), errors


# -- the next link to the same rank ----------------------------------------------------------------------------------


LINKED = pytest.mark.parametrize("world", ["rings", "tcp", "simulated", "star", "classic mesh"])


def serve_links(agent: Agent) -> None:
    links = agent._connections.servers

    def say_after(word: str, seconds: float) -> str:
        time.sleep(seconds)
        return word

    def end_links() -> None:
        for link in list(links):
            link.end(ProtocolError("the test says so"))

    agent.register(say_after)
    agent.register(end_links)
    agent.register("links", lambda: len(links))


def ended_by_the_caller(agent: Agent) -> str:
    """A link ends while its only call is served; the first call of the next one has the same number."""
    old = agent.call_async(1, "say_after", "old", 0.3, timeout=20)
    agent._connections.callers[1].end(ChannelClosed(1, "the next call connects"))
    assert isinstance(error_of(old.result, 5), ChannelClosed)
    new = agent.call_async(1, "say_after", "new", 0.6, timeout=20)
    word = new.result(20)
    until(lambda: agent.call(1, "links") == 1, "the end of the first link on the other rank")
    return str(word)


@LINKED
def test_a_new_link_has_nothing_to_do_with_the_last_one(world: str) -> None:
    assert run(world, 2, serve_links, ended_by_the_caller) == "new"


def ended_by_the_server(agent: Agent) -> tuple[BaseException, float]:
    began = time.monotonic()
    error = error_of(agent.call, 1, "end_links", timeout=20)
    seconds = time.monotonic() - began
    assert agent.call(1, "links", timeout=20) == 1
    return error, seconds


@LINKED
def test_a_caller_hears_that_the_server_has_ended_its_link(world: str) -> None:
    error, seconds = run(world, 2, serve_links, ended_by_the_server)
    assert type(error) is ChannelClosed
    assert seconds < bound(5.0)


# -- calls in hand: taken off their link's list, and not finished yet ------------------------------------------------


LONG = 20.0
"""Seconds that a call has which is lost: its thread is not to wait that long."""


def link_to_1(agent: Agent) -> CallerLink:
    assert agent.call(1, "echo", 0) == 0
    return agent._connections.callers[1]


def late_while_in_hand(agent: Agent) -> BaseException:
    """The deadline passes after another thread has taken the call off the list, and before that finishes it."""
    return error_of(link_to_1(agent).finish, PendingCall("echo", Deadline(0.0), None))


def test_a_deadline_that_passes_while_the_answer_is_in_hand(where: str) -> None:
    assert type(run(where, 2, serve, late_while_in_hand)) is px.RpcTimeout


def interrupted_with_a_call_in_hand(agent: Agent, plain: bool) -> None:
    """A signal handler raises in the mover, just after that has taken the call of another thread off the list."""
    link = link_to_1(agent)
    future = agent.call_async(1, "sleep", 0.5, timeout=LONG)
    [(number, pending)] = link.calls.items()
    heard: list[BaseException | None] = []
    future.add_done_callback(lambda done: heard.append(done.exception()))
    until(lambda: link.mover_lock.acquire(blocking=False), "the part of the mover")

    class Interrupted(dict[int, PendingCall]):
        def pop(self, *args: Any) -> Any:
            super().pop(*args)
            raise KeyboardInterrupt

    def read(*_: Any) -> list[Frame]:
        link._unhandled = True
        if plain:
            link.take_plain([(CallKind.RESULT, number, b"", 0, 0)])
        return [Frame(CallKind.ERROR, number, b"", 0)]

    link.calls = Interrupted(link.calls)
    link.read_frames = read  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            link.move()
    finally:
        link.hand_over()
    assert pending.done
    assert isinstance(pending.error, ChannelClosed)
    until(lambda: heard, "the callback")
    assert isinstance(heard[0], PhalanxError)


@pytest.mark.parametrize("plain", [True, False])
def test_an_interrupt_with_a_call_in_hand(where: str, plain: bool) -> None:
    run(where, 2, serve, interrupted_with_a_call_in_hand, plain)


def lost_by_an_interrupt(agent: Agent, listed: bool) -> float:
    """The link has ended, but what should have finished the call was interrupted: its own thread does it."""
    link = link_to_1(agent)
    link.end(ChannelClosed(1, "ended by a test"))
    pending = PendingCall("echo", Deadline(LONG), None)
    pending.number = 1000
    if listed:
        link.calls[1000] = pending
    began = time.process_time(), time.monotonic()
    assert isinstance(error_of(link.finish, pending), ChannelClosed)
    assert time.process_time() - began[0] < 0.5
    return time.monotonic() - began[1]


@pytest.mark.parametrize("listed", [True, False])
def test_the_end_of_a_link_ends_every_wait(where: str, listed: bool) -> None:
    assert run(where, 2, serve, lost_by_an_interrupt, listed) < bound(1)


def mover_that_wakes_nobody(agent: Agent) -> float:
    """A signal handler raises in the mover when that has given its part up, and before it wakes the next one."""
    link = link_to_1(agent)
    until(lambda: link.mover_lock.acquire(blocking=False), "the part of the mover")
    took: list[float] = []

    def call() -> None:
        began = time.monotonic()
        agent.call(1, "echo", 1, timeout=LONG)
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: link._waiting, "a thread that waits")
    time.sleep(0.05)
    link.mover_lock.release()
    thread.join(LONG + 5)
    return took[0] if took else LONG


def test_a_mover_that_wakes_nobody(where: str) -> None:
    assert run(where, 2, serve, mover_that_wakes_nobody) < bound(3)


# -- an error that nobody expected -----------------------------------------------------------------------------------


def serve_waits(agent: Agent) -> None:
    released = threading.Event()
    agent.register("wait", lambda: released.wait(60))
    agent.register("release", released.set)


def out_of_memory_once(agent: Agent) -> BaseException:
    """The agent's thread fails between two calls, as without memory, while a call is under way that it watches."""
    poller = agent._poller
    rebuild = poller._rebuild

    def fail() -> NoReturn:
        poller._rebuild = rebuild  # type: ignore[method-assign]
        raise MemoryError("none left")

    under_way = agent.call_async(1, "wait", timeout=60)
    under_way.add_done_callback(lambda _: None)  # so that the agent's thread reads the answer
    poller._rebuild = fail  # type: ignore[method-assign]
    poller.reload_streams()
    poller._waker.set()
    error = error_of(under_way.result, 20)
    agent.call(1, "release", timeout=20)
    return error


@pytest.mark.parametrize("world", ["rings", "tcp", "simulated", "pure"])
def test_an_unexpected_error_of_the_agents_thread_ends_calls_and_not_the_agent(world: str) -> None:
    error = run(world, 2, serve_waits, out_of_memory_once)
    assert type(error) is ChannelClosed
    assert "an unexpected error of the agent's thread: MemoryError: none left" in str(error)
