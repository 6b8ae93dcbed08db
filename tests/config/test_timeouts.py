"""The times of operations and of meetings: as given, as the variable says, or the library's own."""

from __future__ import annotations

import pytest

import phalanx as px
from phalanx.config import Timeouts, timeouts
from phalanx.errors import ConfigError, UsageError


def test_a_world_forms_soon_and_an_operation_has_time() -> None:
    assert timeouts(None, {}) == Timeouts(operation=600.0, meeting=30.0)


def test_the_variable_is_for_operations() -> None:
    assert timeouts(None, {"PHALANX_TIMEOUT": "1800"}) == Timeouts(1800.0, 30.0)


def test_what_the_program_says_is_for_both() -> None:
    assert timeouts(5, {"PHALANX_TIMEOUT": "1800"}) == Timeouts(5.0, 5.0)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_variable_that_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="PHALANX_TIMEOUT"):
        timeouts(None, {"PHALANX_TIMEOUT": text})


def test_an_argument_that_is_no_time() -> None:
    with pytest.raises(UsageError, match="timeout"):
        timeouts("soon", {})  # type: ignore[arg-type]


def test_a_group_has_the_time_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TIMEOUT", "77")
    with px.Group(px.backends.SimulatedBackend.create_group(1)[0]) as group:
        assert group.timeout == 77.0
