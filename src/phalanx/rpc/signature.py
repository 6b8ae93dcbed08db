"""The arguments of a remote call, checked against the annotations of the function that is called.

Arguments arrive as plain data: a dataclass as a dict, a member of an enum as its value. The annotations say what to
make of them. msgspec converts strictly: an int passes for a float, but text does not pass for a number, nor a bool for
an int. What msgspec cannot convert (unions with arrays, and types that contain one) is converted here, piece by piece.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..errors import InvalidArgument
from ..exception_text import describe

__all__ = ["Signature", "convert_result"]

_NATIVE = (bytes, bytearray, memoryview, dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID, decimal.Decimal)
"""Types that the codec sends as they are, so text is never converted to one of them."""
_SHOWN = 40  # characters of a value that a message repeats
_MANY = sys.maxsize
_EMPTY = inspect.Parameter.empty

_Check = Callable[[Any], Any]
"""Converts a value to the type of the annotation, or raises `_Mismatch`."""


class _Mismatch(Exception):
    """A value is not what its annotation says. `path` leads to it: `.x[3]`."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.path = path


class _Parameter(NamedTuple):
    name: str
    check: _Check | None
    """None if any value is accepted."""
    exact: frozenset[type] | None
    """Values of exactly these types need no check; None if no value needs one."""

    def convert(self, function: str, value: Any, step: str = "") -> Any:
        if self.exact is None or type(value) in self.exact:
            return value
        assert self.check is not None
        try:
            return self.check(value)
        except _Mismatch as error:
            where = f"argument {_short(self.name)}{step}{error.path}"
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
                    raise InvalidArgument(f"{name}() got argument {_short(key)} twice: by position and by name")
            elif self._rest_named is None:
                raise InvalidArgument(f"{name}() has no argument {_short(key)} ({self._known()})")
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
    try:
        check = _cached_check(type)
    except TypeError:  # an annotation that cannot be hashed
        check = _check_for(type)
    if check is None:
        return value
    try:
        return check(value)
    except _Mismatch as error:
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
    check = _check_for(annotation)
    return _Parameter(parameter.name, check, None if check is None else _exact_types(annotation))


def _hints(function: Any, annotations: dict[str, Any]) -> dict[str, Any]:
    """The annotations as types; `Any` where there is none, or its name cannot be found."""
    if inspect.isclass(function) and (dataclasses.is_dataclass(function) or issubclass(function, msgspec.Struct)):
        try:  # fields of a base class are to be looked up in its own module
            return {**annotations, **typing.get_type_hints(function, include_extras=True)}
        except Exception:  # one of them cannot be found: look up each on its own
            pass
    space = _namespace(function)
    return {name: _resolve(annotation, space) for name, annotation in annotations.items()}


def _resolve(annotation: Any, space: dict[str, Any]) -> Any:
    if annotation is _EMPTY:
        return Any

    def holder() -> None:
        """Carries the annotation: only those of a function are looked up in a given namespace."""

    holder.__annotations__ = {"x": annotation}
    try:
        return typing.get_type_hints(holder, space, include_extras=True)["x"]
    except Exception:  # anything may stand in the quotes
        return Any


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


