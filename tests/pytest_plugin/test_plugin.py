"""Tests on ranks, run by a pytest of their own: what passes, what is shown of what fails, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

HEAD = """
import os, sys, time
import numpy as np
import pytest
import phalanx as px
"""


@pytest.fixture
def tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    # Whatever else is installed here has no part in this.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "phalanx.pytest_plugin")
    # pytest shows more where it believes to be in continuous integration.
    for variable in ("PYTEST_ADDOPTS", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(variable, raising=False)
    return pytester


def run(tests: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    tests.makepyfile(test_it=HEAD + source)
    return tests.runpytest_subprocess("-p", "no:cacheprovider", "--strict-markers", *options)


def test_tests_run_on_ranks(tests: pytest.Pytester) -> None:
    result = run(
        tests,
        """
SCALE = 2

class Helper:
    def __init__(self, x):
        self.x = x

def scaled(x):
    return Helper(x).x * SCALE

@pytest.fixture
def number():
    return 7

@pytest.fixture(params=["a", "b"])
def letter(request):
    return request.param

@pytest.mark.ranks(3)
@pytest.mark.parametrize("start", [1, 10], ids=lambda value: f"from-{value}")
def test_function(world, start, number, letter, tmp_path):
    assert world.world_size == 3
    assert (scaled(start), number, letter in "ab") == (2 * start, 7, True)
    assert int(world.all_reduce(np.array([start]))[0]) == 3 * start
    (tmp_path / f"{world.rank}").touch()
    world.barrier()
    assert len(list(tmp_path.iterdir())) == 3

class TestMethods:
    @pytest.mark.ranks(2)
    def test_method(self, world):
        assert self.other() == world.world_size

    def other(self):
        return 2

@pytest.mark.ranks(2)
def test_without_a_world():
    assert os.environ["WORLD_SIZE"] == "2"

def test_without_ranks():
    assert "WORLD_SIZE" not in os.environ
""",
    )
    result.assert_outcomes(passed=7)


def test_a_failure_is_shown_as_ever_and_once(tests: pytest.Pytester) -> None:
    source = """
def compare(world):
    values = world.all_gather_object(world.rank)
    if world.rank == 2:
        assert values == [0, 1, 3], "they differ"
    world.barrier()

@pytest.mark.ranks(4)
def test_values(world):
    print("rank", world.rank)
    compare(world)
"""
    result = run(tests, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_values _*",
            "    @pytest.mark.ranks(4)",
            "    def test_values(world):",
            ">       compare(world)",
            "test_it.py:15:*",
            '>           assert values == [[]0, 1, 3[]], "they differ"',
            "E           AssertionError: they differ",
            "E           assert [[]0, 1, 2, 3[]] == [[]0, 1, 3[]]",
            "E*At index 2 diff: 2 != 3",
            "test_it.py:9: AssertionError",
            "*- rank 2 failed first -*",
            "3 ranks ended because of it",
            "*- Captured stdout call -*",
            "FAILED test_it.py::test_values - *rank 2: *they differ*",
        ]
    )
    text = result.stdout.str()
    assert text.count("assert values == ") == 1
    assert "pytest_plugin" not in text
    assert sorted(line for line in text.splitlines() if line.startswith("[")) == [f"[{r}] rank {r}" for r in range(4)]


def test_options_of_tracebacks_hold(tests: pytest.Pytester) -> None:
    source = "\n@pytest.mark.ranks(2)\ndef test_it(world):\n    secret = list(range(30))\n    assert secret == []\n"
    shown = run(tests, source, "--showlocals", "--tb=short", "-vv").stdout.str()
    assert "secret     = [0," in shown
    assert "    def test_it(world)" not in shown
    assert "Full diff" in shown
    assert "Full diff" not in run(tests, source).stdout.str()


def test_leaving_by_exit_is_a_failure(tests: pytest.Pytester) -> None:
    result = run(tests, "\n@pytest.mark.ranks(2)\ndef test_it(world):\n    sys.exit(0)\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the test called sys.exit(0)*"])


def test_skips_and_expected_failures(tests: pytest.Pytester) -> None:
    result = run(
        tests,
        """
@pytest.mark.ranks(2)
def test_all_skip(world):
    pytest.skip("not today")

@pytest.mark.ranks(2)
def test_one_skips(world):
    if world.rank == 1:
        pytest.skip("not here")
    world.barrier()

@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="never")
def test_marked(world): ...

@pytest.mark.ranks(2)
def test_xfail(world):
    pytest.xfail("known")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_expected(world):
    raise ValueError("as expected")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=KeyError)
def test_unexpected(world):
    raise ValueError("another one")

@pytest.mark.ranks(2)
def test_a_failure_is_not_hidden_by_a_skip():
    if os.environ["RANK"] == "0":
        pytest.skip("first")
    time.sleep(0.3)
    assert False

