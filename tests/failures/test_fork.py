"""Forked children: they cannot use the parent's group, and cannot keep its connections alive."""

from __future__ import annotations

import os
import select

import pytest
from tests.failures.ranks import Worlds, assert_lost, worlds  # noqa: F401

from phalanx import _native
from phalanx.transports.waker import Waker


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("ending", ["os._exit(0)", "world.close(); sys.exit(0)"])
def test_a_child_that_touches_the_group_is_told_so(worlds: Worlds, ending: str, transport: str) -> None:
    world = worlds(
        2,
        """
        world = init()
        half = world.subgroup([0, 1])
        x = np.ones(3)
        for _ in range(3):  # the fast paths are in use
            half.all_reduce(x)
            world.barrier()
            world.sendrecv(x, 1 - world.rank, src=1 - world.rank)
        pid = os.fork()
        if pid == 0:
            for call in (
                lambda: world.barrier(),
                lambda: world.send(x, 1 - world.rank),
                lambda: world.recv(src=1 - world.rank),
                lambda: world.irecv(),
                lambda: world.abort("no"),
                lambda: world.subgroup([0, 1]),
                lambda: half.all_reduce(x),
                lambda: world.backend.send(b"x", 1 - world.rank),
            ):
                expect(call)
            {ending}
        _, status = os.waitpid(pid, 0)
        say("child", status=status)
        for _ in range(20):
            half.all_reduce(x)
            world.barrier()
            world.sendrecv(x, 1 - world.rank, src=1 - world.rank)
        say("went on")
        """.replace("{ending}", ending),
        env={"PHALANX_TRANSPORT": transport},
    )
    for rank in world:
        for count in range(1, 9):
            event = rank.wait("raised", count=count)
            assert event["type"] == "Closed", event
            assert f"forked from rank {rank.number} (process {rank.pid})" in event["text"]
            assert "phalanx.init in the child" in event["text"]
        assert rank.wait("child")["status"] == 0
        rank.wait("went on")
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_a_child_of_a_world_of_one_is_told_so(worlds: Worlds) -> None:
    world = worlds(
        1,
        """
        world = init()
        x = np.ones(3)
        for _ in range(3):  # the fast path is in use, and has nobody to wait for
            world.all_reduce(x)
        pid = os.fork()
        if pid == 0:
            for call in (lambda: world.barrier(), lambda: world.all_reduce(x), lambda: world.all_gather(x, x.copy())):
                expect(call)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        say("child", status=status)
        world.all_reduce(x)
        say("went on")
        """,
    )
    for count in range(1, 4):
        event = world[0].wait("raised", count=count)
        assert event["type"] == "Closed", event
    assert world[0].wait("child")["status"] == 0
    world[0].wait("went on")
    assert world.finish() == [0], world[0].errors