def _members(annotation: Any) -> tuple[Any, ...] | None:
    """The alternatives of a union; None if the annotation is not a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return None


def _is_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and typing.get_origin(annotation) is None  # list[int] was a type until 3.11


def _exact_types(annotation: Any) -> frozenset[type]:
    """Types whose values certainly need no conversion, whatever they contain."""
    members = _members(annotation)
    if members is not None:
        return frozenset().union(*map(_exact_types, members))
    if typing.get_origin(annotation) is np.ndarray:
        annotation = np.ndarray
    if annotation is None:
        annotation = type(None)
    return frozenset({annotation}) if _is_class(annotation) else frozenset()


# -- conversion ------------------------------------------------------------------------------------------------------


def _check_for(annotation: Any) -> _Check | None:
    """The conversion to this annotation; None if any value is accepted."""
    if annotation is Any or annotation is object:
        return None
    if getattr(annotation, "_is_protocol", False) and not getattr(annotation, "_is_runtime_protocol", False):
        return None  # it cannot be checked at run time
    try:
        msgspec.msgpack.Decoder(annotation)
    except Exception:  # a union that it does not take, an annotation inside a class that cannot be found, ...
        return _own_check(annotation)
    return functools.partial(_convert, annotation)


_cached_check = functools.lru_cache(maxsize=256)(_check_for)


def _convert(annotation: Any, value: Any) -> Any:
    if annotation is float and type(value) is int and -(2**53) <= value <= 2**53:
        return float(value)
    try:
        return msgspec.convert(value, annotation, builtin_types=_NATIVE)
    except Exception as error:
        problem: Exception = error
    if isinstance(problem, msgspec.ValidationError):
        plain = _without_numpy_scalars(value)
        if plain is not value:
            try:
                return msgspec.convert(plain, annotation, builtin_types=_NATIVE)
            except msgspec.ValidationError as error:
                problem = error
            except Exception:
                pass
    raise _explain(problem, annotation, value) from None


def _without_numpy_scalars(value: Any) -> Any:
    """The value itself, or a copy with NumPy scalars as Python numbers, so that `float` takes a `np.float32`."""
    kind = type(value)
    if isinstance(value, np.generic):
        return value.item()
    if kind is dict:
        plain: Any = {key: _without_numpy_scalars(item) for key, item in value.items()}
        return value if all(map(_is, plain.values(), value.values())) else plain
    if kind in (list, tuple):
        plain = kind(map(_without_numpy_scalars, value))
        return value if all(map(_is, plain, value)) else plain
    return value


def _is(a: Any, b: Any) -> bool:
    return a is b


_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_PLACE = re.compile(r" - at (`key` in )?`\$([^`]*)`$")
_WORDS = {"null": "None", "object": "dict", "array": "list", "decimal": "Decimal", "uuid": "UUID"}
_WORDS |= {"duration": "timedelta", "numpy.ndarray": "ndarray"}


def _explain(problem: Exception, annotation: Any, value: Any) -> _Mismatch:
    """The error of msgspec, with the names of Python types."""
    if not isinstance(problem, msgspec.ValidationError):
        return _Mismatch(f"cannot be made a {_name(annotation)}: {_cut(describe(problem), 200)}")
    text, path = str(problem), ""
    place = _PLACE.search(text)
    if place:
        text, path = text[: place.start()], place[2] + (".keys()" if place[1] else "")
    match = _EXPECTED.fullmatch(text)
    if match is None:  # a limit of the annotation, a field that is missing, what __post_init__ has against it
        text = text.replace("Object missing required", "Missing").replace("Object contains unknown", "Unknown")
        text = re.sub(r"`([^`]*)`", lambda found: _WORDS.get(found[1], found[1]), text)
        return _Mismatch(_cut(text[:1].lower() + text[1:], 200), path)
    if not place:
        return _Mismatch(f"expected {_name(annotation)}, got {_describe(value)}")
    expected, got = (" | ".join(_WORDS.get(word, word) for word in part.split(" | ")) for part in match.groups())
    return _Mismatch(f"expected {expected}, got {got}", path)


def _own_check(annotation: Any) -> _Check | None:
    """A check for a type that msgspec does not know; None if this module does not know it either."""
    members = _members(annotation)
    if members is not None:
        return _UnionCheck(annotation, members)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _check_for(arguments[0])
    if origin in (list, set, frozenset) or origin is tuple:
        return _SequenceCheck(annotation, origin, arguments)
    if origin is dict:
        return _DictCheck(annotation, *arguments)
    if not _is_class(annotation):
        return None
    if issubclass(annotation, enum.Enum):
        return functools.partial(_convert_member, annotation)
    if dataclasses.is_dataclass(annotation) or issubclass(annotation, msgspec.Struct):
        return _RecordCheck(annotation)
    return functools.partial(_convert_instance, annotation)


def _convert_member(kind: type[enum.Enum], value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise _Mismatch(f"expected {_name(kind)}, got {_describe(value)}") from None


def _convert_instance(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _Mismatch(f"expected {_name(kind)}, got {_describe(value)}")
    return value


class _UnionCheck:
    """Converts to the first alternative of a union that accepts the value."""

    def __init__(self, annotation: Any, members: tuple[Any, ...]) -> None:
        self._annotation = annotation
        self._exact = _exact_types(annotation)
        self._checks = [_check_for(member) for member in members]

    def __call__(self, value: Any) -> Any:
        if type(value) in self._exact:
            return value
        deepest: _Mismatch | None = None
        for check in self._checks:
            try:
                return value if check is None else check(value)
            except _Mismatch as error:
                if error.path and (deepest is None or len(error.path) > len(deepest.path)):
                    deepest = error
        raise deepest or _Mismatch(f"expected {_name(self._annotation)}, got {_describe(value)}")


class _SequenceCheck:
    """Converts a list, set or tuple item by item."""

    def __init__(self, annotation: Any, kind: Any, arguments: tuple[Any, ...]) -> None:
        self._annotation = annotation
        self._kind = kind
        self._fixed = kind is tuple and arguments[1:] != (Ellipsis,)
        self._checks = [_lazy_check(item) for item in (arguments if self._fixed else arguments[:1])]

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise _Mismatch(f"expected {_name(self._annotation)}, got {_describe(value)}")
        checks = self._checks if self._fixed else self._checks * len(value)
        if len(checks) != len(value):
            raise _Mismatch(f"expected {_name(self._annotation)}, got {len(value)} items")
        out = []
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            out.append(_at(f"[{index}]", check, item))
        return self._kind(out)


class _DictCheck:
    """Converts a dict item by item."""

    def __init__(self, annotation: Any, key: Any, item: Any) -> None:
        self._annotation = annotation
        self._key = _lazy_check(key)
        self._item = _lazy_check(item)

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f"expected {_name(self._annotation)}, got {_describe(value)}")
        return {_at(".keys()", self._key, key): _at("[...]", self._item, item) for key, item in value.items()}


class _RecordCheck:
    """Converts to a dataclass or Struct that has a field which msgspec does not know."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    @functools.cached_property
    def _fields(self) -> dict[str, tuple[str, _Check]]:
        """The attribute and the check for each name in the message. Looked up late, because a class may name itself."""
        if issubclass(self._kind, msgspec.Struct):
            names = dict(zip(self._kind.__struct_encode_fields__, self._kind.__struct_fields__, strict=True))
        else:
            names = {field.name: field.name for field in dataclasses.fields(self._kind) if field.init}
        annotations = {}
        for base in reversed(self._kind.__mro__):
            space = vars(sys.modules.get(base.__module__, typing))
            own = inspect.get_annotations(base)
            annotations.update({name: _resolve(own[name], space) for name in own})
        return {name: (own, _lazy_check(annotations.get(own, Any))) for name, own in names.items()}

    def _is_tagged(self, value: dict[Any, Any]) -> bool:
        config = getattr(self._kind, "__struct_config__", None)
        return config is None or config.tag is None or value.get(config.tag_field, config.tag) == config.tag

    def __call__(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return value
        if type(value) is not dict or not self._is_tagged(value):
            raise _Mismatch(f"expected {_name(self._kind)}, got {_describe(value)}")
        found = {}
        for name, (attribute, check) in self._fields.items():
            if name in value:
                found[attribute] = _at(f".{name}", check, value[name])
        try:
            return self._kind(**found)
        except Exception as error:  # a field is missing, or the class refuses the values
            raise _explain(error, self._kind, value) from None


def _lazy_check(annotation: Any) -> _Check:
    return _check_for(annotation) or (lambda value: value)


def _at(step: str, check: _Check, value: Any) -> Any:
    try:
        return check(value)
    except _Mismatch as error:
        raise _Mismatch(error.text, step + error.path) from None


# -- words -----------------------------------------------------------------------------------------------------------


def _name(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "None"
    members = _members(annotation)
    if members is not None:
        return " | ".join(map(_name, members))
    if _is_class(annotation):
        return str(annotation.__name__)
    if typing.get_origin(annotation) is np.ndarray:
        return "ndarray"
    return _cut(str(annotation).replace("typing.", ""), 200)


def _describe(value: Any) -> str:
    """The type of a value, and the value where that is short and cheap to show."""
    kind = type(value)
    if value is None:
        return "None"
    if kind in (str, bytes):
        return f"{kind.__name__} {_short(value)}"
    if kind in (bool, float) or (kind is int and value.bit_length() <= 128):
        return f"{kind.__name__} {value!r}"
    return kind.__name__


def _short(value: str | bytes) -> str:
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
