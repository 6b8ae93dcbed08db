"""Whether anything watches what torch does: a dispatch mode, a profiler, or a transform such as `vmap`.

Every call asks. To ask the three functions of torch's Python takes a tenth of what a short call does, so the core asks
the functions of C++ below them, where this finds them in torch's libraries and they say the same.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WATCHERS", "addresses_of_watchers"]

WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._functorch.peek_interpreter_stack,
)
"""Functions that say 0, False or None where nothing watches what torch does."""

_LIBRARIES = Path(torch.__file__).parent / "lib"
_IN_CPP = (
    ("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", ctypes.c_int64),
    ("libtorch_cpu.so", "_ZN5torch8profiler4impl15profilerEnabledEv", ctypes.c_bool),
    ("libtorch_cpu.so", "_ZN2at9functorch20getDynamicLayerStackEv", ctypes.POINTER(ctypes.c_void_p * 2)),
)
"""The same in C++: the library, the name, and what it returns. The last one is a vector, which is empty or not."""


def addresses_of_watchers() -> list[int]:
    """Where the functions of C++ are, in the order of `WATCHERS`; an empty list if one was not found for certain."""
    if any(watcher() for watcher in WATCHERS):  # something watches: there is nothing to compare with
        return []
    found = []
    try:
        for library, name, result in _IN_CPP:
            function = getattr(ctypes.CDLL(str(_LIBRARIES / library)), name)
            function.restype = result
            found.append(function)
    except (OSError, AttributeError):
        return []
    if not _agree(found):
        return []
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]


def _agree(functions: list[Any]) -> bool:
    """Whether they say what they must, with a mode and a transform and without. A profiler takes long to begin."""
    if any(_say(functions)):
        return False
    with _Nothing():
        modes = _say(functions)
    torch._C._functorch._grad_increment_nesting()
    try:
        transforms = _say(functions)
    finally:
        torch._C._functorch._grad_decrement_nesting()
    return modes == [True, False, False] and transforms == [False, False, True] and not any(_say(functions))


def _say(functions: list[Any]) -> list[bool]:
    modes, profiler, transforms = functions
    first, end = transforms().contents
    return [modes() != 0, profiler(), first != end]


class _Nothing(TorchDispatchMode):  # type: ignore[misc]
    """A mode that is never asked."""
