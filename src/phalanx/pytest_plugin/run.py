"""Runs a test on ranks, and brings what happened there back to pytest."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from ..arguments import shown
from ..errors import PhalanxError, RankFailed, UsageError
from ..launching import shipping
from ..launching.failures import ATTACHED
from ..launching.launch import call, launch_task
from ..launching.rank_process import Task
from .in_rank import Reporting, run_in_rank

__all__ = ["check_item", "run_test", "show_failure"]

LONGEST_OPERATION = 30.0
"""Seconds that an operation of a test has at most, as in `run_ranks`."""
HINT = "make it inside the test"
_OF_THIS_PROCESS = frozenset(
    {
        "cache",
        "capfd",
        "capfdbinary",
        "caplog",
        "capsys",
        "capsysbinary",
        "capteesys",
        "monkeypatch",
        "pytester",
        "record_property",
        "record_xml_attribute",
        "recwarn",
        "request",
        "subtests",
    }
)
"""Fixtures of pytest that are about the process that runs the tests; a copy of one would do nothing."""


class RanksMark(NamedTuple):
    """The arguments of `@pytest.mark.ranks`."""

    n: int
    torch: bool = False
    timeout: float = 60.0
    env: Mapping[str, str] | None = None


def check_item(item: pytest.Item) -> None:
    """Refuses tests that are no plain functions.

    Raises:
        UsageError: It is a coroutine, a method of a `unittest.TestCase`, a doctest, …
    """
    plain = isinstance(item, pytest.Function) and type(item).runtest is pytest.Function.runtest
    if not plain or inspect.iscoroutinefunction(getattr(item, "obj", None)):
        raise UsageError("@pytest.mark.ranks is for plain test functions and methods (this is another kind of test)")


def run_test(item: pytest.Function, mark: pytest.Mark) -> None:
    """Runs a test on ranks.

    Raises:
        RankFailed: A rank failed.
        UsageError: The mark is not valid, or a fixture cannot be copied to the ranks.
    """
    settings = _settings(mark)
    names = item._fixtureinfo.argnames
    module = item.module.__name__
    arguments = {name: item.funcargs[name] for name in names}
    for name, value in arguments.items():
        _check_fixture(name, value, module)
    body = (
        item.obj,
        arguments,
        settings.torch,
        min(LONGEST_OPERATION, settings.timeout / 2),
        Reporting.of(item.config),
    )
    task = Task(call, (run_in_rank, body), runs_exit_handlers=True)
    try:
        launch_task(
            task, settings.n, timeout=settings.timeout, env=settings.env, grace=2.0, by_value=(module,), hint=HINT
        )
    except RankFailed as error:
        _raise_outcome(getattr(error, ATTACHED, None))
        raise error from None


def _settings(mark: pytest.Mark) -> RanksMark:
    try:
        settings = RanksMark(*mark.args, **mark.kwargs)
    except TypeError:
        given = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())])
        raise UsageError(
            f"@pytest.mark.ranks({given}) is not valid (expected ranks(n, torch=False, timeout=60, env=None))"
        ) from None
    if not isinstance(settings.timeout, (int, float)) or not settings.timeout > 0:
        raise UsageError(f"timeout={shown(settings.timeout)} is not valid (expected seconds, more than 0)")
    return settings


def _check_fixture(name: str, value: Any, module: str) -> None:
    if name in _OF_THIS_PROCESS:
        raise UsageError(
            f"the fixture {name!r} is of no use on ranks: it is about the process that runs the tests (leave it out, "
            "or use it in a test that calls phalanx.launch or phalanx.testing.run_ranks)"
        )
    try:
        shipping.dumps(value, by_value=(module,))
    except UsageError as error:
        raise UsageError(
            f"the value of the fixture {name!r} cannot be copied to the ranks: {error.__cause__} (make it inside the "
            "test, or have the fixture give what it is made of)"
        ) from None


def _raise_outcome(attached: Any) -> None:
    """Does here what `pytest.skip`, `pytest.xfail` or `pytest.exit` did on a rank."""
    kind, reason = (attached["kind"], attached.get("reason", "")) if attached else ("", "")
    if kind == "skipped":
        raise _Skipped(reason, attached["where"])
    if kind == "xfailed":
        pytest.xfail(reason)
    if kind == "exit":
        pytest.exit(reason)


_Skip: Any = pytest.skip.Exception


class _Skipped(_Skip):  # type: ignore[misc]
    """A skip that knows where on a rank it was."""

    def __init__(self, reason: str, where: tuple[str, int]) -> None:
        super().__init__(reason)
        self.where = where


def show_failure(report: pytest.TestReport, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Gives a report the text of the rank's own failure."""
    error = excinfo.value
    if isinstance(error, _Skipped):
        if report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (*error.where, f"Skipped: {error.msg}")
        return
    attached = getattr(error, ATTACHED, None)
    if isinstance(error, RankFailed) and attached:
        text: Any = pickle.loads(attached["text"])  # noqa: S301 - it comes from a rank that was started here
        if text.reprcrash is not None:
            text.reprcrash.message = f"rank {error.failed_rank}: {text.reprcrash.message}"
        others = str(error).split("\n\n", 1)[0].split("\n")[1:]
        text.addsection(f"rank {error.failed_rank} failed first", "\n".join(others))
        report.longrepr = text
    elif isinstance(error, PhalanxError) and report.when in ("setup", "call") and report.failed:
        report.longrepr = excinfo.getrepr(style="value")
