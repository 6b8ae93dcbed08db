"""`launch`: the launcher's variables, results in order, output here, one error, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import os
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

import phalanx as px
from phalanx import launch


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Whether all of them end soon."""
    limit = time.monotonic() + bound(5)
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    return not any(map(alive, pids))


# -- what the function finds ------------------------------------------------------------------------------------------


def total(start: int) -> tuple[int, int, int]:
    with px.init() as world:
        return world.rank, int(world.all_reduce(np.array([world.rank + start]))[0]), os.getpid()


def test_a_world_forms_and_results_come_in_the_order_of_ranks() -> None:
    found = launch(total, 3, 10)
    assert [(rank, value) for rank, value, _ in found] == [(0, 33), (1, 33), (2, 33)]
    assert len({pid for _, _, pid in found} - {os.getpid()}) == 3


def test_the_variables_are_those_of_phalanx_run() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PHALANX_TOKEN")

    def look() -> tuple[list[str | None], str | None]:
        return [os.environ.get(name) for name in names], os.environ.get("PHALANX_LAST_WORDS")

    (first, nothing), (second, _) = launch(look, 2)
    assert first[:5] == ["0", "0", "2", "2", "127.0.0.1"]
    assert second[:2] == ["1", "1"]
    assert first[5:] == second[5:]
    assert first[5] != "0"
    assert len(first[6] or "") == 64
    assert nothing is None
    assert launch(look, 1)[0][0][6] != first[6], "the token is a fresh one for each launch"


def test_more_variables_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_TEST", "here")

    def look() -> tuple[str | None, str | None]:
        return os.environ.get("LAUNCH_TEST"), os.environ.get("LAUNCH_MORE")

    assert launch(look, 1, env={"LAUNCH_MORE": "more"}) == [("here", "more")]


def test_worlds_that_are_left_open_are_closed() -> None:
    def leave_open() -> int:
        world = px.init()
        return int(world.all_reduce(np.ones(1))[0])

    assert launch(leave_open, 2) == [2, 2]


