"""Keeps `torch.compile` out of here: it would otherwise trace into functions that a compiled program calls.

Done by hand, because what torch offers for it (`torch.compiler.disable`) imports the whole compiler, which takes
seconds, for programs that never use it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

__all__ = ["leave_alone", "leave_calls_alone", "not_inlined"]

F = TypeVar("F", bound=Callable[..., Any])

_CALLED = ("phalanx.group", "phalanx.rpc", "phalanx.world")
"""The modules, with all below them, whose functions programs call."""
_marked: set[str] = set()
"""The names of those that are marked already."""


def leave_calls_alone(below: str | tuple[str, ...] = _CALLED) -> None:
    """Marks the functions that programs call, as far as their modules are loaded; without torch, nothing.

    Args:
        below: The modules, with all below them.
    """
    if "torch" not in sys.modules:
        return
    found = {name: module for name, module in sys.modules.copy().items() if name.startswith(below)}
    for function in _functions_of(module for name, module in found.items() if name not in _marked):
        not_inlined(function)
    leave_alone(module for name, module in found.items() if name not in _marked)
    _marked.update(found)


def not_inlined(function: F) -> F:
    """Decorates a function that is not to be traced as a part of its caller either, as torch.compiler.disable does."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def leave_alone(modules: Iterable[ModuleType]) -> None:
    """Marks every function of these modules, so that none is traced when it runs."""
    skip = _skipper()
    for function in _functions_of(modules):
        _mark(function.__code__, skip)


def _functions_of(modules: Iterable[ModuleType]) -> Iterator[FunctionType]:
    """The functions of modules, and the methods and getters of their classes."""
    for module in modules:
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            members = vars(value).values() if inspect.isclass(value) else [value]
            for member in members:
                function = member.fget if isinstance(member, property) else member
                if inspect.isfunction(function):
                    yield function


def _skipper() -> Callable[[CodeType], object]:
    """Decorates code that is not to be traced, with all that it calls; releases of torch have different ways."""
    torch: Any = sys.modules["torch"]
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    skip_code: Callable[[CodeType], object] = getattr(frames, "skip_code", lambda code: None)
    return skip_code


def _mark(code: CodeType, skip: Callable[[CodeType], object]) -> None:
    skip(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _mark(constant, skip)
