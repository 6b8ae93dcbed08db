"""Whether anything watches torch: C++ and Python say the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.torch_backend import watchers

needs_functions = pytest.mark.skipif(
    not watchers.addresses_of_watchers(), reason="this torch has no such functions in C++"
)


def in_cpp() -> list[bool]:
    """What the functions at those addresses say."""
    kinds = [kind for _, _, kind in watchers._IN_CPP]
    functions = [ctypes.CFUNCTYPE(kind)(at) for kind, at in zip(kinds, ADDRESSES, strict=True)]
    return watchers._say(functions)


ADDRESSES = watchers.addresses_of_watchers()


def transformed(look: Callable[[], Any]) -> Any:
    """Looks inside of a transform."""
    found: list[Any] = []
    torch.func.vmap(lambda x: found.append(look()) or x)(torch.ones(2))
    return found[0]


@needs_functions
def test_both_say_the_same() -> None:
    watching: list[Any] = [nullcontext(), watchers._Nothing(), torch.autograd.profiler.profile()]
    for which, watcher in enumerate(watching):
        with watcher:
            assert in_cpp() == [bool(which) and i == which - 1 for i in range(3)]
            assert in_cpp() == [bool(ask()) for ask in watchers.WATCHERS]
    assert transformed(in_cpp) == [False, False, True]
    assert in_cpp() == [False] * 3


def test_without_the_functions_python_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with watchers._Nothing():  # there is nothing to compare with
        assert watchers.addresses_of_watchers() == []
    others = [(library, name + "x", kind) for library, name, kind in watchers._IN_CPP]
    monkeypatch.setattr(watchers, "_IN_CPP", others)
    assert watchers.addresses_of_watchers() == []
    monkeypatch.setattr(watchers, "_LIBRARIES", Path("/nonexistent"))
    assert watchers.addresses_of_watchers() == []


@needs_functions
def test_functions_that_say_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "_say", lambda functions: [False] * 3)
    assert watchers.addresses_of_watchers() == []
