"""The functions and classes that other ranks can call by name, and the objects that they created."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import FunctionNotFound, UsageError
from .signature import Signature

__all__ = ["CREATE", "Function", "Registry"]

CREATE = (1 << 63) - 1
"""As the target of a call: make an instance of the class that is named."""
LONGEST_NAME = 1024
LONGEST_LIST = 20


@dataclass(eq=False, slots=True)
class Function:
    """A registered function, class or method."""

    name: str
    call: Callable[..., Any]
    signature: Signature
    is_coroutine: bool
    """Whether it is a coroutine or asynchronous generator function, which runs in the event loop."""
    result_type: Any
    """The annotation of its result; None if there is none."""
    takes_instance: bool = False
    """Whether it is a method that takes its object as the first argument."""
    is_quick: bool = False
    """Whether it took so little time of late that an answer before it can wait for its own."""


def _function(name: str, call: Callable[..., Any]) -> Function:
    is_coroutine = inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)
    signature = Signature.of(call)
    return Function(name, call, signature, is_coroutine, None if signature.returns is Any else signature.returns)


def _methods(name: str, target: type) -> dict[str, Function]:
    """The public methods of a class, also static and class methods."""
    methods = {}
    for method in dir(target):
        found = getattr(target, method)
        if method.startswith("_") or not inspect.isroutine(found):
            continue
        kind = inspect.getattr_static(target, method)
        takes_instance = not isinstance(kind, (staticmethod, classmethod))
        methods[method] = replace(_function(f"{name}.{method}", found), takes_instance=takes_instance)
    return methods


class Registry:
    """Functions and classes by name. Other ranks can reach nothing else.

    Only the agent holds a reference to it. Handlers often refer to their agent: if the agent's threads held the
    registry as well, an agent that its program has dropped would never be collected.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._functions: dict[str, Function] = {}
        self._classes: dict[str, tuple[Function, dict[str, Function]]] = {}
        self.objects: dict[tuple[object, int], tuple[str, Any]] = {}
        """The objects that callers created: class name and instance, by the caller's link and number of the call."""

    def find(self, owner: object, name: str, target: int, args: list[Any]) -> tuple[Function, list[Any]]:
        """The function, class or method that a call means, and the arguments for it.

        Args:
            owner: The link on which the call came.
            target: 0 for a function, `CREATE` for a class, else the number of an object that was made over that link.

        Raises:
            FunctionNotFound: It is not registered, or the object was freed.
        """
        if target == 0:
            return self._functions.get(name) or self.function(name), args
        if target == CREATE:
            return self.class_of(name), args
        found = self.objects.get((owner, target))
        if found is None:
            raise FunctionNotFound(f"cannot call method {name!r}: its object was freed")
        class_name, instance = found
        method = self.method(class_name, name)
        return method, [instance, *args] if method.takes_instance else args

    def free(self, owner: object, number: int) -> None:
        """Forgets an object that was made over a link."""
        self.objects.pop((owner, number), None)

    def free_all(self, link: object) -> None:
        """Forgets the objects that were made over a link."""
        for key in [key for key in list(self.objects) if key[0] is link]:
            self.objects.pop(key, None)

    def add(self, name: str, target: Any) -> None:
        """Registers a function, a coroutine function, a generator function or a class.

        Raises:
            UsageError: It is not callable, or the name is taken by another one.
        """
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            raise UsageError(f"{name!r} is not a valid name (expected 1 to {LONGEST_NAME} characters)")
        if not callable(target):
            raise UsageError(f"{name!r} cannot be registered: a {type(target).__name__} cannot be called")
        taken = self._functions.get(name) or self._classes.get(name, (None,))[0]
        if taken is not None and taken.call is not target:
            raise UsageError(f"{name!r} is registered already (unregister it first)")
        if inspect.isclass(target):
            self._classes[name] = (_function(name, target), _methods(name, target))
        else:
            self._functions[name] = _function(name, target)

    def remove(self, name: str) -> None:
        """Undoes `add`.

        Raises:
            FunctionNotFound: The name is not registered.
        """
        if self._functions.pop(name, None) is None and self._classes.pop(name, None) is None:
            raise self._not_found(name, "function or class", [*self._functions, *self._classes])

    def function(self, name: str) -> Function:
        """A function.

        Raises:
            FunctionNotFound: It is not registered here.
        """
        function = self._functions.get(name)
        if function is None:
            if name in self._classes:
                raise FunctionNotFound(f"{name!r} on rank {self._rank} is a class (use create)")
            raise self._not_found(name, "function", list(self._functions))
        return function

    def result_type(self, name: str) -> Any:
        """The annotated result of a function; None if it has none, or is not registered here."""
        found = self._functions.get(name)
        return None if found is None else found.result_type

    def method_result_type(self, class_name: str, method: str) -> Any:
        """The annotated result of a method; None if it has none, or its class is not registered here."""
        found = self._classes.get(class_name, (None, {}))[1].get(method)
        return None if found is None else found.result_type

    def class_of(self, name: str) -> Function:
        """A class, as the function that makes an instance.

        Raises:
            FunctionNotFound: It is not registered here.
        """
        found = self._classes.get(name)
        if found is None:
            raise self._not_found(name, "class", list(self._classes))
        return found[0]

    def method(self, class_name: str, method: str) -> Function:
        """A public method of a class.

        Raises:
            FunctionNotFound: The class has no such method.
        """
        found = self._classes.get(class_name)
        methods = {} if found is None else found[1]
        if method not in methods:
            raise self._not_found(method, f"method of {class_name}", list(methods))
        return methods[method]

    def _not_found(self, name: str, kind: str, there_are: list[str]) -> FunctionNotFound:
        names = ", ".join(sorted(there_are)[:LONGEST_LIST]) or "none"
        more = ", ..." if len(there_are) > LONGEST_LIST else ""
        return FunctionNotFound(
            f"no {kind} {name[:100]!r} is registered on rank {self._rank} (there are: {names}{more})"
        )
