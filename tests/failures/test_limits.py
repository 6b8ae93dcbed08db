"""A limit of the operating system: an error of ours that names it, on every rank, and not the system's own."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.system_limits import naming_limits, out_of_resources
from phalanx.testing import run_ranks


def collectives(group: px.Group) -> None:
    group.barrier()


def messages(group: px.Group) -> None:
    group.sendrecv(np.ones(2), 1 - group.rank, None, 1 - group.rank)


def run_out_of_files(group: px.Group, poor: int, use: Callable[[px.Group], None]) -> tuple[str, str, float]:
    """Makes groups until one rank has no more descriptors."""
    group.barrier()
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 6
    if group.rank == poor:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept = []
    try:
        for _ in range(40):
            kept.append(group.subgroup(range(group.world_size)))
            use(kept[-1])
    except px.PhalanxError as error:
        return type(error).__name__, str(error), limit
    return "", "", limit


@pytest.mark.parametrize("use", [collectives, messages])
@pytest.mark.parametrize(("poor", "transport"), [(0, "tcp"), (1, "tcp"), (0, "auto")])
def test_no_more_descriptors(poor: int, transport: Any, use: Callable[[px.Group], None]) -> None:
    options = px.Options(transport=transport)
    found = run_ranks(2, run_out_of_files, poor, use, backend="mesh", options=options, timeout=20)
    name, words, limit = found[poor]
    assert name == "OutOfResources", found
    assert f"files and connections open as it may: {limit}" in words, found
    assert "ulimit -n" in words, found
    assert found[1 - poor][0], found


def without_threads(group: px.Group) -> list[Any]:
    """The thread of asynchronous collectives cannot start: the call never was, and the group goes on."""
    group.barrier()
    real, found = threading.Thread.start, []

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if group.rank == 0:
        threading.Thread.start = refuse  # type: ignore[method-assign]
        try:
            with pytest.raises(px.OutOfResources, match="ulimit -u"):
                group.all_reduce(np.ones(1), async_op=True)
        finally:
            threading.Thread.start = real  # type: ignore[method-assign]
    found.append(group.all_reduce(np.ones(1), async_op=True).wait(timeout=10)[0])
    return [*found, group.all_reduce(np.ones(1), timeout=10)[0]]


def test_no_more_threads() -> None:
    assert run_ranks(2, without_threads, backend="mesh", timeout=40) == [[2.0, 2.0]] * 2


def test_each_limit_has_words_and_other_errors_stay() -> None:
    for number, words in [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "ulimit -v")]:
        with pytest.raises(px.OutOfResources, match=words) as caught, naming_limits():
            raise OSError(number, os.strerror(number))
        assert caught.value.errno == number
        assert isinstance(caught.value, OSError)
    for other in (OSError(errno.EIO, "input/output"), RuntimeError("other"), px.Timeout("late"), ValueError("odd")):
        assert out_of_resources(other) is None
        with pytest.raises(type(other)), naming_limits():
            raise other
