"""However a job ends, it ends whole: the right exit code, the right words, and no process left."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.run.support import LIMIT, PROGRAM, Runner, alive, run, tail_after, wait_for  # noqa: F401
from tests.lateness import bound

STUBBORN = """
    import os, pathlib, signal, sys, time
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    pathlib.Path("ready-" + os.environ["RANK"]).touch()
    time.sleep(300)
"""
SLEEP = """
    import os, pathlib, time
    pathlib.Path("ready-" + os.environ["RANK"]).touch()
    time.sleep(300)
"""


def ready(run: Runner, ranks: int) -> None:
    wait_for(lambda: all((run.folder / f"ready-{rank}").exists() for rank in range(ranks)), "all ranks to be ready")


# -- a rank fails ------------------------------------------------------------------------------------------------------


def test_exit_code_and_traceback_of_the_rank_that_failed(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, sys, time
        rank = int(os.environ["RANK"])
        pathlib.Path(f"ready-{rank}").touch()
        if rank == 2:
            while not all(pathlib.Path(f"ready-{r}").exists() for r in range(4)):
                time.sleep(0.01)
            raise RuntimeError("rank 2 breaks")
        while True:
            print("rank", rank, "works", file=sys.stderr)
            time.sleep(0.01)
        """
    )
    job = run("-n", "4", "--log-dir", "logs", script)
    assert job.process.returncode == 1
    heading = next(
        i for i, line in enumerate(job.err.splitlines()) if line.startswith("phalanx: rank 2 failed: exit code 1")
    )
    assert heading
    where = next(line for line in job.err.splitlines() if "process" in line)
    assert "logs/rank-2.stderr.log" in where
    assert os.uname().nodename in where
    last = tail_after(job.err, "its traceback")
    assert last[0] == "Traceback (most recent call last):"
    assert last[-1] == "RuntimeError: rank 2 breaks"
    assert "ended by the launcher: ranks 0, 1 and 3" in job.err
    run.assert_nothing_left()


@pytest.mark.parametrize("code", [3, 255])
def test_exit_code(run: Runner, code: int) -> None:
    job = run(
        "-n", "2", run.script(f"import os, sys, time\nif os.environ['RANK'] == '1': sys.exit({code})\ntime.sleep(300)")
    )
    assert job.process.returncode == code
    assert f"rank 1 failed: exit code {code}" in job.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_rank_killed_by_a_signal(run: Runner, number: signal.Signals) -> None:
    script = run.script(
        f"""
        import os, time
        print("last words", flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), {int(number)})
        time.sleep(300)
        """
    )
    job = run("-n", "3", script)
    assert job.process.returncode == 128 + number
    assert f"rank 1 failed: killed by {number.name}" in job.err
    assert job.err.splitlines()[-1] == "last words"


def test_a_rank_of_a_world_that_is_interrupted_has_the_exit_code_of_that_signal(run: Runner) -> None:
    script = run.script(
        """
        import os, signal, time
        import phalanx as px
        if px.init().rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)
        """
    )
    job = run("-n", "2", script)
    assert job.process.returncode == 128 + signal.SIGINT
    assert "phalanx: rank 1 failed: killed by SIGINT" in job.err
    assert "KeyboardInterrupt" in job.err


def test_chained_exceptions_are_shown_whole(run: Runner) -> None:
    script = run.script(
        """
        import sys
        print("noise", file=sys.stderr)
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")
        """
    )
    job = run(script)
    last = tail_after(job.err, "its traceback")
    assert "KeyError: 'first'" in last
    assert last[-1] == "ValueError: second"
    assert "noise" not in last