def test_exit_handlers_run_and_threads_are_waited_for(tmp_path: Path) -> None:
    def register(folder: Path) -> None:
        import atexit

        rank = os.environ["RANK"]
        atexit.register((folder / f"handler-{rank}").touch)
        threading.Thread(target=lambda: (time.sleep(0.2), (folder / f"thread-{rank}").touch())).start()

    launch(register, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["handler-0", "handler-1", "thread-0", "thread-1"]


def test_exit_without_a_failure_is_no_failure() -> None:
    def leave() -> None:
        sys.exit(0)

    assert launch(leave, 2) == [None, None]


def test_torch_finds_its_process_group() -> None:
    pytest.importorskip("torch")

    def train() -> tuple[str, list[float]]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("phalanx")
        tensor = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(tensor)
        return dist.get_backend(), tensor.tolist()

    assert launch(train, 2) == [("phalanx", [3.0])] * 2


# -- where it can be called -------------------------------------------------------------------------------------------


def test_another_thread_can_call_it() -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(launch(total, 2, 0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [[value for _, value, _ in found] for found in results] == [[1, 1], [1, 1]]


def test_a_rank_can_launch_ranks() -> None:
    def outer() -> list[int]:
        return [value for _, value, _ in launch(total, 2, 5)]

    assert launch(outer, 1) == [[11, 11]]


SCRIPT = """
import dataclasses
import phalanx as px

SCALE = 3
calls = 0


@dataclasses.dataclass
class Config:
    start: int
    names: list = dataclasses.field(default_factory=list)


class Model:
    def __init__(self, config):
        super().__init__()
        self.config = config

    @property
    def value(self):
        return helper(self.config.start)


def helper(x):
    global calls
    calls += 1
    return x * SCALE


def body(config):
    with px.init() as world:
        value = Model(config).value + helper(world.rank)
        return value, calls, Config(value)


print(px.launch(body, 2, Config(4)))
"""


def test_a_script_needs_no_guard_and_its_classes_travel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for command, given in (([sys.executable, str(script)], None), ([sys.executable, "-"], SCRIPT)):
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
        expected = "[(12, 2, Config(start=12, names=[])), (15, 2, Config(start=15, names=[]))]\n"
        assert done.stdout == expected, done.stderr


# -- output -----------------------------------------------------------------------------------------------------------


def speak() -> None:
    print(f"rank {os.environ['RANK']} speaks")
    print("and complains", file=sys.stderr)
    os.write(1, b"half a line")


@pytest.mark.parametrize("prefix", [True, False])
def test_output_goes_to_where_this_process_prints(prefix: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        launch(speak, 2, prefix=prefix)
    marks = ["[0] ", "[1] "] if prefix else ["", ""]
    expected = [f"{mark}{text}" for rank, mark in enumerate(marks) for text in (f"rank {rank} speaks", "half a line")]
    assert sorted(out.getvalue().splitlines()) == sorted(expected)
    assert sorted(err.getvalue().splitlines()) == [f"{mark}and complains" for mark in marks]


def test_output_appears_while_the_ranks_run() -> None:
    class Gate(io.StringIO):
        opened: Path

        def write(self, text: str) -> int:
            if "ready" in text:
                self.opened.touch()
            return super().write(text)

    def wait(path: Path) -> bool:
        print("ready", flush=True)
        limit = time.monotonic() + 30
        while not path.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        return path.exists()

    import tempfile

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(Gate()) as out:
        out.opened = Path(folder) / "opened"
        assert launch(wait, 1, out.opened) == [True]


def test_text_that_the_stream_cannot_take_is_escaped() -> None:
    def greet() -> None:
        os.write(1, "grüß\n".encode() + b"\xff\n")

    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with contextlib.redirect_stdout(stream):
        launch(greet, 1)
    assert raw.getvalue() == b"[0] gr\\xfc\\xdf\n[0] \\xff\n"


# -- failures ---------------------------------------------------------------------------------------------------------


def fail_on(rank: int) -> None:
    world = px.init()
    world.barrier()
    if world.rank == rank:
        raise KeyError(f"trouble of rank {rank}")
    world.barrier()


def test_the_culprit_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(px.RankFailed) as caught:
        launch(fail_on, 4, 2)
    error = caught.value
    assert isinstance(error, KeyError)
    assert error.failed_rank == 2
    text = str(error)
    assert text.startswith("rank 2 failed: KeyError: 'trouble of rank 2'\n3 ranks ended because of it\n\nTraceback")
    assert text.count("in fail_on") == 1
    assert "phalanx/" not in text
    assert (error.__cause__, error.__suppress_context__) == (None, True), "it would be shown twice"
    assert capfd.readouterr().err == ""


def test_a_rank_that_fails_before_it_joins_ends_the_others() -> None:
    def early() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("no such file")
        px.init()

    start = time.monotonic()
    with pytest.raises(ValueError, match="^rank 1 failed: ValueError: no such file\n1 rank ended because of it"):
        launch(early, 2)
    assert time.monotonic() - start < bound(15)


def test_ranks_that_do_not_listen_are_told_and_then_killed(tmp_path: Path) -> None:
    def stubborn(folder: Path) -> None:
        if os.environ["RANK"] == "1":
            while not (folder / "ready").exists():
                time.sleep(0.01)
            raise ValueError("end")
        signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
        (folder / "ready").write_text(str(os.getpid()))
        while True:
            time.sleep(0.1)

    with pytest.raises(ValueError, match="rank 1 failed"):
        launch(stubborn, 2, tmp_path, grace=0.5)
    assert (tmp_path / "told").exists()
    assert gone([int((tmp_path / "ready").read_text())])


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(5), "exited with code 5"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: sys.exit("no data"), "SystemExit: no data"),
    ],
)
def test_a_rank_that_ends_is_named(end: Callable[[], None], words: str) -> None:
    def leave(leave_now: Callable[[], None]) -> None:
        world = px.init()
        if world.rank == 1:
            leave_now()
        world.barrier()

    with pytest.raises(px.RankFailed, match=f"^rank 1 failed: {words}"):
        launch(leave, 2, end)


def test_a_hang_says_where_each_rank_was_without_our_frames() -> None:
    def hang() -> None:
        if px.init().rank == 1:
            time.sleep(60)

    for seconds in (3, 10, 30):  # on a busy machine the ranks may need longer until they hang
        with pytest.raises(px.RankFailed, match=f"not done within {seconds} s: ranks ") as caught:
            launch(hang, 2, timeout=seconds, grace=0.1)
        if "ranks 1\n" in str(caught.value):
            break
    assert "in hang" in str(caught.value)
    assert "phalanx/" not in str(caught.value)


# -- the end ----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, subprocess, sys, time
import phalanx as px

def body(folder, patient):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    world = px.init()
    print(f"{folder}/{world.rank}", flush=True)
    open(f"{folder}/{world.rank}", "w").write(f"{os.getpid()} {child.pid}")
    world.barrier()
    words = ["running"]
    while True:
        try:
            print(*words, flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            words = []
            open(f"{folder}/interrupted-{world.rank}", "w").close()
            if not patient:
                raise

try:
    px.launch(body, 2, sys.argv[1], sys.argv[2] == "patient")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("ranks", ["end", "patient"])
def test_an_interrupt_ends_all(ranks: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    command = [sys.executable, str(script), str(tmp_path), ranks]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        assert sum("running" in line for line in lines) == 2
        process.send_signal(signal.SIGINT)
        if ranks == "patient":
            limit = time.monotonic() + 30
            while len(list(tmp_path.glob("interrupted-*"))) < 2 and time.monotonic() < limit:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)  # the second one waits for nobody
        rest = process.stdout.read()
        assert process.wait(30) == 0
    assert rest.endswith("interrupted\n")
    assert len(list(tmp_path.glob("interrupted-*"))) == 2
    assert gone([int(pid) for rank in range(2) for pid in (tmp_path / f"{rank}").read_text().split()])


@pytest.mark.parametrize("end", ["return", "raise", "timeout"])
def test_no_process_is_left(end: str, tmp_path: Path) -> None:
    def body(folder: Path) -> None:
        # Also one that has a session of its own.
        sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
        children = [subprocess.Popen(sleep, start_new_session=new) for new in (False, True)]
        world = px.init()
        (folder / f"{world.rank}").write_text(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])))
        world.barrier()
        if end == "raise":
            raise ValueError("end")
        if end == "timeout":
            time.sleep(100)

    if end == "return":
        launch(body, 2, tmp_path)
    else:
        with pytest.raises(px.RankFailed):
            launch(body, 2, tmp_path, timeout=5, grace=0.2)
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"{rank}").read_text().split()]
    assert len(pids) == 6
    assert gone(pids)


