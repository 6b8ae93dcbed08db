"""What the ranks write reaches the reader whole: by lines, unharmed, and without filling the launcher's memory."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli.run.support import LIMIT, Runner, lines_of, run, wait_for  # noqa: F401

from phalanx.launching.lines import MAX_LINE, PARTIAL_AFTER, PROGRESS, REDRAW, LineOutput, LineStream


class Page:
    """A screen that keeps what is put on it."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.data = b""
        self.screen = LineOutput(self._put, terminal=terminal, colour=False)

    def _put(self, data: bytes) -> None:
        self.data += data

    def stream(self, rank: int) -> LineStream:
        return LineStream(self.screen, f"[{rank}] ".encode())


# -- lines, without any process ----------------------------------------------------------------------------------------


def test_lines_are_written_once_they_are_complete() -> None:
    page = Page()
    a, b = page.stream(0), page.stream(1)
    a.feed(b"one\ntw", 0)
    b.feed(b"other\n", 0)
    a.feed(b"o\n\nlast", 0)
    a.finish()
    assert page.data == b"[0] one\n[1] other\n[0] two\n[0] \n[0] last\n"


def test_bytes_are_cut_anywhere() -> None:
    text = b"alpha\n\xff\xfe\x80 not UTF-8\n" + "ünïcödé\n".encode() + b"\x1b[31mred\x1b[0m\nend"
    whole = b"".join(b"[0] " + line + b"\n" for line in text.split(b"\n"))
    for size in range(1, len(text) + 1):
        page = Page()
        stream = page.stream(0)
        for start in range(0, len(text), size):
            stream.feed(text[start : start + size], 0)
        stream.finish()
        assert page.data == whole


def test_partial_line_is_shown_after_a_while_and_goes_on() -> None:
    page = Page()
    a = page.stream(0)
    a.feed(b"name? ", 10.0)
    assert page.data == b""
    assert a.due() == 10.0 + PARTIAL_AFTER
    a.flush(a.due())
    assert page.data == b"[0] name? "
    assert a.due() == float("inf")
    a.feed(b"thanks\nnext\n", 12.0)
    assert page.data == b"[0] name? thanks\n[0] next\n"


def test_partial_line_that_another_rank_interrupts_is_written_again_whole() -> None:
    page = Page()
    a, b = page.stream(0), page.stream(1)
    a.feed(b"half", 0)
    a.flush(1.0)
    b.feed(b"whole\n", 1.0)
    a.feed(b" a line\n", 2.0)
    assert page.data == b"[0] half\n[1] whole\n[0] half a line\n"


def test_messages_of_the_launcher_start_a_line() -> None:
    page = Page()
    a = page.stream(0)
    a.feed(b"half", 0)
    a.flush(1.0)
    page.screen.say("phalanx: a word")
    assert page.data == b"[0] half\nphalanx: a word\n"


def test_progress_bar_on_a_terminal_is_redrawn() -> None:
    page = Page(terminal=True)
    a = page.stream(0)
    a.feed(b"\r10%", 0.0)
    assert a.due() == REDRAW
    a.flush(0.1)
    for step in range(11, 100):
        a.feed(b"\r%d%%" % step, 0.1 + step / 1000)
    assert a.due() == pytest.approx(0.1 + REDRAW)
    a.flush(0.2)
    a.feed(b"\r100%\n", 0.3)
    assert page.data == b"[0] 10%\r[0] 99%\x1b[K\r[0] 100%\x1b[K\n"


def test_progress_bar_in_a_pipe_is_rare() -> None:
    page = Page()
    a = page.stream(0)
    shown = 0
    for step in range(1000):  # 100 seconds of a bar that is drawn ten times a second
        now = step / 10
        a.feed(b"step %d\r" % step, now)
        if a.due() <= now:
            a.flush(now)
            shown += 1
    a.feed(b"done\n", 101.0)
    lines = page.data.splitlines()
    assert 100 / PROGRESS - 2 <= shown <= 100 / PROGRESS
    assert len(lines) == shown + 1
    assert all(re.fullmatch(rb"\[0\] step \d+", line) for line in lines[:-1])
    assert lines[-1] == b"[0] done"