def test_others_get_sigterm_and_the_grace_period(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, signal, sys, time
        rank = int(os.environ["RANK"])
        def tidy(number, frame):
            time.sleep(0.5)
            print("tidied up")
            sys.exit(0)
        signal.signal(signal.SIGTERM, tidy)
        pathlib.Path(f"ready-{rank}").touch()
        if rank == 0:
            while not pathlib.Path("ready-1").exists():
                time.sleep(0.01)
            sys.exit(7)
        time.sleep(300)
        """
    )
    job = run("-n", "2", script)
    assert job.process.returncode == 7
    assert job.out == "[1] tidied up\n"


def test_those_who_ignore_sigterm_are_killed(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, signal, subprocess, sys, time
        rank = int(os.environ["RANK"])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if rank == 1:
            subprocess.Popen(["sleep", "300"])                           # inherits what is ignored
            subprocess.Popen(["sleep", "300"], start_new_session=True)
            pathlib.Path("ready").touch()
            time.sleep(300)
        while not pathlib.Path("ready").exists():
            time.sleep(0.01)
        sys.exit(9)
        """
    )
    start = time.monotonic()
    job = run("-n", "2", "--grace", "1", script)
    assert job.process.returncode == 9
    assert time.monotonic() - start >= 1
    run.assert_nothing_left()


def test_grandchildren_end_too(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, subprocess, sys, time
        code = "import os, time; os.fork(); os.setsid() if os.getpid() != os.getsid(0) else None; time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", code])
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        # A daemon: its parent is gone, its session is its own, and it knows nothing of its environment.
        subprocess.run(["env", "-i", "sh", "-c", "setsid sleep 298 >/dev/null 2>&1 &"], check=True)
        time.sleep(0.5)
        sys.exit(int(sys.argv[1]))
        """
    )

    def daemons() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += [entry.parent.name] if entry.read_bytes() == b"sleep\x00298\x00" else []
            except OSError:
                continue
        return found

    before = daemons()
    for code in (0, 5):
        job = run("-n", "2", script, str(code))
        assert job.process.returncode == code
        run.assert_nothing_left()
        assert daemons() == before


def test_the_first_to_fail_is_blamed_not_those_who_follow(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, sys, time
        rank = int(os.environ["RANK"])
        if rank != 3:
            while not pathlib.Path("failed").exists():
                time.sleep(0.001)
            time.sleep(0.05)
            raise ConnectionError("lost somebody")
        sys.stderr.write("the root\\n")
        pathlib.Path("failed").touch()
        os._exit(4)
        """
    )
    job = run("-n", "4", script)
    assert job.process.returncode == 4
    assert "phalanx: rank 3 failed: exit code 4" in job.err
    assert "then failed: rank" in job.err
    assert job.err.splitlines()[-1] == "the root"


def test_success_of_all_is_success(run: Runner) -> None:
    job = run("-n", "4", run.script("import os, time; time.sleep(0.1 * int(os.environ['RANK']))"))
    assert (job.process.returncode, job.out, job.err) == (0, "", "")


def test_grandchildren_left_behind_get_the_grace_period(run: Runner) -> None:
    child = "trap 'sleep 0.3; echo tidied; exit' TERM; echo ready; while :; do sleep 0.05; done"
    script = run.script(
        f"""
        import subprocess
        child = subprocess.Popen(["sh", "-c", {child!r}], stdout=subprocess.PIPE, start_new_session=True)
        child = subprocess.Popen(["sh", "-c", {child!r}], start_new_session=True)
        """
    )
    job = run(script)
    assert job.process.returncode == 0
    assert "tidied" in job.out
    run.assert_nothing_left()


# -- the launcher is told to end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_to_the_launcher(run: Runner, number: signal.Signals) -> None:
    job = run.start("-n", "2", run.script(SLEEP))
    ready(run, 2)
    start = time.monotonic()
    job.process.send_signal(number)
    assert job.finish() == 128 + number
    assert time.monotonic() - start < bound(5)
    assert f"got {number.name}; ending ranks 0 and 1" in job.err
    assert "failed" not in job.err
    run.assert_nothing_left()


def test_a_signal_while_the_ranks_are_being_started(run: Runner) -> None:
    job = run("-n", "1000", "--grace", "1", "--no-python", "sh", "-c", "kill -TERM $PPID; exec sleep 60")
    assert job.process.returncode == 128 + signal.SIGTERM
    found = re.search(r"got SIGTERM; ending rank(?:s 0 (?:to|and) (\d+)| 0)", job.err)
    assert found is not None, job.err
    assert int(found[1] or 0) < 999, "the rest was not started"
    run.assert_nothing_left()