def test_nothing_is_left_open() -> None:
    launch(total, 2, 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        launch(total, 2, 0)
    assert len(os.listdir("/proc/self/fd")) == before


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: launch(4, print), r"fn=4 is not valid \(expected a function, as in launch\(fn, 4\)\)"),
        (lambda: launch(print, 0), "n=0 is not valid"),
        (lambda: launch(print, "4"), "n='4' is not valid"),
        (lambda: launch(print, 1, timeout=0), "timeout=0 is not valid"),
        (lambda: launch(print, 1, grace=-1), "grace=-1 is not valid"),
        (lambda: launch(print, 1, env={"RANK": "3"}), "launch sets RANK itself"),
        (lambda: launch(print, 1, env={"A": 3}), "expected strings"),
        (lambda: launch(print, 2, threading.Lock()), "cannot send the function and its arguments to the ranks"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(px.UsageError, match=words):
        call()


def test_what_cannot_be_copied_is_named() -> None:
    guard = threading.Lock()

    def use() -> None:
        with guard:
            pass

    with pytest.raises(px.UsageError, match=r"cannot send 'guard', which .*use uses, .* \(make it inside the function"):
        launch(use, 2)


def test_a_function_can_be_given_by_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The user's own modules are imported by each rank, so that a change is seen at once.
    monkeypatch.syspath_prepend(str(tmp_path))
    program = textwrap.dedent("""
        import importlib, pathlib, sys
        sys.path.insert(0, sys.argv[1])
        sys.dont_write_bytecode = True
        import phalanx as px
        for number in (1, 2):
            folder = pathlib.Path(sys.argv[1])
            # Of another length: a file of bytecode is known by seconds and bytes.
            (folder / "inner_part.py").write_text("\\n" * number + f"value = {number}")
            (folder / "outer_part.py").write_text("import inner_part\\ndef f(): return inner_part.value")
            for name in ("outer_part", "inner_part"):
                sys.modules.pop(name, None)
            importlib.invalidate_caches()
            print(px.launch(importlib.import_module("outer_part").f, 1))
    """)
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "[1]\n[2]\n", done.stderr


# -- odd results and errors -----------------------------------------------------------------------------------------


class HasNoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def _raise_without_text() -> None:
    raise HasNoText


async def _coroutine() -> int:
    return 3


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_raise_without_text, r"HasNoText: \(its text cannot be shown"),
        (lambda: (i for i in range(3)), r"what the function returned cannot be sent back \(generator: "),
        (lambda: [1, threading.Lock()], r"what the function returned cannot be sent back \(.*lock"),
        (_coroutine, "is a coroutine function: nobody awaits it"),
    ],
)
def test_what_cannot_be_shown_or_sent_back_is_named(function: Callable[[], Any], words: str) -> None:
    with pytest.raises(px.RankFailed, match=f"^rank 0 failed: .*{words}") as caught:
        launch(function, 1)
    assert "phalanx/" not in str(caught.value)
