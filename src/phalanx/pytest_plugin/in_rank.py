"""The part of a test that runs in a rank: the world, the test itself, and the text of its failure."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ..frames import hide_frames
from ..launching.failures import ATTACHED, MILD
from ..world import init
from .world_to_come import WorldToCome

__all__ = ["Reporting", "run_in_rank"]

LINES = 8
"""Lines that pytest shows of a comparison, unless it is told to show all."""


class Reporting(NamedTuple):
    """How the user wants failures to be shown."""

    verbose: int
    style: str
    locals: bool
    full: bool

    @classmethod
    def of(cls, config: pytest.Config) -> Reporting:
        """Reads the command line of pytest."""
        option = config.getoption
        return cls(
            int(option("verbose", 0)),
            str(option("tbstyle", "auto")),
            bool(option("showlocals", False)),
            bool(option("fulltrace", False)),
        )


def run_in_rank(
    test: Callable[..., Any], arguments: dict[str, Any], torch: bool, patience: float, reporting: Reporting
) -> None:
    """Calls a test. An exception that leaves it carries its text with it, as pytest shows it."""
    _explain_comparisons(reporting)
    try:
        if torch:
            _join_torch(patience)
        if any(isinstance(value, WorldToCome) for value in arguments.values()):
            world = init(timeout=patience)
            arguments = {name: world if isinstance(value, WorldToCome) else value for name, value in arguments.items()}
        try:
            test(**arguments)
        except SystemExit as error:  # the end of a rank, and a good one if the code is 0: not that of a test
            raise AssertionError(f"the test called sys.exit({error.code!r})") from error
        if torch:
            _leave_torch()
    except BaseException as error:
        hide_frames(error)
        setattr(error, ATTACHED, _described(error, reporting))
        setattr(error, MILD, isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception)))
        raise


def _join_torch(patience: float) -> None:
    import torch.distributed as dist

    dist.init_process_group("phalanx", timeout=timedelta(seconds=patience))


def _leave_torch() -> None:
    import torch.distributed as dist

    if dist.is_initialized():  # the test may have left it itself
        dist.destroy_process_group()


def _described(error: BaseException, reporting: Reporting) -> dict[str, Any]:
    if isinstance(error, pytest.skip.Exception):
        crash = pytest.ExceptionInfo.from_exception(error)._getreprcrash()
        where = (str(crash.path), crash.lineno) if crash is not None else ("", 0)
        return {"kind": "skipped", "reason": error.msg, "where": where}
    if isinstance(error, pytest.xfail.Exception):
        return {"kind": "xfailed", "reason": error.msg}
    if isinstance(error, pytest.exit.Exception):
        return {"kind": "exit", "reason": error.msg}
    return {"kind": "failed", "text": pickle.dumps(_failure_text(error, reporting))}


def _failure_text(error: BaseException, reporting: Reporting) -> Any:
    style: Any = reporting.style
    if reporting.full or style in ("auto", "no"):
        style = "long"
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        style = "value"

    def shortened(info: pytest.ExceptionInfo[BaseException]) -> Any:
        # As pytest: of a long traceback, only its first and its last function is shown whole.
        found = info.traceback.filter(info)
        last = len(found) - 1
        if reporting.style != "auto" or last < 2:
            return found
        return type(found)(e if i in (0, last) else e.with_repr_style("short") for i, e in enumerate(found))

    return pytest.ExceptionInfo.from_exception(error).getrepr(
        showlocals=reporting.locals,
        style=style,
        tbfilter=False if reporting.full else shortened,
        truncate_locals=reporting.verbose <= 1,
    )


def _explain_comparisons(reporting: Reporting) -> None:
    """Has rewritten assertions say how two values differ.

    pytest does so by hooks, which need its configuration: there is one here without plug-ins and without conftest.
    """
    from _pytest.assertion import util
    from _pytest.config import create_terminal_writer, get_config

    try:
        config = get_config()
        config.option.__dict__.update(verbose=reporting.verbose, color="no", code_highlight="no")
        screen: Any = SimpleNamespace(_tw=create_terminal_writer(config, io.StringIO()))
        config.pluginmanager.register(screen, "terminalreporter")
    except Exception:  # another release of pytest: then a failure shows the values, without their difference
        return

    def compare(op: str, left: object, right: object) -> str | None:
        try:
            found = config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right)
        except Exception:
            return None
        for lines in map(list, found):
            if not lines:
                continue
            if reporting.verbose < 2 and len(lines) > LINES:
                lines[LINES - 1 :] = [
                    "...",
                    f"Full output truncated ({len(lines) - LINES + 1} lines hidden), use '-vv' to show",
                ]
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = compare
