"""The plug-in for pytest: `@pytest.mark.ranks(4)` runs a test on four ranks, and `world` is their group there.

pytest loads this module with itself, wherever Phalanx is installed. So it does nothing unless a test is marked, and
imports nothing until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

__all__: list[str] = []

MARK = "ranks(n, *, torch=False, timeout=60, env=None): run the test on n ranks (phalanx); torch: in a process group"


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    config.addinivalue_line("markers", MARK)
    # pytest rewrites the assertions of everything that is installed with a plug-in. Here that would only take time.
    rewritten: Any = getattr(getattr(config.pluginmanager, "rewrite_hook", None), "_must_rewrite", None)
    if isinstance(rewritten, set):
        rewritten.discard("phalanx")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """The group of all ranks of a test that is marked with `@pytest.mark.ranks(n)`."""
    from .world_to_come import WorldToCome

    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(
            "the fixture 'world' needs a number of ranks: mark the test with @pytest.mark.ranks(4)", pytrace=False
        )
    return WorldToCome()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses the mark where it would have no effect."""
    if item.get_closest_marker("ranks") is not None:
        from .run import check_item

        check_item(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test on ranks; None leaves any other to pytest."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    from .run import run_test

    run_test(pyfuncitem, mark)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Shows the failure of a rank as pytest would show it here."""
    outcome: Any = yield
    if call.excinfo is not None and item.get_closest_marker("ranks") is not None:
        from .run import show_failure

        show_failure(outcome.get_result(), call.excinfo)
