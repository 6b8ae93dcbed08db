"""A plugin of pytest: a test that failed is run once more, three of all at most, and the summary names them.

`--second-chances 3` asks for it. The machine may have had other work, or a test may have a fault of its own; both are
worth a look, so that the first failure is shown in full. Where more tests fail, it was not the machine: they have
failed. A test that hung has failed, too.

Under xdist the chances are those of the whole run. Each is a file in a folder that the controller has made, and the
worker that removes it has the chance.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

OUTCOME = "rerun"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-chances",
        type=int,
        default=0,
        metavar="N",
        help="run a failed test once more, at most N tests in the whole run",
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = getattr(config, "workerinput", {}).get("second_chances")  # the controller's, on a worker of xdist
    if config.getoption("second_chances") or folder:
        config.pluginmanager.register(SecondChance(config, folder), "second-chance-of-phalanx")


class SecondChance:
    """What gives second chances on one process of pytest."""

    def __init__(self, config: pytest.Config, folder: str | None) -> None:
        self._mine = folder is None
        self._plugins = config.pluginmanager
        self._folder = Path(folder or tempfile.mkdtemp(prefix="second-chances-"))
        if self._mine:
            for number in range(config.getoption("second_chances")):
                (self._folder / str(number)).touch()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """For each worker of xdist, on the controller."""
        node.workerinput["second_chances"] = str(self._folder)

    def pytest_unconfigure(self) -> None:
        if self._mine:
            shutil.rmtree(self._folder, ignore_errors=True)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if any(report.failed for report in reports) and not any(map(_hung, reports)) and self._take():
            for report in reports:
                if report.failed:
                    report.outcome = OUTCOME  # type: ignore[assignment]
                    item.ihook.pytest_runtest_logreport(report=report)
            # The test may have broken what it shares with others: all of that is made anew. What is broken may fail
            # to be taken down, which is no news.
            with contextlib.suppress(Exception):
                item.session._setupstate.teardown_exact(None)
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _take(self) -> bool:
        for chance in sorted(self._folder.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # another worker was quicker
                os.unlink(chance)
                return True
        return False

    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        return (OUTCOME, "R", ("RERUN", {"yellow": True})) if report.outcome == OUTCOME else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Says at once what failed: the run may be ended from outside before its summary."""
        terminal = self._plugins.get_plugin("terminalreporter")
        if self._mine and terminal is not None and report.outcome in {"failed", OUTCOME}:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else report.longreprtext).partition("\n")[0]
            terminal.write_line(f"\n{report.outcome}: {report.nodeid} ({report.when}): {why}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        given = terminalreporter.stats.get(OUTCOME, [])
        if given:
            terminalreporter.section("run a second time")
        for report in given:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})", yellow=True)
            terminalreporter.write_line(report.longreprtext)


def _hung(report: pytest.TestReport) -> bool:
    return report.failed and "Failed: Timeout (>" in report.longreprtext
