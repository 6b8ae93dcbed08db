"""Every example runs as its first lines say."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lateness import bound

pytestmark = pytest.mark.timeout(120)

EXAMPLES = Path(__file__).parent.parent / "examples"
LAUNCHED = {
    "hello.py": [
        "Hello from rank 0 of {n}; the mean of all ranks is {mean}",
        "Hello from rank 1 of {n}; the mean of all ranks is {mean}",
        "The sum of all ranks went around the ring: {sum}",
    ],
    "objects.py": ["rank 0 sent the settings", "rank 1 is process", "has weights of shape (64, 128)"],
    "train_numpy.py": ["{n} ranks, 400 steps", "replicas identical: yes"],
    "parameter_server.py": ["loss in the beginning", "loss after 200 updates", "rank 1: 300 gradients", "final loss"],
    "evaluator.py": [
        "step 200: 92.8% of the images are right in 12 of 12 batches",
        "step 1000: 96.1% of the images are right in 12 of 12 batches, known after training",
        "cancelled: True",
        "evaluator: gave step 1000 up after",
        "batch 3: loss 0.128 on 32 images",
    ],
}
ALONE = {
    "hello.py": ["Hello from rank 0 of 1", "Alone"],
    "objects.py": ["rank 0 sent the settings", "to 0 others"],
    "train_numpy.py": ["1 ranks, 400 steps", "replicas identical: yes"],
    "parameter_server.py": ["loss after 300 updates", "rank 0: 300 gradients", "final loss"],
    "evaluator.py": [
        "step 1000: 96.1% of the images are right in 12 of 12 batches, known after training",
        "cancelled: True",
        "batch 3: loss 0.128 on 32 images",
    ],
}


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = ("RANK", "WORLD_SIZE", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in own} | env
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@functools.cache
def launched(name: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """One run of an example for all tests that read what it says."""
    return run("-m", "phalanx", "run", "-n", str(ranks), str(EXAMPLES / name))


RANKS = {"hello.py": 4, "objects.py": 4, "train_numpy.py": 2, "parameter_server.py": 4, "evaluator.py": 2}


@pytest.mark.parametrize(("name", "ranks"), RANKS.items())
def test_an_example_under_the_launcher(name: str, ranks: int) -> None:
    done = launched(name, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in LAUNCHED[name]:
        assert words.format(n=ranks, sum=ranks * (ranks - 1) // 2, mean=(ranks - 1) / 2) in done.stdout


@pytest.mark.parametrize("name", list(ALONE))
def test_an_example_by_plain_python(name: str) -> None:
    done = run(str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    for words in ALONE[name]:
        assert words in done.stdout


def test_training_learns() -> None:
    done = launched("train_numpy.py", 2)
    accuracy = re.search(r"([\d.]+)% of the test images are right", done.stdout)
    assert accuracy, done.stdout + done.stderr
    assert float(accuracy[1]) > 95


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parameter_server_learns_from_all_workers(ranks: int) -> None:
    done = launched("parameter_server.py", ranks)
    first, last = (re.search(rf"{when}: ([\d.]+)", done.stdout) for when in ("in the beginning", "final loss"))
    assert first, done.stdout + done.stderr
    assert last, done.stdout + done.stderr
    assert float(first[1]) > 1  # other workers may have begun before the server looks for the first time
    assert float(last[1]) < 0.02
    workers = re.findall(r"rank (\d): 300 gradients", done.stdout)
    assert sorted(map(int, workers)) == list(range(1, ranks))


def test_an_evaluation_with_little_time_answers_with_what_it_has() -> None:
    done = launched("evaluator.py", 2)
    part = re.search(r"in (\d+) of 12 batches, known within half a second", done.stdout)
    assert part or "'evaluate' on rank 1: no answer within 0.5 s" in done.stdout, done.stdout + done.stderr
    assert not part or int(part[1]) < 12


def test_survivors_say_who_was_lost() -> None:
    done = run("-m", "phalanx", "run", "-n", "4", str(EXAMPLES / "failure.py"))
    assert done.returncode != 0
    noticed = re.findall(r"rank (\d) noticed after ([\d.]+) s: rank 3 is lost", done.stdout)
    assert sorted(int(rank) for rank, _ in noticed) == [0, 1, 2], done.stdout + done.stderr
    assert all(float(seconds) < bound(1) for _, seconds in noticed)


def test_failure_alone_says_what_it_needs() -> None:
    done = run(str(EXAMPLES / "failure.py"))
    assert done.returncode == 1
    assert "phalanx run -n 4" in done.stderr


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


GPT_LOSSES = [4.317921, 4.182001, 4.076808]
"""Of the first steps of two ranks, the same however they are wrapped."""


@needs("torch")
@pytest.mark.parametrize(
    "launcher",
    [
        "-m phalanx run -n 2 {file} --wrap torch-ddp",
        "-m phalanx run -n 2 {file} --wrap fsdp2 --write 20",
        "-m torch.distributed.run --nproc-per-node 2 {file} --wrap phalanx",
        "-m phalanx run -n 2 {file} --wrap phalanx-fsdp --write 20",
    ],
)
def test_the_gpt_has_the_same_losses_however_it_is_wrapped(launcher: str) -> None:
    done = run(*launcher.format(file=EXAMPLES / "train_gpt.py").split(), "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    assert losses == pytest.approx(GPT_LOSSES, rel=1e-4)  # the last digits are the processor's
    assert "2 ranks" in done.stdout
    assert "fsdp" in launcher or "replicas identical: yes" in done.stdout


@needs("torch")
def test_the_gpt_alone_learns() -> None:
    done = run(str(EXAMPLES / "train_gpt.py"), "--steps", "20")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert losses[0] > 4
    assert losses[-1] < 3.3
    assert "1 ranks, torch-ddp on phalanx" in done.stdout


@needs("jax")
@pytest.mark.parametrize("launcher", [[], ["-m", "phalanx", "run", "-n", "2"]])
def test_training_with_jax(launcher: list[str]) -> None:
    # As on a machine where JAX would take the GPU.
    done = run(*launcher, str(EXAMPLES / "train_jax.py"), JAX_PLATFORMS="cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"([\d.]+)% of the test images are right", done.stdout)
    assert accuracy, done.stdout + done.stderr
    assert float(accuracy[1]) > 95
    assert "replicas identical: yes" in done.stdout


def test_no_example_is_forgotten() -> None:
    others = {"failure.py", "train_elastic.py", "train_gpt.py", "train_jax.py"}
    assert RANKS.keys() == LAUNCHED.keys()
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*LAUNCHED, *others}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_elastic_training_survives_kills(library: str) -> None:
    """Two ranks are killed by hand, as the example's first lines invite to."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    words = ["-m", "phalanx", "run", "--elastic", "2:3", str(EXAMPLES / "train_elastic.py"), library, "0.02"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        lines: list[str] = []
        processes: dict[int, int] = {}
        for line in job.stdout:
            lines.append(line)
            found = re.search(r"rank (\d+) is process (\d+)", line)
            if found:
                processes[int(found[1])] = int(found[2])
            if len(processes) == 3 and found:
                os.kill(processes[1], signal.SIGKILL)
            if "go on without rank 1" in line:
                os.kill(processes[0], signal.SIGKILL)
    output = "".join(lines)
    assert job.returncode == 0, output
    ends = re.findall(
        r"300 steps, 28800 samples, last with (\d) ranks: ([\d.]+)% of the images are right, weights (\w+)", output
    )
    assert len({weights for _, _, weights in ends}) == 1, output
    assert float(ends[0][1]) > 90
    assert "starting rank 3 in its place" in output
    assert "starting rank 4 in its place" in output


def test_elastic_training_alone() -> None:
    done = run(str(EXAMPLES / "train_elastic.py"))
    assert done.returncode == 0, done.stderr
    assert "300 steps, 28800 samples, last with 1 ranks" in done.stdout
