"""`run_ranks`: results in order, the first cause of a failure, bounded in time, nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lateness import bound

from phalanx import ConfigError, Group, Options, PeerLost, SizeMismatch, Timeout, UsageError
from phalanx.backends import MeshBackend, SimulatedBackend, SubBackend, TcpBackend
from phalanx.testing import RankFailed, run_ranks
from phalanx.types import Address

PROCESSES = ["mesh", "tcp", "mesh-classic", "mesh-ipv6"]
EVERY = ["simulated", *PROCESSES]
HERE = os.getpid()


def total(group: Group, start: int) -> tuple[int, int, int]:
    return group.rank, int(group.all_reduce(np.array([group.rank + start]))[0]), os.getpid()


@pytest.mark.parametrize("backend", EVERY)
def test_results_come_in_the_order_of_ranks(backend: str) -> None:
    found = run_ranks(3, total, 10, backend=backend)
    assert [(rank, value) for rank, value, _ in found] == [(0, 33), (1, 33), (2, 33)]
    pids = {pid for _, _, pid in found}
    assert pids == {os.getpid()} if backend == "simulated" else len(pids - {os.getpid()}) == 3


def kind_of(group: Group) -> tuple[str, str]:
    return type(group.backend).__name__, group.backend.topology


def test_each_name_gives_its_backend() -> None:
    found = {backend: run_ranks(2, kind_of, backend=backend)[1] for backend in EVERY}
    assert found["simulated"] == (SimulatedBackend.__name__, "full")
    assert found["tcp"] == (TcpBackend.__name__, "star")
    assert all(found[name] == (MeshBackend.__name__, "full") for name in ("mesh", "mesh-classic", "mesh-ipv6"))


def star_with_a_name(rank: int, size: int, master: Address) -> TcpBackend:
    return TcpBackend(rank, size, master)


def test_a_factory_makes_the_backend() -> None:
    assert run_ranks(2, kind_of, backend=star_with_a_name) == [("TcpBackend", "star")] * 2


def test_one_rank() -> None:
    assert run_ranks(1, lambda group: (group.rank, group.world_size)) == [(0, 1)]
    assert run_ranks(1, lambda group: (group.rank, group.world_size), backend="mesh") == [(0, 1)]


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
def test_closures_and_lambdas(backend: str) -> None:
    factor = 7

    def countdown(n: int) -> list[int]:
        return [n, *countdown(n - 1)] if n else []

    assert run_ranks(2, lambda group: group.rank * factor, backend=backend) == [0, 7]
    assert run_ranks(2, lambda group: (countdown(3), HERE > 0), backend=backend) == [([3, 2, 1], True)] * 2


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
def test_results_of_every_kind(backend: str) -> None:
    def results(group: Group) -> dict[str, Any]:
        return {
            "array": np.full((2, 3), group.rank, np.float32),
            "tuple": (1, [2, {3}], None),
            "object": Path("x") / str(group.rank),
            "large": np.arange(1 << 20),
        }

    found = run_ranks(2, results, backend=backend)
    assert [one["object"] for one in found] == [Path("x/0"), Path("x/1")]
    assert all((one["array"] == rank).all() and one["tuple"] == (1, [2, {3}], None) for rank, one in enumerate(found))
    assert all(one["large"].sum() == (1 << 20) * ((1 << 20) - 1) // 2 for one in found)


# -- failures ----------------------------------------------------------------------------------------------------------


def fail_on(group: Group, rank: int) -> None:
    group.barrier()
    if group.rank == rank:
        raise KeyError(f"trouble of rank {rank}")
    group.barrier()


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_cause_is_raised_and_not_its_echo(backend: str, rank: int) -> None:
    with pytest.raises(RankFailed, match=f"^rank {rank} failed: KeyError: .*trouble of rank {rank}") as caught:
        run_ranks(3, fail_on, rank, backend=backend)
    error = caught.value
    assert error.failed_rank == rank
    assert isinstance(error, KeyError)
    assert "in fail_on" in error.remote_traceback
    assert f"Traceback of rank {rank}:" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.args == (f"trouble of rank {rank}",)


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
def test_an_error_keeps_its_type_and_its_attributes(backend: str) -> None:
    def mismatch(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(3, np.uint8), 1)
            group.barrier()
        else:
            group.recv(np.zeros(4, np.uint8), 0)

    with pytest.raises(SizeMismatch) as caught:
        run_ranks(2, mismatch, backend=backend)
    assert (caught.value.expected, caught.value.got, caught.value.peer) == (4, 3, 0)
    assert isinstance(caught.value, RankFailed)
    assert caught.value.failed_rank == 1


class Awkward(Exception):
    """Cannot be made without an argument that nobody else knows."""

    def __init__(self, code: int, *, reason: object) -> None:
        super().__init__(code)
        self.reason = reason


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
def test_an_error_that_cannot_be_pickled_still_says_what_it_was(backend: str) -> None:
    def awkward(group: Group) -> None:
        raise Awkward(7, reason=threading.Lock())

    with pytest.raises(RankFailed, match="^rank [01] failed: Awkward: 7") as caught:
        run_ranks(2, awkward, backend=backend)
    assert "raise Awkward(7" in caught.value.remote_traceback


def test_an_error_of_a_test_module_comes_back_as_itself() -> None:
    def awkward(group: Group) -> None:
        raise Awkward(7, reason=["a", "list"])

    with pytest.raises(Awkward) as caught:
        run_ranks(2, awkward, backend="mesh")
    assert caught.value.reason == ["a", "list"]


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_other_exits_are_failures_too(backend: str, error: BaseException) -> None:
    def leave(group: Group) -> None:
        if group.rank == 1:
            raise error

    with pytest.raises(RankFailed, match=f"^rank 1 failed: {type(error).__name__}"):
        run_ranks(2, leave, backend=backend)


def test_a_timeout_of_an_operation_is_the_ranks_own_error() -> None:
    def wait(group: Group) -> None:
        if group.rank == 1:
            group.recv(src=0, timeout=0.1)
        group.barrier()

    for backend in ("simulated", "mesh"):
        with pytest.raises(Timeout, match="^rank 1 failed: Timeout: recv") as caught:
            run_ranks(2, wait, backend=backend)
        assert caught.value.missing == (0,)


def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    def die(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()

    with pytest.raises(RankFailed, match="^rank 1 failed: was killed by SIGKILL") as caught:
        run_ranks(3, die, backend="mesh")
    assert "rank 0: PeerLost" in str(caught.value)
    assert caught.value.failed_rank == 1


def test_a_rank_that_exits_is_named_with_its_code() -> None:
    def leave(group: Group) -> None:
        if group.rank == 1:
            os._exit(5)
        group.barrier()

    with pytest.raises(RankFailed, match="^rank 1 failed: exited with code 5"):
        run_ranks(2, leave, backend="mesh")


def test_a_crash_in_native_code_shows_its_stack() -> None:
    def crash(group: Group) -> None:
        if group.rank == 0:
            import faulthandler

            faulthandler._sigsegv()
        group.barrier()

    with pytest.raises(RankFailed, match="^rank 0 failed: was killed by SIGSEGV") as caught:
        run_ranks(2, crash, backend="mesh")
    assert "in crash" in str(caught.value)


def test_a_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="rank [01] failed: .*pickle"):
        run_ranks(2, lambda group: threading.Lock(), backend="mesh")


def test_survivors_of_a_failure_get_peer_lost() -> None:
    seen: list[tuple[int, str]] = []

    def look(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("first")
        try:
            group.barrier()
        except PeerLost as error:
            seen.append((error.peer or 0, error.remote_traceback or ""))
            raise

    with pytest.raises(ValueError, match="rank 1 failed"):
        run_ranks(2, look)
    assert seen[0][0] == 1
    assert "ValueError: first" in seen[0][1]


# -- time --------------------------------------------------------------------------------------------------------------


def sleeps_in_here(group: Group, seconds: float) -> None:
    if group.rank == 1:
        time.sleep(seconds)


def test_a_hang_says_what_each_rank_was_doing_in_threads() -> None:
    gate = threading.Event()

    def hang(group: Group) -> None:
        if group.rank == 1:
            gate.wait(20)

    start = time.monotonic()
    # A thread cannot be ended: the gate does it, once the stacks have been taken.
    timer = threading.Timer(1.0, gate.set)
    timer.start()
    with pytest.raises(RankFailed, match="not done within 0.3 s: ranks 1\n") as caught:
        run_ranks(2, hang, timeout=0.3)
    timer.join()
    assert "in hang" in str(caught.value)
    assert "rank 0 was in" not in str(caught.value)
    assert time.monotonic() - start < bound(15)


def test_a_hang_says_what_each_rank_was_doing_in_processes() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match="not done within 1 s: ranks 1\n") as caught:
        run_ranks(2, sleeps_in_here, 60, backend="mesh", timeout=1)
    assert "in sleeps_in_here" in str(caught.value)
    assert time.monotonic() - start < bound(20)


def test_a_stopped_rank_is_named() -> None:
    def stop(group: Group) -> None:
        if group.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankFailed, match="not done within 1 s: ranks 0\n\nrank 0 is stopped"):
        run_ranks(2, stop, backend="mesh", timeout=1)


@pytest.mark.parametrize("backend", ["simulated", "mesh"])
def test_operations_give_up_before_the_whole_does(backend: str) -> None:
    with pytest.raises(Timeout, match="^rank 1 failed: Timeout: recv"):
        run_ranks(2, lambda group: group.recv(src=0) if group.rank else time.sleep(1), backend=backend, timeout=1.2)


# -- what is left ------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["return", "raise", "hang", "stop"])
def test_no_process_is_left(end: str, tmp_path: Path) -> None:
    def body(group: Group, folder: str) -> None:
        # A grandchild, too, which would outlive its parent.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        (Path(folder) / f"{group.rank}").write_text(f"{os.getpid()} {child.pid}")
        group.barrier()
        if group.rank == 1:
            if end == "raise":
                raise ValueError("end")
            if end == "hang":
                time.sleep(100)
            if end == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)

    if end == "return":
        run_ranks(2, body, str(tmp_path), backend="mesh")
    else:
        with pytest.raises(RankFailed):
            run_ranks(2, body, str(tmp_path), backend="mesh", timeout=60 if end == "raise" else 3)
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"{rank}").read_text().split()]
    assert len(pids) == 4
    limit = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert [pid for pid in pids if alive(pid)] == []


def test_the_helper_ends_with_its_user(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        from phalanx.testing import run_ranks
        from phalanx.launching import fork_server

        def body(group, folder):
            open(f"{folder}/{group.rank}", "w").write(str(os.getpid()))
            if folder and group.rank == 1:
                time.sleep(100)

        if __name__ == "__main__":
            run_ranks(2, lambda group: None, backend="mesh")
            print(fork_server._free[0][1]._process.pid, flush=True)
            run_ranks(2, body, sys.argv[1], backend="mesh")
        """)
    )
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    helper = int(process.stdout.readline())
    limit = time.monotonic() + 30
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"):
        assert time.monotonic() < limit
        time.sleep(0.01)
    ranks = [int((tmp_path / name).read_text()) for name in "01"]
    process.kill()
    process.communicate()
    while any(map(alive, [helper, *ranks])) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not any(map(alive, [helper, *ranks]))


