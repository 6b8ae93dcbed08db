"""Everything that can be tuned, in one frozen dataclass.

Each field follows from the first place that has it: what the caller gave, then the field's environment variable, then
the default. `Options(...)` alone reads nothing; `resolve` fills the fields that were not given from the environment.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar

from ..arguments import plain_number, shown
from ..errors import ConfigError, MissingVariable
from .algorithms import ALGORITHMS, parse_algorithms
from .reader import HIGHEST_PORT, VariableReader, invalid, parse_flag, parse_integer

__all__ = ["Options", "TlsOptions", "options_of"]

_T = TypeVar("_T")


def _remember_what_was_given(cls: type[_T]) -> type[_T]:
    """Keeps the names of the fields that the caller spelt out: only the others may come from the environment.

    A default that was given on purpose is not the same as one that was left alone.
    """
    original = cls.__init__

    @functools.wraps(original)
    def remembering_init(self: _T, **values: Any) -> None:
        object.__setattr__(self, "_given", frozenset(values))
        original(self, **values)

    cls.__init__ = remembering_init  # type: ignore[assignment]
    return cls


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The three PEM files that TLS needs. Every rank shows its certificate, and checks that of the other side."""

    certificate: str
    """This rank's certificate, followed by those between it and the authority."""
    key: str
    """The certificate's private key."""
    ca: str
    """The authority that signed the certificates of all ranks."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"tls.{field.name}={shown(value)} is not valid (expected the path of a PEM file)")


@_remember_what_was_given
@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `phalanx.init(options=...)`. All fields are keyword-only and checked when the object is made.

    Raises:
        ConfigError: A field is not valid; the message names it, its value and what would be valid.
    """

    interface: str | None = None
    """Name (`eth0`) or address of the interface that peers use. None: the one that routes to the master."""

    port_range: tuple[int, int] | None = None
    """First and last port that a listener for peers may take. None: any."""

    heartbeat: float = 1.0
    """Seconds between two signs of life on a control connection."""

    heartbeat_timeout: float = 5.0
    """Seconds without any answer after which a machine counts as lost. Must be more than `heartbeat`."""

    handshake_timeout: float = 5.0
    """Seconds that one connection may take to prove that it belongs to the job."""

    max_pending_handshakes: int = 128
    """How many connections may be proving it at the same time, per listener."""

    max_message: int = 16 << 30
    """Bytes in one message. A longer one is refused before it is sent, and again before it is received."""

    max_object: int = 1 << 30
    """Bytes in one object that is sent by `send_object` and its kin."""

    transport: Literal["auto", "tcp"] = "auto"
    """How ranks on one host talk: `"auto"` through shared memory where that is possible, `"tcp"` over TCP only. With
    `tls` no memory is shared."""

    segment_heap: int = 1 << 30
    """Bytes that `Group.empty` may give out, per rank and group. Memory is taken as it is used; an array of
    2 MiB or more takes its huge pages when it is made."""

    algorithm: str | None = None
    """Algorithms of collectives over the network, as `"all_reduce=ring,broadcast=tree"`, or one name for all operations
    that have it, as `"ring"`. None: by size and ranks."""

    mpi_check: bool = True
    """On MPI: whether ranks make sure that all have come and call the same before they enter MPI. Without it a
    collective is MPI's alone, which has no deadline and does not notice that ranks call different operations."""

    tls: TlsOptions | None = None
    """Encrypts all connections with TLS 1.3. None: not encrypted (the proof of the token is always made)."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            pair = isinstance(value, tuple)
            plain = tuple(map(plain_number, value)) if pair else plain_number(value)
            if not _is_valid(rule, plain):
                raise ConfigError(f"{name}={shown(value)} is not valid (expected {rule.expected})")
            object.__setattr__(self, name, plain)
        if self.tls is not None and not isinstance(self.tls, TlsOptions):
            raise ConfigError(
                f"tls={shown(self.tls)} is not valid (expected TlsOptions(certificate=, key=, ca=) or None)"
            )
        if self.heartbeat >= self.heartbeat_timeout:
            raise ConfigError(
                f"heartbeat={self.heartbeat:g} is not below heartbeat_timeout={self.heartbeat_timeout:g} "
                "(variables: PHALANX_HEARTBEAT, PHALANX_HEARTBEAT_TIMEOUT)"
            )

    def resolve(self, env: Mapping[str, str] | None = None) -> Options:
        """These options, with every field that was not given taken from its environment variable, where that is set.

        Raises:
            ConfigError: A variable is not valid; the message names it, its value and what would be valid.
            MissingVariable: Some, but not all, of the three variables for TLS are set.
        """
        reader = VariableReader(env)
        given: frozenset[str] = self._given  # type: ignore[attr-defined]
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, rule in _RULES.items():
            text = reader.text(rule.variable)
            if name not in given and text is not None:
                values[name] = _parse(rule, text)
        if "tls" not in given:
            values["tls"] = _tls_from_env(reader)
        return Options(**values)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Options:
        """Options from the environment's variables; what is given by keyword wins.

        Raises:
            ConfigError: A value is not valid.
        """
        return cls(**overrides).resolve(env)


def options_of(given: Options | None) -> Options:
    """The options of a caller; without them, those of the environment.

    Raises:
        ConfigError: It is something else, or a variable is not valid.
    """
    if given is None:
        return Options.from_env()
    if not isinstance(given, Options):
        raise ConfigError(f"options={shown(given)} is not valid (expected phalanx.Options)")
    return given


# -- what is valid ---------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """One field: its variable, how to read that, and what may be in the field. `parse` raises ValueError."""

    variable: str
    parse: Callable[[str], object]
    valid: Callable[[Any], bool]
    expected: str


TRANSPORTS = ("auto", "tcp")
_LONGEST = 86400.0
_LARGEST = 1 << 56
_MOST_HANDSHAKES = 65536
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,18})\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _seconds_rule(variable: str) -> _Rule:
    def valid(value: Any) -> bool:
        number = _is_whole(value) or isinstance(value, float)
        return number and math.isfinite(value) and 0 < value <= _LONGEST

    return _Rule(variable, float, valid, f"seconds, above 0 and at most {_LONGEST:.0f}")


def _size_rule(variable: str) -> _Rule:
    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return int(match[1]) * _UNITS[match[2].lower()]

    return _Rule(variable, parse, lambda value: _is_whole(value) and 0 < value <= _LARGEST, "bytes, 1 to 2**56")


def _parse_port_range(text: str) -> tuple[int, int] | None:
    first, dash, last = text.partition("-")
    ports = parse_integer(first.strip()), parse_integer((last if dash else first).strip())
    return None if ports == (0, 0) else ports


def _valid_port_range(value: Any) -> bool:
    if value is None:
        return True
    pair = isinstance(value, tuple) and len(value) == 2 and all(_is_whole(port) for port in value)
    return pair and 1 <= value[0] <= value[1] <= HIGHEST_PORT


def _valid_interface(value: Any) -> bool:
    return value is None or (isinstance(value, str) and bool(value) and not re.search(r"[\s/]", value))


def _valid_algorithm(value: Any) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, str) and parse_algorithms(value) is not None
    except ValueError:
        return False


_ALGORITHM_NAMES = "; ".join(f"{operation}={'|'.join(names)}" for operation, names in ALGORITHMS.items())

_RULES: dict[str, _Rule] = {
    "interface": _Rule("PHALANX_INTERFACE", str, _valid_interface, "the name or address of an interface"),
    "port_range": _Rule(
        "PHALANX_PORT_RANGE", _parse_port_range, _valid_port_range, "two ports from 1 to 65535, the lower one first"
    ),
    "heartbeat": _seconds_rule("PHALANX_HEARTBEAT"),
    "heartbeat_timeout": _seconds_rule("PHALANX_HEARTBEAT_TIMEOUT"),
    "handshake_timeout": _seconds_rule("PHALANX_HANDSHAKE_TIMEOUT"),
    "max_pending_handshakes": _Rule(
        "PHALANX_MAX_PENDING_HANDSHAKES",
        parse_integer,
        lambda value: _is_whole(value) and 1 <= value <= _MOST_HANDSHAKES,
        f"a number from 1 to {_MOST_HANDSHAKES}",
    ),
    "max_message": _size_rule("PHALANX_MAX_MESSAGE"),
    "max_object": _size_rule("PHALANX_MAX_OBJECT"),
    "transport": _Rule(
        "PHALANX_TRANSPORT", str.lower, lambda value: isinstance(value, str) and value in TRANSPORTS, "'auto' or 'tcp'"
    ),
    "segment_heap": _size_rule("PHALANX_SEGMENT_HEAP"),
    "mpi_check": _Rule("PHALANX_MPI_CHECK", parse_flag, lambda value: isinstance(value, bool), "1 or 0"),
    "algorithm": _Rule("PHALANX_ALGORITHM", str, _valid_algorithm, f"NAME or OPERATION=NAME,... of {_ALGORITHM_NAMES}"),
}


def _is_valid(rule: _Rule, value: object) -> bool:
    try:
        return rule.valid(value) is True
    except Exception:  # whatever the value's own comparisons raise
        return False


def _parse(rule: _Rule, text: str) -> object:
    try:
        value = rule.parse(text)
    except ValueError:
        raise invalid(rule.variable, text, rule.expected) from None
    if not rule.valid(value):
        raise invalid(rule.variable, text, rule.expected)
    return value


def _tls_from_env(reader: VariableReader) -> TlsOptions | None:
    names = ("PHALANX_TLS_CERT", "PHALANX_TLS_KEY", "PHALANX_TLS_CA")
    certificate, key, ca = (reader.text(name) for name in names)
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        missing = next(name for name in names if reader.text(name) is None)
        raise MissingVariable(missing, f"{missing} is not set (found {reader.found(names)}): TLS needs all three")
    return TlsOptions(certificate=certificate, key=key, ca=ca)