def test_two_progress_bars_on_a_terminal_do_not_fight() -> None:
    page = Page(terminal=True)
    bars = [page.stream(0), page.stream(1)]
    for step in range(1000):
        for bar in bars:
            now = step / 10
            bar.feed(b"\rstep %d" % step, now)
            if bar.due() <= now:
                bar.flush(now)
    assert page.data.count(b"\n") <= 2 * 2 * 100 / PROGRESS


def test_windows_line_ends() -> None:
    page = Page()
    a = page.stream(0)
    for piece in (b"one\r", b"\ntwo\r\nthr", b"ee\r\n"):
        a.feed(piece, 0)
    assert page.data == b"[0] one\n[0] two\n[0] three\n"


def test_endless_line_is_not_kept() -> None:
    page = Page()
    a = page.stream(0)
    piece = b"x" * 1000
    for _ in range(1000):
        a.feed(piece, 0)
        assert len(a._line) <= MAX_LINE + len(piece)
    a.feed(b"\n", 0)
    assert page.data == b"[0] " + b"x" * 1_000_000 + b"\n"


# -- with processes ----------------------------------------------------------------------------------------------------


def test_lines_of_many_ranks_are_never_torn(run: Runner) -> None:
    script = run.script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for i in range(2000):
            # Unbuffered, so each piece is a write of its own.
            print("rank", rank, "line", i, "." * (i % 200))
            if i % 10 == 0:
                print("rank", rank, "line", i, "." * (i % 200), file=sys.stderr)
        """
    )
    job = run.start("-n", "4", script, stderr=subprocess.STDOUT)
    assert job.finish() == 0
    for line in job.out.splitlines():
        found = re.fullmatch(r"\[(\d)\] rank (\d) line (\d+) (\.*)", line)
        assert found, line
        assert found[1] == found[2]
        assert len(found[4]) == int(found[3]) % 200
    for rank in range(4):
        assert len(lines_of(job.out, rank)) == 2200


def test_outputs_stay_apart(run: Runner) -> None:
    job = run(run.script("import sys; print('out'); print('err', file=sys.stderr)"))
    assert (job.out, job.err) == ("[0] out\n", "[0] err\n")


def test_no_prefix(run: Runner) -> None:
    job = run("-n", "2", "--no-prefix", run.script("print('plain')"))
    assert job.out == "plain\nplain\n"


def test_bytes_pass_through(run: Runner) -> None:
    script = run.script("import os; os.write(1, bytes(range(128, 256)) + b'\\n' + 'ü\\n'.encode() + b'\\xc3')")
    job = run.start(script)
    out, _ = job.process.communicate(timeout=LIMIT)
    assert out == b"[0] " + bytes(range(128, 256)) + "\n[0] ü\n".encode() + b"[0] \xc3\n"


def test_prompt_without_a_line_end_appears(run: Runner) -> None:
    job = run.start(run.script("input('name? ')"), stdin=subprocess.PIPE)
    assert job.process.stdout is not None
    ready, _, _ = select.select([job.process.stdout], [], [], LIMIT)
    assert ready
    assert os.read(job.process.stdout.fileno(), 100) == b"[0] name? "
    job.process.communicate(b"me\n", timeout=LIMIT)
    assert job.process.returncode == 0


def test_log_files(run: Runner, tmp_path: Path) -> None:
    script = run.script(
        """
        import os, sys
        os.write(1, b"out of %s\\r\\n\\xff" % os.environ["RANK"].encode())
        os.write(2, b"err")
        """
    )
    logs = tmp_path / "deep" / "logs"
    job = run("-n", "2", "--log-dir", str(logs), script)
    assert job.process.returncode == 0, job.err
    assert sorted(path.name for path in logs.iterdir()) == [
        "rank-0.stderr.log",
        "rank-0.stdout.log",
        "rank-1.stderr.log",
        "rank-1.stdout.log",
    ]
    for rank in (0, 1):
        assert (logs / f"rank-{rank}.stdout.log").read_bytes() == b"out of %d\r\n\xff" % rank
        assert (logs / f"rank-{rank}.stderr.log").read_bytes() == b"err"
    assert lines_of(job.out, 1)[0] == "out of 1"


def test_log_folder_that_cannot_be_made(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = run("--log-dir", str(tmp_path / "file" / "logs"), run.script(""))
    assert job.process.returncode in (1, 2)
    assert "log folder" in job.err


def resident(pid: int) -> int:
    """Bytes of memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_fast_writers_do_not_fill_the_launcher(run: Runner) -> None:
    script = run.script(
        """
        import os
        data = (b"y" * 60 + b"\\n") * 1000
        while True:
            os.write(1, data)
        """
    )
    job = run.start("-n", "2", script)
    assert job.process.stdout is not None
    descriptor = job.process.stdout.fileno()
    read = len(os.read(descriptor, 1 << 16))
    # Nobody reads for a while: what the ranks write must wait in them, not in the launcher.
    start = resident(job.pid)
    peak = start
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        peak = max(peak, resident(job.pid))
        time.sleep(0.02)
    # Then somebody reads as fast as possible.
    while read < 100 << 20:
        read += len(os.read(descriptor, 1 << 20))
        peak = max(peak, resident(job.pid))
    assert peak - start < 24 << 20
    # Nobody reads again, and still the launcher listens.
    job.process.terminate()
    assert job.process.wait(LIMIT) == 143
    run.assert_nothing_left()