# -- the processes' surroundings ---------------------------------------------------------------------------------------


def test_environment_and_folder_are_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_RANKS_TEST", "first")

    def look(_group: Group) -> tuple[str, str | None, str | None]:
        return os.getcwd(), os.environ.get("RUN_RANKS_TEST"), os.environ.get("RUN_RANKS_MORE")

    assert run_ranks(1, look, backend="mesh") == [(str(tmp_path), "first", None)]
    monkeypatch.setenv("RUN_RANKS_TEST", "second")
    found = run_ranks(1, look, backend="mesh", env={"RUN_RANKS_MORE": "more"})
    assert found == [(str(tmp_path), "second", "more")]


def test_output_goes_where_the_callers_goes(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(group: Group) -> None:
        print(f"rank {group.rank} speaks")
        print("and complains", file=sys.stderr)

    run_ranks(2, speak, backend="mesh")
    out, err = capfd.readouterr()
    # Unbuffered, a line and its end are two writes, so that two ranks may mix them.
    assert "rank 0 speaks" in out
    assert "rank 1 speaks" in out
    assert out.count("\n") == 2
    assert err.count("and complains") == 2


def test_ranks_do_not_share_a_random_state() -> None:
    found = run_ranks(3, lambda _group: np.random.random(), backend="mesh")
    assert len(set(found)) == 3


def test_a_changed_module_is_imported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(tmp_path))
    for number in (1, 2):
        path = tmp_path / "changing_module.py"
        path.write_text(f"def value(_group):\n    return {number}\n")
        os.utime(path, (number, number))
        sys.modules.pop("changing_module", None)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
        module = importlib.import_module("changing_module")
        assert run_ranks(1, module.value, backend="mesh") == [number]
    sys.modules.pop("changing_module", None)


