"""The small questions to the environment that are no option and have nothing to do with ranks."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from ..operating_system import SHARED_MEMORY
from .reader import VariableReader, environment, invalid
from .variables import VARIABLES, VARIABLES_BY_NAME

__all__ = [
    "as_gloo",
    "backend_of_choice",
    "cache_dir",
    "debug",
    "inherited",
    "is_watched",
    "last_words_folder",
    "log_level",
    "memory_dir",
    "min_size",
    "nccl_shares_gpus",
    "nearest_variable",
    "pure",
    "runtime_dir",
    "snapshot",
    "torch_hooks_wanted",
    "tuning_of_choice",
    "unknown_variables",
]

BACKENDS = ("mesh", "tcp", "mpi")
"""The backends that `init` takes."""
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def backend_of_choice(env: Mapping[str, str] | None = None) -> str:
    """The backend of `init("auto")`: the one that `PHALANX_BACKEND` names, else "mesh".

    Raises:
        ConfigError: The variable does not name a backend.
    """
    text = (VariableReader(env).text("PHALANX_BACKEND") or "auto").lower()
    if text not in ("auto", *BACKENDS):
        raise invalid("PHALANX_BACKEND", text, ", ".join(("auto", *BACKENDS)))
    return "mesh" if text == "auto" else text


def pure(env: Mapping[str, str] | None = None) -> bool:
    """Whether `PHALANX_PURE` asks to do without the native core.

    Raises:
        ConfigError: The variable is neither true nor false.
    """
    return VariableReader(env).flag("PHALANX_PURE")


def nccl_shares_gpus(env: Mapping[str, str] | None = None) -> bool:
    """Whether NCCL was told, by its own variable, to take several ranks on one GPU."""
    return VariableReader(env).text("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def debug(env: Mapping[str, str] | None = None) -> bool:
    """Whether `PHALANX_DEBUG` asks for everything that an error can show.

    Raises:
        ConfigError: The variable is neither true nor false.
    """
    return VariableReader(env).flag("PHALANX_DEBUG")


def as_gloo(env: Mapping[str, str] | None = None) -> bool:
    """Whether `PHALANX_AS_GLOO` asks that torch's "gloo" be Phalanx.

    Raises:
        ConfigError: The variable is neither true nor false.
    """
    return VariableReader(env).flag("PHALANX_AS_GLOO")


def min_size(env: Mapping[str, str] | None = None) -> int:
    """The fewest ranks with which an elastic job goes on: what `phalanx run --elastic` says, else 1.

    Raises:
        ConfigError: The variable is not a number.
    """
    found = VariableReader(env).integer("PHALANX_MIN_SIZE")
    return 1 if found is None else found


def last_words_folder(env: Mapping[str, str] | None = None) -> str | None:
    """The folder where a rank leaves its last traceback for `phalanx run`; None under any other launcher."""
    return VariableReader(env).text("PHALANX_LAST_WORDS")


def torch_hooks_wanted(env: Mapping[str, str] | None = None) -> bool:
    """Whether the user has asked for hooks that torch attaches to a process group by itself.

    torch attaches its flight recorder unless it is told not to, but that takes longer than a short collective: on
    Phalanx it records what happens only if the variable is set.
    """
    reader = VariableReader(env)
    recorded = reader.text("TORCH_FR_BUFFER_SIZE") or reader.text("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    return recorded != "0" or reader.text("TORCH_DIST_NAN_CHECK") == "1"


def log_level(env: Mapping[str, str] | None = None) -> int | None:
    """The level that `PHALANX_LOG` asks for, as `logging` counts; None if it is not set.

    Raises:
        ConfigError: The variable names no level.
    """
    text = VariableReader(env).text("PHALANX_LOG")
    if text is None:
        return None
    if text.lower() not in _LEVELS:
        raise invalid("PHALANX_LOG", text, ", ".join(_LEVELS))
    return _LEVELS[text.lower()]


def tuning_of_choice(env: Mapping[str, str] | None = None) -> str | None:
    """The tuning that `PHALANX_TUNING` asks for: "off", "fresh" or the path of a file; None if it is not set."""
    text = VariableReader(env).text("PHALANX_TUNING")
    return text.lower() if text is not None and text.lower() in ("off", "fresh") else text


def inherited(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the whole environment, for a launcher to build its children's on. Holds the token: never log it."""
    return dict(environment(env))


