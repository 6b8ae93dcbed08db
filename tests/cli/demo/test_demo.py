"""The demo as a person runs it, at a terminal and in a pipe, and what it is made of."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.cli.demo.digits import load
from phalanx.cli.demo.follow import follow
from phalanx.cli.demo.model import Classifier
from phalanx.cli.demo.report import Outcome, TrainingStep
from phalanx.cli.demo.screen import next_steps, program

pytestmark = pytest.mark.timeout(120)

DEMO = [sys.executable, "-m", "phalanx", "demo"]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=100, check=False)


def outcome(**changes: object) -> Outcome:
    values: dict[str, object] = {
        "ranks": 2,
        "steps": 10,
        "parameters": 9610,
        "images": 1437,
        "accuracy": 0.975,
        "seconds": 2.0,
        "images_per_second": 320.0,
        "communicating": 0.25,
        "replicas": ["aa" * 32, "aa" * 32],
    }
    return Outcome(**{**values, **changes})  # type: ignore[arg-type]


# -- the whole thing -------------------------------------------------------------------------------------------------


def test_in_a_pipe_it_trains_proves_and_says_what_is_next() -> None:
    done = demo()
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "\x1b" not in done.stdout
    accuracy = re.search(r"accuracy: +([\d.]+)%", done.stdout)
    assert accuracy
    assert float(accuracy[1]) > 95
    assert re.search(r"throughput: +[\d,]+ images/s on 4 ranks", done.stdout)
    assert re.search(r"communicating: +\d+% of the ranks' processor time", done.stdout)
    assert "bit-identical" in done.stdout
    hashes = dict(re.findall(r"rank (\d): ([0-9a-f]{32})\n", done.stdout))
    assert sorted(hashes) == ["0", "1", "2", "3"]
    assert len(set(hashes.values())) == 1
    for command, _ in next_steps(4):
        assert f"  {command}\n" in done.stdout


def test_on_a_terminal_there_is_a_bar_and_the_terminal_is_left_as_it_was() -> None:
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [*DEMO, "-n", "2", "--steps", "50"], env=environment, stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    seen = b""
    with contextlib.suppress(OSError):  # how a terminal says that its last writer is gone
        while block := os.read(main, 65536):
            seen += block
    os.close(main)
    assert process.wait(20) == 0, seen.decode()
    text = seen.decode()
    assert "━" in text
    assert "50 of 50 steps" in text
    assert "bit-identical" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") > 0  # the cursor that was hidden is shown again


def test_one_rank_is_enough() -> None:
    done = demo("-n", "1", "--steps", "20")
    assert done.returncode == 0, done.stderr
    assert "rank 0: " in done.stdout


@pytest.mark.parametrize("arguments", [["-n", "0"], ["-n", "65"], ["--steps", "0"], ["--steps", "many"]])
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_a_job_that_fails_is_told_with_what_it_wrote(tmp_path: Path) -> None:
    # A NumPy that breaks in the ranks, as a real installation may.
    (tmp_path / "numpy.py").write_text("raise ImportError('libopenblas.so: cannot open shared object file')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*DEMO, "-n", "2"], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "libopenblas.so" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PHALANX_DEMO_TEST": str(tmp_path)}
    process = subprocess.Popen(
        [*DEMO, "-n", "2", "--steps", "100000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("phalanx-demo-*/events")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(marked(environment["PHALANX_DEMO_TEST"])) >= 4  # the demo, the launcher, the ranks
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert marked(environment["PHALANX_DEMO_TEST"]) == []
    assert list(tmp_path.glob("phalanx-demo-*")) == []


def marked(value: str) -> list[int]:
    """Processes that carry this test's variable."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and f"PHALANX_DEMO_TEST={value}".encode() in (
                folder / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def test_what_to_try_next_are_real_commands() -> None:
    for command, purpose in next_steps(2):
        words = shlex.split(command)
        assert purpose
        if "phalanx.cli.demo.train" in words:
            words += ["--steps", "20"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0 or (words[-1] == "doctor" and done.returncode == 1), (command, done.stderr)
        assert done.stdout


def test_what_to_try_next_is_written_for_the_shell_it_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "phalanx"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == "'my env/bin/phalanx'"  # not active, below the working directory
    monkeypatch.setenv("PATH", str(folder))
    assert program() == "phalanx"
    (folder / "phalanx").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program() == shlex.quote(str(folder / "python")) + " -m phalanx"


def test_the_job_by_itself_logs_a_few_lines() -> None:
    words = [sys.executable, "-m", "phalanx", "run", "-n", "2", "-m", "phalanx.cli.demo.train", "--steps", "40"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "step   40 of 40   loss" in done.stdout
    assert "bit-identical" in done.stdout
    assert done.stdout.count("loss") == 10


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_data_is_what_it_should_be() -> None:
    data = load()
    assert data.images.shape == (1437, 64)
    assert data.test_images.shape == (360, 64)
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert np.bincount(np.concatenate([data.labels, data.test_labels])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    rows = {row.tobytes() for row in data.images}
    assert not any(row.tobytes() in rows for row in data.test_images)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    data = load()
    model: Any = Classifier(64, 16, 10, seed=1)
    model.parameters = model.parameters.astype(np.float64)  # a difference quotient needs the digits
    model.layers = model._split(model.parameters)
    images, labels = data.images[:20].astype(np.float64), data.labels[:20]
    _, gradient = model.gradient(images, labels)
    random = np.random.default_rng(0)
    for _ in range(5):
        direction = random.normal(size=gradient.size)
        start = model.parameters.copy()
        losses = []
        for step in (1e-5, -1e-5):
            model.parameters[:] = start + step * direction
            losses.append(model.gradient(images, labels)[0])
        model.parameters[:] = start
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(float(gradient @ direction), rel=1e-4)


def test_different_replicas_are_told_by_rank() -> None:
    result = outcome(replicas=["aa" * 32, "bb" * 32])
    assert not result.identical
    lines = result.lines()
    assert any("DIFFERENT" in text for _, text in lines)
    assert [text for _, text in lines[-2:]] == [f"rank 0: {'aa' * 16}", f"rank 1: {'bb' * 16}"]


def test_many_replicas_are_told_in_groups() -> None:
    few = ["aa" * 32] * 9
    assert outcome(replicas=few).lines()[-1][1] == f"ranks 0 to 8: {'aa' * 16}"
    few[4] = "bb" * 32
    apart = [text for _, text in outcome(replicas=few).lines()[-2:]]
    assert apart == [f"ranks 0, 1, 2, 3, 5, 6, 7, 8: {'aa' * 16}", f"rank 4: {'bb' * 16}"]


def test_events_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "events"
    result = outcome()
    final = json.dumps(result.__dict__)
    # Each look at the job adds a piece; lines are cut anywhere.
    pieces = [
        "",
        '{"done": 1, "steps": 2, "lo',
        'ss": 0.5}\n{"done": 2,',
        ' "steps": 2, "loss": 0.25}\n' + final[:9],
        final[9:] + "\n",
    ]
    seen: list[TrainingStep] = []

    def running() -> bool:
        with path.open("a") as file:
            file.write(pieces.pop(0))
        return True

    assert follow(path, seen.append, running=running) == result
    assert seen == [TrainingStep(1, 2, 0.5), TrainingStep(2, 2, 0.25)]


def test_a_job_that_ends_without_a_result_gives_none() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert follow(Path(folder) / "events", lambda _: None, running=lambda: False) is None
