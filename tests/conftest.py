"""What holds for all tests."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests import lateness

pytest_plugins = ["tests.record", "tests.second_chance"]

# A busy machine is no reason to fail: pytest's own limit is enough against a hang.
settings.register_profile("phalanx", deadline=None)
settings.load_profile("phalanx")


def pytest_configure(config: pytest.Config) -> None:
    """What all processes of a run inherit: workers of xdist, ranks, and whatever they start."""
    os.environ["PHALANX_TUNING"] = "off"  # the constants; tests of the calibration say otherwise
    # Threads of OpenMP spin while they wait for each other: on processors that all tests share, that is most of a sum.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Only the last job that failed is kept there: workers must not find each other's. Tests look at what is left in
    # shared memory, so it is elsewhere.
    os.environ["PHALANX_SLATE_DIR"] = str(Path(tempfile.gettempdir()) / f"phalanx-slates-of-tests-{os.getpid()}")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["PHALANX_SLATE_DIR"], ignore_errors=True))
    os.environ["JAX_PLATFORMS"] = "cpu"  # also where there is a GPU: tests/gpu has its own
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:  # a script starts what runs in the background this way
            signal.signal(number, usual)
    if not hasattr(config, "workerinput"):
        probe = lateness.Probe()
        config.add_cleanup(probe.close)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    lateness.begin()


def pytest_collection_finish() -> None:
    """Whatever was imported stays: a test that collects garbage need not look through torch and all tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def the_same_log_level_for_the_next_test() -> Iterator[None]:
    """A test may set the level of the package's loggers; the next one counts on seeing every warning."""
    yield
    logging.getLogger("phalanx").setLevel(logging.NOTSET)