@pytest.mark.skipif(not _native.available, reason="without the core, only the parent's thread runs it")
def test_a_child_that_waits_for_a_collective_of_its_parent_is_told_so(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        if world.rank == 1:
            hear()
        work = world.all_reduce(np.ones(3), async_op=True)
        if world.rank == 0:
            pid = os.fork()
            if pid == 0:
                expect(lambda: work.wait())
                expect(lambda: world.all_reduce(np.ones(3), async_op=True))
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            say("child", status=status)
        say("got", value=float(work.wait()[0]))
        world.barrier()
        """,
    )
    for count in (1, 2):
        event = world[0].wait("raised", count=count)
        assert event["type"] == "Closed", event
        assert f"forked from rank 0 (process {world[0].pid})" in event["text"]
    assert world[0].wait("child")["status"] == 0
    world[1].tell()
    assert [rank.wait("got")["value"] for rank in world] == [2.0, 2.0]
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


@pytest.mark.parametrize(
    ("child", "host"),
    [("fork", "rank0"), ("fork", "parent"), ("multiprocessing", "rank0"), ("pool", "parent"), ("subprocess", "rank0")],
)
def test_a_child_that_outlives_its_parent_keeps_nothing_alive(worlds: Worlds, child: str, host: str) -> None:
    victim = 0 if host == "rank0" else 1
    world = worlds(
        3,
        """
        import multiprocessing, subprocess
        def child_work():
            say("child", sockets=[name for name in open_files() if "socket" in name])
            hear()
        world = init()
        half = world.subgroup([VICTIM, (VICTIM + 1) % 3]) if world.rank in (VICTIM, (VICTIM + 1) % 3) else None
        if half: half.barrier()
        world.barrier()
        world.send(np.ones(3), (world.rank + 1) % 3)
        world.recv()
        if world.rank == VICTIM:
            kind = {child!r}
            if kind == "fork":
                if os.fork() == 0:
                    child_work()
                    os._exit(0)
            elif kind == "multiprocessing":
                multiprocessing.get_context("fork").Process(target=child_work, daemon=True).start()
            elif kind == "pool":
                pool = multiprocessing.get_context("fork").Pool(2)
                pool.map(abs, [1, 2, 3])
                pool.apply_async(child_work)
            else:
                code = "from inside import *; say('child', sockets=[n for n in open_files() if 'socket' in n]); hear()"
                process = subprocess.Popen([sys.executable, "-c", code], close_fds=False)
            hear_forever = threading.Event()
            hear_forever.wait()
        say("enter")
        expect(lambda: world.barrier())
        """.replace("{child!r}", repr(child)),
        host=host,
        VICTIM=victim,
    )
    survivors = world.but(victim)
    for rank in survivors:
        rank.wait("enter")
        rank.wait_asleep()
    assert world[victim].wait("child")["sockets"] == []
    killed = world[victim].kill()
    for rank in survivors:
        assert_lost(rank.wait("raised"), victim, killed)
    worlds.leaves_children = True


@pytest.mark.parametrize("role", ["LIFELINE", "CHANNEL"])
def test_a_child_has_no_connection_that_a_thread_of_its_parent_is_making(worlds: Worlds, role: str) -> None:
    if role == "LIFELINE" and not _native.available:
        pytest.skip("only the core holds lifelines")
    world = worlds(
        2,
        """
        import phalanx.rendezvous.join as join
        from phalanx.wire.handshake import Role
        shake_hands = join.shake_hands
        connected, go_on = threading.Event(), threading.Event()
        def shake_hands_later(stream, hello, *rest):
            if hello.role is getattr(Role, ROLE):
                connected.set()
                go_on.wait()
            shake_hands(stream, hello, *rest)
        world = init()
        if world.rank == 1:
            join.shake_hands = shake_hands_later
            thread = threading.Thread(target=lambda: world.send(np.ones(3), 0), daemon=True)
            if ROLE == "CHANNEL":
                thread.start()
            connected.wait()
            pid = os.fork()
            if pid == 0:
                say("child", sockets=[name for name in open_files() if "socket" in name])
                os._exit(0)
            os.waitpid(pid, 0)
            go_on.set()
            if ROLE == "LIFELINE":
                thread.start()
            thread.join()
        else:
            say("received", value=world.recv(np.zeros(3), 1).tolist())
        world.barrier()
        """,
        ROLE=role,
        host="parent",
    )
    assert world[1].wait("child")["sockets"] == []
    assert world[0].wait("received")["value"] == [1.0] * 3, "the parent's own is not touched"
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


@pytest.mark.skipif(not _native.available, reason="without the core there is no shared memory (PHALANX_PURE is set)")
def test_a_child_does_what_it_likes_with_arrays_in_shared_memory(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        def child(body):
            pid = os.fork()
            if pid == 0:
                body()
                os._exit(0)
            return pid
        def sums(*arrays):
            return [float(x.sum()) for x in arrays]

        a = world.empty(1 << 16, np.float32)
        kept = world.empty(1 << 16, np.float32)
        a[:] = kept[:] = 1.0
        world.barrier()
        def drop():
            global a
            del a
        os.waitpid(child(drop), 0)
        say("dropped", sums=sums(a, kept))

        def write():
            say("child", sums=sums(a, kept))
            a[:] = 99.0
            kept[:1] = 99.0
            if os.fork() == 0:  # a child of the child
                a[:] = 98.0
                os._exit(0)
            os.wait()
            expect(lambda: world.all_reduce(a), "refused")
            expect(lambda: world.empty(3), "refused")
        os.waitpid(child(write), 0)
        say("written", sums=sums(a, kept))

        gate, go = os.pipe()
        def drop_later():
            global a
            os.read(gate, 1)
            del a
        pid = child(drop_later)
        del a
        b = world.empty(1 << 16, np.float32)  # where the other was
        b[:] = 5.0
        os.write(go, b"x")
        os.waitpid(pid, 0)
        say("reused", sums=sums(b))

        world.all_reduce(b)
        say("reduced", sums=sums(b))
        world.close()
        os.waitpid(child(lambda: say("closed child", sums=sums(b))), 0)
        """,
    )
    whole = float(1 << 16)
    for rank in world:
        assert rank.wait("dropped")["sums"] == [whole, whole]
        assert rank.wait("child")["sums"] == [whole, whole]
        assert [rank.wait("refused", count=count)["type"] for count in (1, 2)] == ["Closed", "Closed"]
        assert rank.wait("written")["sums"] == [whole, whole]
        assert rank.wait("reused")["sums"] == [5 * whole]
        assert rank.wait("reduced")["sums"] == [10 * whole]
        assert rank.wait("closed child")["sums"] == [10 * whole]
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_children_that_are_forked_in_the_middle_of_everything(worlds: Worlds) -> None:
    # Threads of the parent hold locks at the moment of the fork; in the child nobody will ever release them.
    world = worlds(
        2,
        """
        world = init()
        half = world.subgroup([0, 1])
        stop = False
        def chatter():
            x = np.ones(1000)
            for number in range(1 << 30):
                flag = half.all_reduce(np.array([float(stop)]))
                world.sendrecv(x, 1 - world.rank, src=1 - world.rank)
                if flag[0] == 2.0:
                    break
        thread = threading.Thread(target=chatter)
        thread.start()
        for number in range(16):
            pid = os.fork()
            if pid == 0:
                expect(lambda: world.barrier(), "child")
                if number % 2:
                    world.close()
                    half.close()
                del world, half
                sys.exit(0)
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
        stop = True
        thread.join()
        world.barrier()
        say("went on")
        """,
    )
    for rank in world:
        rank.wait("went on")
        for count in range(1, 17):
            assert rank.wait("child", count=count)["type"] == "Closed"
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_children_that_compute_and_return(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        import multiprocessing
        def square(value):
            return value * value
        with init() as world:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                for _ in range(3):
                    total = sum(pool.map(square, range(10)))
                    x = world.all_reduce(np.array([float(total)]))
            world.barrier()
            say("sum", value=float(x[0]))
        """,
    )
    for rank in world:
        assert rank.wait("sum")["value"] == 570.0
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_a_child_may_have_a_world_of_its_own(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        world.barrier()
        pid = os.fork()
        if pid == 0:
            os.environ["TORCHELASTIC_RUN_ID"] += "-children"
            with px.init() as mine:
                x = mine.all_reduce(np.full(2, 1.0 + mine.rank))
            say("child", value=float(x[0]))
            sys.exit(0)
        x = world.all_reduce(np.full(2, 10.0))
        _, status = os.waitpid(pid, 0)
        world.barrier()
        say("parent", value=float(x[0]), status=status)
        """,
    )
    for rank in world:
        assert rank.wait("child")["value"] == 3.0
        event = rank.wait("parent")
        assert (event["value"], event["status"]) == (20.0, 0)
    assert world.finish() == [0, 0], world[0].errors + world[1].errors


def test_an_exception_that_leaves_a_child_does_not_end_the_world(worlds: Worlds) -> None:
    world = worlds(
        2,
        """
        world = init()
        pid = os.fork()
        if pid == 0:
            raise RuntimeError("of the child")
        os.waitpid(pid, 0)
        world.barrier()
        say("went on")
        """,
    )
    world.wait("went on")
    assert world.finish() == [0, 0], world[0].errors + world[1].errors
    assert "RuntimeError: of the child" in world[0].errors


def test_a_child_does_not_wake_its_parent() -> None:
    waker = Waker()
    pid = os.fork()
    if pid == 0:
        waker.set()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    poller = select.poll()
    poller.register(waker.fd, select.POLLIN)
    assert poller.poll(0) == [], "a byte that its owner knows nothing of keeps it awake for ever"
