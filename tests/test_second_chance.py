"""What fails is run again once, and only so often; what hides nothing says so."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TWICE = """
import pathlib
def flaky(name, times):
    marks = pathlib.Path(__file__).parent / (name + ".ran")
    ran = len(marks.read_text()) if marks.exists() else 0
    marks.write_text("x" * (ran + 1))
    assert ran >= times, f"{name} is not ready"
"""


@pytest.fixture
def tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    # Whatever else is installed here has no part in this.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    root = Path(__file__).parent.parent
    pytester.makeconftest(f"import sys; sys.path.insert(0, {str(root)!r}); pytest_plugins = ['tests.second_chance']")
    return pytester


def flaky(pytester: pytest.Pytester, *names: str, times: int = 1) -> None:
    """Tests that fail so many times, each; the marks that they leave say how often they ran."""
    cases = [f"def test_{name}():\n    flaky({name!r}, {times})\n" for name in names]
    pytester.makepyfile(test_flaky=TWICE + "\n".join(cases))


def ran(pytester: pytest.Pytester, name: str) -> int:
    return len((pytester.path / f"{name}.ran").read_text())


def test_a_failed_test_runs_once_more_and_is_named_with_its_first_failure(tests: pytest.Pytester) -> None:
    flaky(tests, "a")
    result = tests.runpytest_inprocess("--second-chances", "3")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["rerun: test_flaky.py::test_a (call): AssertionError: a is not ready", "*run a second time*"]
    )
    result.stdout.fnmatch_lines(
        ["*run a second time*", "test_flaky.py::test_a (call)", "*AssertionError: a is not ready*"]
    )
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}


def test_nothing_is_run_twice_unless_asked_for(tests: pytest.Pytester) -> None:
    flaky(tests, "a")
    result = tests.runpytest_inprocess()
    assert result.ret == 1
    assert ran(tests, "a") == 1


def test_what_fails_again_has_failed(tests: pytest.Pytester) -> None:
    flaky(tests, "a", times=2)
    result = tests.runpytest_inprocess("--second-chances", "3")
    assert result.ret == 1
    assert ran(tests, "a") == 2


def check_four(tests: pytest.Pytester, result: pytest.RunResult) -> None:
    assert result.ret == 1
    assert result.parseoutcomes() == {"failed": 1, "passed": 3, "rerun": 3}
    assert sorted(ran(tests, name) for name in "abcd") == [1, 2, 2, 2]


def test_a_fourth_failure_fails_the_run(tests: pytest.Pytester) -> None:
    flaky(tests, *"abcd")
    check_four(tests, tests.runpytest_inprocess("--second-chances", "3"))


def test_all_workers_together_have_three(tests: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky(tests, *"abcd")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # only what is needed: they start sooner
    check_four(tests, tests.runpytest_subprocess("--second-chances", "3", "-p", "xdist", "-n", "2"))


def test_what_a_test_shares_is_made_anew(tests: pytest.Pytester) -> None:
    tests.makepyfile("""
        import pytest
        made = []
        @pytest.fixture(scope="module")
        def world():
            made.append("good" if made else "broken")
            yield made[-1]
        def test_shared(world):
            assert world == "good"
    """)
    result = tests.runpytest_inprocess("--second-chances", "1")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}


def test_a_fixture_that_fails_counts_as_well(tests: pytest.Pytester) -> None:
    tests.makepyfile("""
        import pytest
        made = []
        @pytest.fixture(scope="module")
        def world():
            made.append(1)
            assert len(made) > 1
        def test_shared(world):
            pass
    """)
    result = tests.runpytest_inprocess("--second-chances", "1")
    assert result.ret == 0
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}


def test_a_hang_is_not_forgiven(tests: pytest.Pytester) -> None:
    tests.makepyfile(test_flaky=TWICE + "import time\ndef test_hangs():\n    flaky('a', 0)\n    time.sleep(60)\n")
    result = tests.runpytest_inprocess("--second-chances", "3", "-o", "timeout=0.2")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*Failed: Timeout (>0.2s)*"])
    assert ran(tests, "a") == 1
