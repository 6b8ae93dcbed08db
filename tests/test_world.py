"""What `init` says of variables that nothing reads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx.config import nearest_variable


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PHALANX_TIMEOT", "PHALANX_TIMEOUT"),
        ("PHALANX_HEARTBEET", "PHALANX_HEARTBEAT"),
        ("PHALANX_TOKN", "PHALANX_TOKEN"),
        ("PHALANX_log", "PHALANX_LOG"),
        ("PHALANX_SOMETHING_ELSE", None),
    ],
)
def test_the_variable_that_was_meant(name: str, meant: str | None) -> None:
    assert nearest_variable(name) == meant


def test_a_misspelt_variable_is_a_warning() -> None:
    script = "import phalanx as px\nfor _ in range(2): px.init().close()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PHALANX_HEARTBEET": "secret", "PHALANX_UNLIKE_ANY": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    words = "<string>:2: UserWarning: nothing reads the environment variable PHALANX_HEARTBEET "
    assert done.stderr.startswith(words + "(did you mean PHALANX_HEARTBEAT?)")
    assert done.stderr.count("Warning") == 1
    assert "secret" not in done.stderr
