"""For pytest on the core with jitter: every test has a seed of its own, and a failure says which.

`make jitter` loads it. The seed of a test comes from JITTER_SEED and the test's name, so that one test alone pauses as
it did among all others.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

_FIRST = os.environ.get("JITTER_SEED", "0")
_AGAIN = 'make jitter-suites SEED={seed} ARGS="{test}"'


def pytest_report_header() -> str:
    return f"jitter: seed {_FIRST}, core {os.environ.get('TEST_CORE')}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    os.environ["JITTER_SEED"] = str((int(_FIRST) << 32) + zlib.crc32(item.nodeid.encode()))
    sys.modules["sitecustomize"].seed_process()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        report.sections.append(("jitter", f"again: {_AGAIN.format(seed=_FIRST, test=item.nodeid)}"))
    return report