def test_an_absurd_number_of_ranks(run: Runner) -> None:
    job = run("-n", "1000000", run.script("pass"))
    assert job.process.returncode == 2
    assert "-n 1000000 is too many (at most 4096 ranks on a node)" in job.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stubborn_ranks_end_in_one_grace_period(run: Runner, number: signal.Signals) -> None:
    job = run.start("-n", "2", "--grace", "1", run.script(STUBBORN))
    ready(run, 2)
    start = time.monotonic()
    job.process.send_signal(number)
    assert job.finish() == 128 + number
    assert 1 <= time.monotonic() - start < bound(4)
    run.assert_nothing_left()


def test_no_grace(run: Runner) -> None:
    job = run.start("-n", "2", "--grace", "0", run.script(STUBBORN))
    ready(run, 2)
    job.process.terminate()
    assert job.finish(10) == 143
    run.assert_nothing_left()


def test_hangup_is_ignored_under_nohup(run: Runner) -> None:
    job = run.start(run.script(SLEEP), through=["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"])
    ready(run, 1)
    job.process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(0.5)
    job.process.terminate()
    assert job.finish() == 143


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_are_forwarded_to_the_ranks_only(run: Runner, number: signal.Signals) -> None:
    script = run.script(
        f"""
        import os, pathlib, signal, subprocess, sys, time
        def got(number, frame):
            print("got", signal.Signals(number).name)
            sys.exit(0 if child.poll() is None else 3)
        child = subprocess.Popen(["sleep", "300"])
        signal.signal({int(number)}, got)
        pathlib.Path("ready-" + os.environ["RANK"]).touch()
        time.sleep(300)
        """
    )
    job = run.start("-n", "2", script)
    ready(run, 2)
    job.process.send_signal(number)
    assert job.finish() == 0, job.err
    assert sorted(job.out.splitlines()) == [f"[0] got {number.name}", f"[1] got {number.name}"]
    run.assert_nothing_left()