def test_lines_without_end_do_not_fill_the_launcher(run: Runner) -> None:
    job = run.start(run.script("import os\nwhile True: os.write(1, b'z' * 65536)"))
    assert job.process.stdout is not None
    start, peak, read = 0, 0, 0
    while read < 100 << 20:
        read += len(os.read(job.process.stdout.fileno(), 1 << 20))
        peak = max(peak, resident(job.pid))
        start = start or peak
    assert peak - start < 24 << 20
    job.process.terminate()
    assert job.process.wait(LIMIT) == 143


def test_a_reader_that_does_not_read_cannot_hold_the_end(run: Runner) -> None:
    # The rank is done long before its output is read; Ctrl-C still ends the launcher.
    job = run.start(run.script("import os, pathlib\nos.write(1, b'x\\n' * 100_000); pathlib.Path('done').touch()"))
    wait_for((run.folder / "done").exists, "the rank")
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(0.3)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(LIMIT) == 130


def test_a_reader_that_goes_away_ends_the_job(run: Runner) -> None:
    script = run.script("while True: print('y' * 100)")
    job = run.start("-n", "2", script)
    assert job.process.stdout is not None
    os.read(job.process.stdout.fileno(), 10)
    job.process.stdout.close()
    assert job.process.wait(LIMIT) == 141
    run.assert_nothing_left()


def test_output_of_a_grandchild_that_outlives_its_rank(run: Runner) -> None:
    script = run.script(
        """
        import subprocess
        subprocess.Popen(["sh", "-c", "sleep 1; echo late"], start_new_session=True)
        """
    )
    job = run("-n", "1", "--grace", "3", script)
    # It is told to go when its rank is done; what it wrote until then is shown, and nobody waits for its sleep.
    assert job.process.returncode == 0
    assert "late" not in job.out
    run.assert_nothing_left()


def on_a_terminal(run: Runner, *arguments: str, env: dict[str, str] | None = None) -> bytes:
    """Runs with a terminal as standard output and error; what appeared on it."""
    ours, theirs = pty.openpty()
    try:
        job = run.start(*arguments, env={"TERM": "xterm", **(env or {})}, stdout=theirs, stderr=theirs)
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # Linux says EIO when the last writer is gone
                break
            if not data:
                break
            seen += data
        assert job.process.wait(LIMIT) == 0
        return seen
    finally:
        os.close(ours)


def test_colour_on_a_terminal_only(run: Runner) -> None:
    script = run.script("print('hello')")
    assert on_a_terminal(run, script) == b"\x1b[36m[0]\x1b[0m hello\r\n"
    assert on_a_terminal(run, script, env={"NO_COLOR": "1"}) == b"[0] hello\r\n"
    assert on_a_terminal(run, script, env={"TERM": "dumb"}) == b"[0] hello\r\n"
    assert run(script).out == "[0] hello\n"


def test_two_ranks_have_two_colours(run: Runner) -> None:
    seen = on_a_terminal(run, "-n", "2", run.script("print('hello')"))
    assert len(set(re.findall(rb"\x1b\[\d+m\[\d\]", seen))) == 2


def test_everything_is_written_before_the_end(run: Runner) -> None:
    job = run("-n", "3", run.script("import sys; sys.stdout.write('line\\n' * 50_000)"))
    assert job.process.returncode == 0
    for rank in range(3):
        assert len(lines_of(job.out, rank)) == 50_000
