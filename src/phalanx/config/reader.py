"""Typed reads of environment variables; the one place that touches `os.environ`.

A variable that is set to nothing but blanks counts as not set: that is what `RANK=$UNSET` in a script leaves behind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import ConfigError
from .variables import VARIABLES_BY_NAME

__all__ = [
    "HIGHEST_PORT",
    "Setting",
    "VariableReader",
    "adopt",
    "environment",
    "invalid",
    "parse_flag",
    "parse_integer",
]

HIGHEST_PORT = 65535

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def environment(env: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The mapping to read from: the one that was given, else the process's own."""
    return os.environ if env is None else env


def adopt(env: Mapping[str, str]) -> None:
    """Makes this process's environment equal to another's: for one that was forked before it was known what for."""
    os.environ.clear()
    os.environ.update(env)


def parse_integer(text: str) -> int:
    """Reads a plain decimal number; unlike `int` no underscores and no other scripts' digits.

    Raises:
        ValueError: The text is something else.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def parse_flag(text: str) -> bool:
    """Reads 1/0, true/false, yes/no or on/off.

    Raises:
        ValueError: The text is something else.
    """
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError(text)
    return lowered in _TRUE


class Setting(NamedTuple):
    """A number and how to speak of it in a message, such as `RANK=3`."""

    value: int
    source: str

    def __str__(self) -> str:
        return self.source


class VariableReader:
    """Reads the variables of the table in `variables.py`, and no others.

    Args:
        env: What to read from; None is the process's environment.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = environment(env)

    def raw(self, name: str) -> str | None:
        """The value as it is, None if it is not set."""
        if name not in VARIABLES_BY_NAME:
            raise LookupError(f"{name} is missing in phalanx.config.variables")
        return self._env.get(name)

    def text(self, name: str) -> str | None:
        """The value without blanks around it, None if nothing is left or it is not set."""
        return (self.raw(name) or "").strip() or None

    def setting(self, name: str) -> Setting | None:
        """The value as a whole number.

        Raises:
            ConfigError: The variable is set to something else.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            return Setting(parse_integer(text), f"{name}={text}")
        except ValueError:
            raise invalid(name, text, "a whole number") from None

    def integer(self, name: str) -> int | None:
        """As `setting`, the number only."""
        setting = self.setting(name)
        return None if setting is None else setting.value

    def flag(self, name: str) -> bool:
        """The value as true or false; false if it is not set.

        Raises:
            ConfigError: The variable is set to something else.
        """
        text = self.text(name)
        try:
            return text is not None and parse_flag(text)
        except ValueError:
            raise invalid(name, text or "", "1 or 0, true or false, yes or no, on or off") from None

    def port(self, name: str) -> int | None:
        """The value as a port that can be connected to.

        Raises:
            ConfigError: The variable is set to something else.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            port = parse_integer(text)
        except ValueError:
            port = 0
        if not 1 <= port <= HIGHEST_PORT:
            raise invalid(name, text, f"a port from 1 to {HIGHEST_PORT}")
        return port

    def found(self, names: Iterable[str]) -> str:
        """Those of the names that are set, as `RANK=0, WORLD_SIZE=2`, for messages."""
        return ", ".join(f"{name}={text}" for name in names if (text := self.text(name)) is not None)


def invalid(name: str, text: str, expected: str) -> ConfigError:
    """The error for a variable whose value cannot be used."""
    return ConfigError(f"{name}={text!r} is not valid (expected {expected})")
