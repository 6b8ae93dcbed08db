"""The arguments of a remote call, checked against the annotations of the function that is called.

Arguments arrive as plain data: a dataclass as a dict, a member of an enum as its value. The annotations say what to
make of them (`phalanx.wire.conversion`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from ..errors import InvalidArgument
from ..wire.conversion import Check, Mismatch, cached_check, check_for, exact_types, resolve, short

__all__ = ["Signature", "convert_result"]

_MANY = sys.maxsize
_EMPTY = inspect.Parameter.empty


class _Parameter(NamedTuple):
    name: str
    check: Check | None
    """None if any value is accepted."""
    exact: frozenset[type] | None
    """Values of exactly these types need no check; None if no value needs one."""

    def convert(self, function: str, value: Any, step: str = "") -> Any:
        if self.exact is None or type(value) in self.exact:
            return value
        assert self.check is not None
        try:
            return self.check(value)
        except Mismatch as error:
            where = f"argument {short(self.name)}{step}{error.path}"
            raise InvalidArgument(f"{function}() {where}: {error.text}") from None


class Signature:
    """The parameters of a function. Made once, by `Signature.of`, and used for each call."""

    __slots__ = (
        "_exact",
        "_keywords",
        "_least",
        "_most",
        "_positional",
        "_required",
        "_rest",
        "_rest_named",
        "returns",
    )

    def __init__(self, parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any], returns: Any) -> None:
        self.returns = returns
        """The annotation of the result; `Any` if there is none."""
        self._positional: list[_Parameter] = []
        self._keywords: dict[str, _Parameter] = {}
        self._required: list[str] = []
        self._rest: _Parameter | None = None
        self._rest_named: _Parameter | None = None
        needs_keyword = False
        for parameter in parameters:
            known = _parameter(parameter, hints.get(parameter.name, Any))
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = known
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                self._rest_named = known
                continue
            if parameter.kind is parameter.KEYWORD_ONLY:
                needs_keyword |= parameter.default is _EMPTY
            else:
                self._positional.append(known)
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                self._keywords[parameter.name] = known
            if parameter.default is _EMPTY:
                self._required.append(parameter.name)
        # For the fast path: how many arguments may come by position alone, and the types that need no conversion.
        self._least = sum(parameter.name in self._required for parameter in self._positional)
        self._most = len(self._positional) if self._rest is None or self._rest.check else _MANY
        if needs_keyword:
            self._most = -1
        exact = [parameter.exact for parameter in self._positional]
        self._exact = exact if any(types_ is not None for types_ in exact) else []

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """The signature of a function, a bound method, a class (what it is made from) or any other callable.

        Annotations in quotes are looked up; one that cannot be found counts as `Any`. A callable that hides its
        signature, such as some built-in ones, takes anything.
        """
        try:
            signature = _signature(function)
        except (ValueError, TypeError):
            return cls(_ANYTHING, {}, Any)
        hints = _hints(function, {parameter.name: parameter.annotation for parameter in signature.parameters.values()})
        returns = Any
        if not inspect.isclass(function):
            returns = _hints(function, {"return": signature.return_annotation})["return"]
        return cls(signature.parameters.values(), hints, returns)

    def bind(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Checks the arguments of a call, and converts them to the types of the annotations.

        Args:
            name: The name of the function in error messages.

        Raises:
            InvalidArgument: One is missing, unknown, too many, or not of its annotation's type; the message says which.
        """
        if not kwargs and self._least <= len(args) <= self._most:
            index = 0
            for exact in self._exact:
                if index == len(args):
                    return args, kwargs
                if exact is not None and type(args[index]) not in exact:
                    return self._convert(name, args), kwargs
                index += 1  # noqa: SIM113 - enumerate and zip cost more than the check itself
            return args, kwargs
        return self._bind(name, args, kwargs)

    def _convert(self, name: str, args: list[Any]) -> list[Any]:
        bound = [parameter.convert(name, value) for parameter, value in zip(self._positional, args, strict=False)]
        for index, value in enumerate(args[len(self._positional) :]):
            assert self._rest is not None
            bound.append(self._rest.convert(name, value, f"[{index}]"))
        return bound

    def _bind(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional = self._positional
        if len(args) > len(positional) and self._rest is None:
            raise InvalidArgument(f"{name}() takes {self._count()}, got {len(args)}")
        given = {parameter.name for parameter in positional[: len(args)]}
        for key in kwargs:
            if key in self._keywords:
                if key in given:
                    raise InvalidArgument(f"{name}() got argument {short(key)} twice: by position and by name")
            elif self._rest_named is None:
                raise InvalidArgument(f"{name}() has no argument {short(key)} ({self._known()})")
        missing = [repr(key) for key in self._required if key not in given and key not in kwargs]
        if missing:
            raise InvalidArgument(f"{name}() is missing argument{'s' * (len(missing) > 1)} {', '.join(missing)}")
        named = {}
        for key, value in kwargs.items():
            parameter = self._keywords.get(key)
            if parameter is None:
                assert self._rest_named is not None
                parameter = self._rest_named._replace(name=key)
            named[key] = parameter.convert(name, value)
        return self._convert(name, args), named

    def _count(self) -> str:
        most = len(self._positional)
        only_named = len(self._keywords) > sum(parameter.name in self._keywords for parameter in self._positional)
        kind = "positional argument" if only_named else "argument"
        if not most:
            return f"no {kind}s"
        numbers = str(most) if self._least == most else f"{self._least} to {most}"
        return f"{numbers} {kind}{'s' * (most > 1)}"

    def _known(self) -> str:
        names = list(self._keywords)
        hidden = [parameter.name for parameter in self._positional if parameter.name not in self._keywords]
        known = f"arguments: {', '.join(names)}" if names else "it takes no arguments by name"
        return known + (f"; by position only: {', '.join(hidden)}" if hidden else "")


def convert_result(value: Any, type: Any, name: str) -> Any:  # noqa: A002 - the caller knows it as the type
    """Converts a result to the type that the caller expects.

    Args:
        type: Any annotation.
        name: The name of the function in error messages.

    Raises:
        InvalidArgument: It is not of that type.
    """
    check = cached_check(type)
    if check is None:
        return value
    try:
        return check(value)
    except Mismatch as error:
        raise InvalidArgument(f"{name}() result{error.path}: {error.text}") from None


# -- annotations -----------------------------------------------------------------------------------------------------

if sys.version_info >= (3, 14):  # evaluates annotations on demand, and raises for the first one that it cannot find
    import annotationlib

    _signature = functools.partial(inspect.signature, annotation_format=annotationlib.Format.FORWARDREF)
else:
    _signature = inspect.signature

_ANYTHING = [
    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
]


def _parameter(parameter: inspect.Parameter, annotation: Any) -> _Parameter:
    if parameter.default is None and annotation is not Any:
        annotation = typing.Optional[annotation]  # noqa: UP045 - not all have an `|`; `x: int = None` is common, and means this
    check = check_for(annotation)
    return _Parameter(parameter.name, check, None if check is None else exact_types(annotation))


def _hints(function: Any, annotations: dict[str, Any]) -> dict[str, Any]:
    """The annotations as types; `Any` where there is none, or its name cannot be found."""
    if inspect.isclass(function) and (dataclasses.is_dataclass(function) or issubclass(function, msgspec.Struct)):
        try:  # fields of a base class are to be looked up in its own module
            return {**annotations, **typing.get_type_hints(function, include_extras=True)}
        except Exception:  # one of them cannot be found: look up each on its own
            pass
    space = _namespace(function)
    return {name: resolve(annotation, space) for name, annotation in annotations.items()}


def _namespace(function: Any) -> dict[str, Any]:
    """The globals of the code behind a callable."""
    while isinstance(function, functools.partial):
        function = function.func
    candidates = [function, type(function).__call__]
    if inspect.isclass(function):
        candidates = [function.__init__, function.__new__]
    for candidate in candidates:
        found = getattr(inspect.unwrap(getattr(candidate, "__func__", candidate)), "__globals__", None)
        if isinstance(found, dict):
            return found
    return vars(sys.modules.get(getattr(function, "__module__", ""), typing))
