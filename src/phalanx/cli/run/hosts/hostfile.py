"""The hosts of a job, from a hostfile or from `--hosts`: in the formats of Open MPI and MPICH. No I/O but one read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigError

__all__ = ["Host", "parse_hosts", "read_hostfile"]

_EXPECTED = "expected `host`, `host:4` or `host slots=4`"
_SLOTS = "slots"
_LIMITS = ("max_slots", "max-slots")


@dataclass(frozen=True)
class Host:
    """One host of the job."""

    name: str
    """As it is given to ssh: a name, an address, or `user@name`."""
    ranks: int | None = None
    """None where nobody said how many."""
    where: str = ""
    """The place where it was named, for messages: `hosts.txt, line 3`."""

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """The hosts in a file: one on each line, empty lines and comments left out.

    Raises:
        ConfigError: The file cannot be read, or a line is not understood; the message has its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"hostfile {str(path)!r} cannot be read: {why}") from None
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    hosts = [_host(words, f"{path}, line {number}") for number, words in enumerate(lines, 1) if words]
    if not hosts:
        raise ConfigError(f"hostfile {str(path)!r} names no host ({_EXPECTED} on each line)")
    return _merged(hosts)


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `--hosts a:4,b:4`.

    Raises:
        ConfigError: It is not understood.
    """
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise ConfigError(f"--hosts {text!r} is not valid (expected names with commas between them, as a:4,b:4)")
    return _merged([_host(part.split(), "--hosts") for part in parts])


def _host(words: list[str], where: str) -> Host:
    name, ranks = _name_and_ranks(words[0], where)
    limit = None
    for word in words[1:]:
        key, equals, text = word.partition("=")
        if not equals or key not in (_SLOTS, *_LIMITS):
            raise ConfigError(f"{where}: {word!r} is not understood ({_EXPECTED})")
        if key in _LIMITS:
            limit = _count(text, where)
        elif ranks is not None:
            raise ConfigError(f"{where}: the number of ranks stands there twice ({_EXPECTED})")
        else:
            ranks = _count(text, where)
    if limit is not None and (ranks or 1) > limit:
        raise ConfigError(f"{where}: {ranks} ranks are more than its own limit of {limit}")
    return Host(name, ranks, where)


def _name_and_ranks(text: str, where: str) -> tuple[str, int | None]:
    """`node1`, `node1:4`, `[fd00::1]:4`, or a bare IPv6 address, which has more than one colon."""
    user, at, rest = text.rpartition("@")
    if rest.startswith("["):
        name, closed, rest = rest[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ConfigError(f"{where}: {text!r} is not understood ({_EXPECTED})")
        number = rest.removeprefix(":")
    elif rest.count(":") > 1:
        name, number = rest, ""
    else:
        name, colon, number = rest.partition(":")
        if colon and not number:
            raise ConfigError(f"{where}: {text!r} ends with a colon ({_EXPECTED})")
    # A name that begins with a dash would be an option of ssh.
    if not name or "=" in name or name.startswith("-") or user.startswith("-") or (at and not user):
        raise ConfigError(f"{where}: {text!r} is not a host ({_EXPECTED})")
    return user + at + name, _count(number, where) if number else None


def _count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"{where}: {text!r} is not a number of ranks ({_EXPECTED})")
    return int(text)


def _merged(hosts: Iterable[Host]) -> list[Host]:
    """Each host once: batch systems write a host's name as often as it has slots."""
    merged: dict[str, Host] = {}
    for host in hosts:
        known = merged.get(host.name)
        both = host if known is None else Host(host.name, (known.ranks or 1) + (host.ranks or 1), known.where)
        merged[host.name] = both
    return list(merged.values())