@pytest.mark.ranks(2)
def test_nor_by_one_that_comes_long_before():
    if os.environ["RANK"] == "0":
        pytest.skip("first")
    time.sleep(3)
    assert False

@pytest.mark.ranks(2)
def test_fail(world):
    pytest.fail("in words", pytrace=False)
""",
        "-rs",
    )
    result.assert_outcomes(skipped=3, xfailed=2, failed=4)
    result.stdout.fnmatch_lines(["SKIPPED * test_it.py:8: not today", "SKIPPED * test_it.py:13: not here"])
    result.stdout.fnmatch_lines(["*_ test_unexpected _*", "*ValueError: another one"])
    result.stdout.fnmatch_lines(["*_ test_fail _*", "in words"])


def test_what_has_no_traceback_is_named(tests: pytest.Pytester) -> None:
    result = run(
        tests,
        """
@pytest.mark.ranks(2)
def test_dies(world):
    if world.rank == 1:
        os._exit(3)
    world.barrier()

@pytest.mark.ranks(2, timeout=10)  # rank 0 is done within that time, also on a busy machine
def test_hangs(world):
    if world.rank == 1:
        time.sleep(60)
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*rank 1 failed: exited with code 3 before it was done", "*rank 0: PeerLost*"])
    result.stdout.fnmatch_lines(["*not done within 10 s: ranks 1", "*rank 1 was in:", "*line 15 in test_hangs"])
    assert "pytest_plugin" not in result.stdout.str()


def test_what_cannot_be_is_refused(tests: pytest.Pytester) -> None:
    result = run(
        tests,
        """
import threading, unittest

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.fixture
def early(world):
    return world.rank

@pytest.mark.ranks(2)
def test_lock(world, lock): ...

@pytest.mark.ranks(2)
def test_capsys(world, capsys): ...

@pytest.mark.ranks(2)
def test_early(early): ...

def test_no_mark(world): ...

@pytest.mark.ranks()
def test_no_number(world): ...

@pytest.mark.ranks(2, sizes=3)
def test_unknown_argument(world): ...

@pytest.mark.ranks(0)
def test_no_ranks(world): ...

@pytest.mark.ranks(2)
async def test_coroutine(): ...

class TestCase(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_case(self): ...
""",
    )
    result.assert_outcomes(failed=5, errors=4)
    for words in (
        "the value of the fixture 'lock' cannot be copied to the ranks: cannot pickle '_thread.lock' object",
        "the fixture 'capsys' is of no use on ranks",
        "world.rank is not possible here: the world is in the ranks",
        "the fixture 'world' needs a number of ranks: mark the test with @pytest.mark.ranks(4)",
        "@pytest.mark.ranks() is not valid (expected ranks(n, torch=False, timeout=60, env=None))",
        "@pytest.mark.ranks(2, sizes=3) is not valid",
        "n=0 is not valid",
        "@pytest.mark.ranks is for plain test functions and methods",
    ):
        assert words in result.stdout.str(), words


def test_a_process_group_of_torch(tests: pytest.Pytester) -> None:
    pytest.importorskip("torch")
    result = run(
        tests,
        """
import torch
import torch.distributed as dist

@pytest.mark.ranks(2, torch=True)
def test_torch():
    x = torch.ones(3)
    dist.all_reduce(x)
    assert (dist.get_backend(), x.tolist()) == ("phalanx", [2.0] * 3)

@pytest.mark.ranks(2, torch=True, env={"PHALANX_AS_GLOO": "1"})
def test_both(world):
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size)
    world.barrier()
    dist.destroy_process_group()
""",
    )
    result.assert_outcomes(passed=2)


def test_workers_of_xdist_can_use_it(tests: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    monkeypatch.setenv("PYTEST_PLUGINS", "phalanx.pytest_plugin,xdist.plugin")
    source = (
        "\n@pytest.mark.ranks(2)\n@pytest.mark.parametrize('x', [1, 2])\ndef test_it(world, x):\n    assert x == 1\n"
    )
    result = run(tests, source, "-n", "2")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E       assert 2 == 1", "*- rank ? failed first -*"])


def test_it_costs_nothing_until_it_is_used() -> None:
    code = """
import json, sys
import pytest
before = set(sys.modules)
import phalanx.pytest_plugin
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == ["phalanx", "phalanx.pytest_plugin"]


def test_a_fixture_of_the_same_name_is_the_users_own(tests: pytest.Pytester) -> None:
    source = "\n@pytest.fixture\ndef world():\n    return 3\n\ndef test_it(world):\n    assert world == 3\n"
    run(tests, source).assert_outcomes(passed=1)


def test_the_entry_point_is_there() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="pytest11", name="phalanx")
    assert found.value == "phalanx.pytest_plugin"