def test_a_script_and_standard_input_can_use_it(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import math
        import numpy as np
        from phalanx.testing import run_ranks

        SCALE = 3

        def helper(x):
            return x * SCALE + math.floor(0.5)

        def body(group, start):
            return helper(int(group.all_reduce(np.array([start]))[0]))

        print(run_ranks(2, body, 4, backend="mesh"))
    """)
    script = tmp_path / "script.py"
    script.write_text(program)  # without `if __name__ == "__main__"`: the ranks must not run it again
    for command, given in (([sys.executable, str(script)], None), ([sys.executable, "-"], program)):
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "[24, 24]\n", done.stderr


def test_several_calls_at_once() -> None:
    results: list[Any] = [None] * 3

    def call(slot: int) -> None:
        results[slot] = run_ranks(2, lambda group: int(group.all_reduce(np.array([slot]))[0]), backend="mesh")

    threads = [threading.Thread(target=call, args=(slot,)) for slot in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[0, 0], [2, 2], [4, 4]]


def test_a_forked_child_has_its_own_helper() -> None:
    run_ranks(1, lambda _group: 1, backend="mesh")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if run_ranks(2, lambda group: group.rank, backend="mesh") == [0, 1] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run_ranks(1, lambda _group: 2, backend="mesh") == [2]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: run_ranks(0, print), UsageError, "n=0 is not valid"),
        (lambda: run_ranks(1, print, timeout=0), UsageError, "timeout=0 is not valid"),
        (lambda: run_ranks(2, print, backend="mash"), ConfigError, "backend='mash' is not valid .*'mesh'"),
        (lambda: run_ranks(2, print, may_die=[0]), UsageError, "need ranks that are processes"),
        (lambda: run_ranks(2, print, env={"A": "b"}), UsageError, "need ranks that are processes"),
        (lambda: run_ranks(2, print, backend="mesh", may_die=[2]), UsageError, r"may_die=\[2\] is not valid"),
        (lambda: run_ranks(500, print, backend="mesh"), UsageError, "at most 120"),
        (lambda: run_ranks(2, print, threading.Lock(), backend="mesh"), UsageError, "cannot send the function"),
        (lambda: run_ranks(1, print, backend="tcp"), RankFailed, "world size 1 is not valid"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_options_reach_the_ranks() -> None:
    limit = Options(max_message=100)

    def send(group: Group) -> None:
        if group.rank == 0:
            group.send(np.zeros(101, np.uint8), 1)

    with pytest.raises(UsageError, match="max_message is 100"):
        run_ranks(2, send, backend="mesh", options=limit)


def test_groups_in_ranks_may_be_split() -> None:
    def halves(group: Group) -> tuple[int, ...]:
        half = group.split(group.rank % 2)
        assert half is not None
        assert isinstance(half.backend, SubBackend)
        half.all_reduce(np.zeros(1))
        group.barrier()
        return half.members

    assert run_ranks(4, halves, backend="mesh") == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_the_error_can_be_pickled_by_a_test_runner() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, fail_on, 1)
    plain = RankFailed(str(caught.value), 1)
    assert str(pickle.loads(pickle.dumps(plain.args))[0]).startswith("rank 1 failed")
