"""The job's token: where it comes from. It is never part of a message."""

from __future__ import annotations

import os
import stat

from ..errors import ConfigError
from .reader import VariableReader

__all__ = ["find_token"]

_LONGEST = 4096


def find_token(reader: VariableReader, argument: str | bytes | None = None) -> bytes | None:
    """The token from the argument, `PHALANX_TOKEN` or the file named by `PHALANX_TOKEN_FILE`, in this order.

    Raises:
        ConfigError: The token is empty or too long, or its file can be read by others or not at all.
    """
    if argument is not None:
        if not isinstance(argument, (str, bytes)):
            raise ConfigError(f"token is not valid (expected str or bytes, got {type(argument).__name__})")
        return _checked(argument, "token")
    # The raw value: an empty variable is a mistake that must not quietly become "no token".
    text = reader.raw("PHALANX_TOKEN")
    if text is not None:
        return _checked(text, "PHALANX_TOKEN")
    path = reader.text("PHALANX_TOKEN_FILE")
    return None if path is None else _checked(_read_private(path), f"PHALANX_TOKEN_FILE={path}")


def _checked(token: str | bytes, source: str) -> bytes:
    # surrogateescape: bytes of a variable that are no UTF-8 come through as they were, on every rank alike.
    value = token.encode("utf-8", "surrogateescape") if isinstance(token, str) else token
    if not value.strip():
        raise ConfigError(f"{source} holds an empty token (expected a secret of at least one character)")
    if len(value) > _LONGEST:
        raise ConfigError(f"{source} holds a token of more than {_LONGEST} bytes")
    return value


def _read_private(path: str) -> bytes:
    """The file's content without the line end that an editor leaves."""
    what = f"PHALANX_TOKEN_FILE={path}"
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            # Ask about the file that is open, not about the path, which may change in between.
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{what} is not a file")
            if status.st_uid != os.geteuid() or mode & 0o077:
                raise ConfigError(
                    f"{what} belongs to user {status.st_uid} and has mode {mode:04o} (expected a file of user "
                    f"{os.geteuid()} that no other user can read: chmod 600)"
                )
            return file.read(_LONGEST + 3).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would wait for a writer