class Terminal:
    """A launcher in the foreground of a terminal of its own."""

    BECOME = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"

    def __init__(self, run: Runner, *arguments: str) -> None:
        self.descriptor, theirs = pty.openpty()
        self.job = run.start(
            *arguments,
            env={"TERM": "xterm"},
            through=[sys.executable, "-c", self.BECOME],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def hang_up(self) -> int:
        os.close(self.descriptor)
        return self.job.process.wait(LIMIT)

    def finish(self) -> int:
        while True:
            try:
                data = os.read(self.descriptor, 4096)
            except OSError:  # Linux says EIO when the last writer is gone
                break
            if not data:
                break
            self.seen += data
        return self.hang_up()


def test_ctrl_c_on_a_terminal(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib, time
        try:
            pathlib.Path("ready-" + os.environ["RANK"]).touch()
            time.sleep(300)
        except KeyboardInterrupt:
            print("interrupted once")
        """
    )
    terminal = Terminal(run, "-n", "2", script)
    ready(run, 2)
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert terminal.seen.count(b"interrupted once") == 2
    run.assert_nothing_left()


def test_second_ctrl_c_kills_at_once(run: Runner) -> None:
    terminal = Terminal(run, "-n", "2", "--grace", "120", run.script(STUBBORN))
    ready(run, 2)
    start = time.monotonic()
    terminal.type(b"\x03")
    time.sleep(0.5)  # two at once would be one signal
    assert len(alive(run.mark)) == 5  # launcher, directory, guardian, two ranks
    terminal.type(b"\x03")
    assert terminal.finish() == 130
    assert time.monotonic() - start < bound(30)
    run.assert_nothing_left()


def test_rank_0_can_read_from_the_terminal(run: Runner) -> None:
    script = run.script(
        """
        import os, pathlib
        pathlib.Path("ready-" + os.environ["RANK"]).touch()
        if os.environ["RANK"] == "0":
            print("hello", input())
        """
    )
    terminal = Terminal(run, "-n", "2", script)
    ready(run, 2)
    terminal.type(b"world\n")
    assert terminal.finish() == 0
    assert b"hello world" in terminal.seen


def test_terminal_that_disappears(run: Runner) -> None:
    terminal = Terminal(run, "-n", "2", run.script(SLEEP))
    ready(run, 2)
    assert terminal.hang_up() in (129, 141)
    run.assert_nothing_left()


# -- the launcher is killed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_ranks_die_with_the_launcher(run: Runner, number: signal.Signals) -> None:
    script = run.script(
        """
        import os, pathlib, signal, subprocess, time
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["setsid", "sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        pathlib.Path("ready-" + os.environ["RANK"]).touch()
        time.sleep(300)
        """
    )
    job = run.start("-n", "2", script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready(run, 2)
    assert len(alive(run.mark)) == 3 + 2 * 4
    job.process.send_signal(number)
    job.process.wait(LIMIT)
    run.assert_nothing_left(limit=5)


def test_launcher_killed_while_it_starts(run: Runner) -> None:
    script = run.script(SLEEP)
    for delay in (0.1, 0.2, 0.25, 0.3, 0.35, 0.4):
        job = run.start("-n", "8", script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        job.process.kill()
        job.process.wait(LIMIT)
        run.assert_nothing_left(limit=10)


def test_rank_dies_with_the_launcher_even_without_a_guardian(run: Runner) -> None:
    job = run.start("-n", "2", run.script(STUBBORN), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready(run, 2)
    (guardian,) = [pid for pid, command in alive(run.mark).items() if "guardian.py" in command]
    os.kill(guardian, signal.SIGKILL)
    job.process.kill()
    job.process.wait(LIMIT)
    run.assert_nothing_left(limit=5)


def test_guardian_is_not_impressed_by_signals(run: Runner) -> None:
    job = run.start("-n", "1", run.script(STUBBORN), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready(run, 1)
    (guardian,) = [pid for pid, command in alive(run.mark).items() if "guardian.py" in command]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guardian, number)
    job.process.kill()
    job.process.wait(LIMIT)
    run.assert_nothing_left(limit=5)


def test_a_job_does_not_touch_another(run: Runner) -> None:
    other = run.start("-n", "1", run.script(SLEEP, "other.py"))
    ready(run, 1)
    job = run("-n", "2", run.script("import sys; sys.exit(1)", "job.py"))
    assert job.process.returncode == 1
    assert other.process.poll() is None
    other.process.terminate()
    assert other.finish() == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_job_inside_a_job_ends_with_it(run: Runner, number: signal.Signals) -> None:
    inner = run.script(
        """
        import os, pathlib, subprocess, time
        subprocess.Popen(["setsid", "sleep", "300"])
        pathlib.Path("ready-" + os.environ["RANK"]).touch()
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            pathlib.Path("told-" + os.environ["RANK"]).touch()
            time.sleep(0.5)
        """,
        "inner.py",
    )
    outer = run.script(f"import subprocess\nsubprocess.run({[*PROGRAM, 'run', '-n', '2', inner]!r})")
    job = run.start(outer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready(run, 2)
    job.process.send_signal(number)
    job.process.wait(LIMIT)
    run.assert_nothing_left(limit=5 if number == signal.SIGKILL else 0)
    assert len(list(run.folder.glob("told-*"))) == (2 if number == signal.SIGINT else 0)


def test_launcher_leaves_no_port(run: Runner) -> None:
    script = run.script(
        "import os; print(os.environ['MASTER_PORT'], os.environ['PHALANX_DIRECTORY'].rpartition(':')[2])"
    )
    job = run(script)
    ports = {int(port) for port in re.findall(r"\d{3,}", job.out)}
    assert len(ports) == 2
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            address, state = row.split()[1], row.split()[3]
            if state == "0A":
                listening.add(int(address.rpartition(":")[2], 16))
    assert not ports & listening