def snapshot(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every variable of the table that is set, in the table's order, safe to show: a secret only by its length."""
    reader = VariableReader(env)
    shown: dict[str, str] = {}
    for variable in VARIABLES:
        value = reader.raw(variable.name)
        if value is not None:
            shown[variable.name] = f"set ({len(value)} characters)" if variable.secret else value
    return shown


def unknown_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """Names that start with `PHALANX_` but that nothing reads: most likely misspelt. No values, they may be secret."""
    return sorted(name for name in environment(env) if name.startswith("PHALANX_") and name not in VARIABLES_BY_NAME)


def nearest_variable(name: str) -> str | None:
    """The variable of Phalanx that was most likely meant; None if none is like it."""
    known = [variable.name for variable in VARIABLES if variable.name.startswith("PHALANX_")]
    # Without what all have in common, which makes all of them alike.
    words = {one.removeprefix("PHALANX_"): one for one in known}
    found = difflib.get_close_matches(name.upper().removeprefix("PHALANX_"), words, 1, 0.6)
    return words[found[0]] if found else None


def runtime_dir(env: Mapping[str, str] | None = None) -> Path:
    """The folder for this user's private files, where no other user can read, write or replace them.

    That is `XDG_RUNTIME_DIR` if it is fit for it, else `phalanx-<uid>` in `TMPDIR` or `/tmp`, which is made if needed.

    Raises:
        ConfigError: The folder cannot be made, or is not this user's alone.
    """
    reader = VariableReader(env)
    preferred = reader.text("XDG_RUNTIME_DIR")
    if preferred is not None and os.path.isabs(preferred):
        folder = Path(preferred)
        # A login session's folder may be left over in the variable of a batch job: then it is simply not used.
        if _unfit(folder) is None:
            return folder

    parent = Path(reader.text("TMPDIR") or "/tmp")  # noqa: S108 - what is made in it is checked below
    folder = parent / f"phalanx-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)  # raises for a file and for a dangling link of that name
        parent_mode = parent.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot make {folder} for private files: {error.strerror}{_WAY_OUT}") from error
    fault = _unfit(folder)
    if fault is None and parent_mode & 0o022 and not parent_mode & stat.S_ISVTX:
        # Without the sticky bit others may rename our folder and put theirs in its place.
        fault = f"other users can replace it, as {parent} is writable for them and not sticky"
    if fault is not None:
        raise ConfigError(f"{folder} cannot hold private files: {fault}{_WAY_OUT}")
    return folder


_VANISHES = 1000
"""Times that a folder may be removed between its making and a look at it."""


def memory_dir(env: Mapping[str, str] | None = None) -> Path:
    """The folder for this user's private files in memory, `phalanx-<uid>` in `/dev/shm`; `runtime_dir` without one.

    `PHALANX_SLATE_DIR` names another.

    Raises:
        ConfigError: The folder cannot be made, or is not this user's alone.
    """
    chosen = VariableReader(env).text("PHALANX_SLATE_DIR")
    if chosen is not None:
        folder = Path(chosen)
        fault = _make_passing(folder)
        if fault is not None:
            raise ConfigError(f"PHALANX_SLATE_DIR={folder} cannot hold private files: {fault}")
        return folder
    parent = Path(SHARED_MEMORY)
    folder = parent / f"phalanx-{os.geteuid()}"
    try:
        may_make = os.access(parent, os.W_OK | os.X_OK) and bool(parent.stat().st_mode & stat.S_ISVTX)
    except OSError:
        may_make = False
    if may_make and _make_passing(folder) is None:
        return folder
    folder = runtime_dir(env) / "phalanx-slates"
    fault = _make_passing(folder)
    if fault is not None:
        raise ConfigError(f"cannot make {folder} for private files: {fault}{_WAY_OUT}")
    return folder


def _make_passing(folder: Path) -> str | None:
    """Makes a folder that goes with its last file; the reason why it cannot hold private files, or None if it can.

    Any process of this user that takes the last file out removes the folder: it may vanish between any two looks at it.
    """
    fault: str | None = None
    for _ in range(_VANISHES):
        try:
            # Not with `exist_ok`: that looks whether it is a folder, and raises if it has vanished by then.
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            return error.strerror
        fault = _unfit(folder)
        if fault != os.strerror(errno.ENOENT):
            break
    return fault


def is_watched(env: Mapping[str, str] | None = None) -> bool:
    """True for a rank whose launcher reads its slate at the end, and then removes it."""
    return VariableReader(env).text("PHALANX_WATCHED") is not None


def cache_dir(env: Mapping[str, str] | None = None) -> Path | None:
    """The folder for what Phalanx keeps between programs, which may not exist yet; None if there is none.

    That is `phalanx` in `XDG_CACHE_HOME` or `~/.cache`. Where this user cannot write there, it is `runtime_dir`, which
    lasts for as long as the machine runs.
    """
    preferred = VariableReader(env).text("XDG_CACHE_HOME")
    try:
        base = Path(preferred) if preferred is not None and os.path.isabs(preferred) else Path.home() / ".cache"
        folder = base / "phalanx"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # a home that is read-only, a file in the way, or no home at all
        pass
    try:
        return runtime_dir(env)
    except ConfigError:
        return None


_WAY_OUT = "; set XDG_RUNTIME_DIR or TMPDIR to a folder of this user with mode 0700"


def _unfit(folder: Path) -> str | None:
    """The reason why the folder cannot hold private files; None if it can."""
    try:
        # lstat: a link could be turned to another place between this look and the use.
        status = folder.lstat()
    except OSError as error:
        return error.strerror or "it cannot be read"
    if not stat.S_ISDIR(status.st_mode):
        return "it is a symbolic link" if stat.S_ISLNK(status.st_mode) else "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, this is user {os.geteuid()}"
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return f"its mode is {mode:04o}, which lets other users in (expected 0700)"
    if mode & 0o700 == 0o700:
        try:
            # By a descriptor: of a path that has vanished since, `access` would say that it cannot be written to.
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            return error.strerror or "it cannot be read"
        try:
            if os.access(".", os.W_OK | os.X_OK, dir_fd=opened):
                return None
        finally:
            os.close(opened)
    return f"this user cannot write to it (mode {mode:04o}, expected 0700)"
