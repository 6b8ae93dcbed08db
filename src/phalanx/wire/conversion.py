"""Plain data as the types that annotations name.

Objects arrive as plain data: a dataclass as a dict, a member of an enum as its value. The receiver names the type that
it expects, and only that is made: nothing of the sender's says which. msgspec converts strictly: an int passes for a
float, but text does not pass for a number, nor a bool for an int. What msgspec cannot convert (unions with arrays, and
types that contain one) is converted here, piece by piece.

A dict may have keys that the dataclass or Struct does not have: they are left out, unless the Struct forbids it. One
that it needs and that is missing is an error.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import os
import re
import sys
import threading
import types
import typing
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from phalanx.exception_text import describe

__all__ = ["Check", "Mismatch", "cached_check", "check_for", "exact_types", "resolve", "short"]

_NATIVE = (bytes, bytearray, memoryview, dt.datetime, dt.date, dt.time, dt.timedelta, uuid.UUID, decimal.Decimal)
"""Types that the codec sends as they are, so text is never converted to one of them."""
_SHOWN = 40  # characters of a value that a message repeats
_EMPTY = inspect.Parameter.empty

Check = Callable[[Any], Any]
"""Converts a value to the type of the annotation, or raises `Mismatch`."""


class Mismatch(Exception):
    """A value is not what its annotation says. `path` leads to it: `.x[3]`."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.path = path


# -- annotations -----------------------------------------------------------------------------------------------------


def resolve(annotation: Any, space: dict[str, Any]) -> Any:
    """An annotation as a type; `Any` if there is none, or its name cannot be found in `space`."""
    if annotation is _EMPTY:
        return Any

    def holder() -> None:
        """Carries the annotation: only those of a function are looked up in a given namespace."""

    holder.__annotations__ = {"x": annotation}
    try:
        return typing.get_type_hints(holder, space, include_extras=True)["x"]
    except Exception:  # anything may stand in the quotes
        return Any


def _members(annotation: Any) -> tuple[Any, ...] | None:
    """The alternatives of a union; None if the annotation is not a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return None


def _is_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and typing.get_origin(annotation) is None  # list[int] was a type until 3.11


def exact_types(annotation: Any) -> frozenset[type]:
    """Types whose values certainly need no conversion, whatever they contain."""
    members = _members(annotation)
    if members is not None:
        return frozenset().union(*map(exact_types, members))
    if typing.get_origin(annotation) is np.ndarray:
        annotation = np.ndarray
    if annotation is None:
        annotation = type(None)
    return frozenset({annotation}) if _is_class(annotation) else frozenset()


# -- conversion ------------------------------------------------------------------------------------------------------


def check_for(annotation: Any) -> Check | None:
    """The conversion to this annotation; None if any value is accepted."""
    if annotation is Any or annotation is object:
        return None
    if getattr(annotation, "_is_protocol", False) and not getattr(annotation, "_is_runtime_protocol", False):
        return None  # it cannot be checked at run time
    try:
        _prepare(annotation)
    except Exception:  # a union that it does not take, an annotation inside a class that cannot be found, ...
        return _own_check(annotation)
    return functools.partial(_convert, annotation)


_preparing = threading.RLock()
os.register_at_fork(before=_preparing.acquire, after_in_parent=_preparing.release, after_in_child=_preparing.release)


def _prepare(annotation: Any) -> None:
    """Has msgspec look at all classes that an annotation names.

    It does that once for each class, at the first use, and what it finds hangs on the class before it is complete:
    another thread that uses the class meanwhile reads a null pointer. So no class is used before it went through here.

    Raises:
        TypeError, NameError and others: msgspec cannot convert to it.
    """
    with _preparing:
        msgspec.msgpack.Decoder(annotation)


_cached_check = functools.lru_cache(maxsize=256)(check_for)


def cached_check(annotation: Any) -> Check | None:
    """As `check_for`; made once for each annotation that can be hashed."""
    try:
        return _cached_check(annotation)
    except TypeError:
        return check_for(annotation)


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


def _explain(problem: Exception, annotation: Any, value: Any) -> Mismatch:
    """The error of msgspec, with the names of Python types."""
    if not isinstance(problem, msgspec.ValidationError):
        return Mismatch(f"cannot be made a {_name(annotation)}: {_cut(describe(problem), 200)}")
    text, path = str(problem), ""
    place = _PLACE.search(text)
    if place:
        text, path = text[: place.start()], place[2] + (".keys()" if place[1] else "")
    match = _EXPECTED.fullmatch(text)
    if match is None:  # a limit of the annotation, a field that is missing, what __post_init__ has against it
        text = text.replace("Object missing required", "Missing").replace("Object contains unknown", "Unknown")
        text = re.sub(r"`([^`]*)`", lambda found: _WORDS.get(found[1], found[1]), text)
        return Mismatch(_cut(text[:1].lower() + text[1:], 200), path)
    if not place:
        return Mismatch(f"expected {_name(annotation)}, got {_describe(value)}")
    expected, got = (" | ".join(_WORDS.get(word, word) for word in part.split(" | ")) for part in match.groups())
    return Mismatch(f"expected {expected}, got {got}", path)


def _own_check(annotation: Any) -> Check | None:
    """A check for a type that msgspec does not know; None if this module does not know it either."""
    members = _members(annotation)
    if members is not None:
        return _UnionCheck(annotation, members)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return check_for(arguments[0])
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
        raise Mismatch(f"expected {_name(kind)}, got {_describe(value)}") from None


def _convert_instance(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise Mismatch(f"expected {_name(kind)}, got {_describe(value)}")
    return value


class _UnionCheck:
    """Converts to the first alternative of a union that accepts the value.

    Of several dataclasses or Structs that would accept a dict, the one with just these fields is meant. If there is no
    such, or more than one, it is refused: which one the sender had is unknown.
    """

    def __init__(self, annotation: Any, members: tuple[Any, ...]) -> None:
        self._annotation = annotation
        self._exact = exact_types(annotation)
        self._checks = [(member, check_for(member)) for member in members]

    def __call__(self, value: Any) -> Any:
        if type(value) in self._exact:
            return value
        deepest: Mismatch | None = None
        records: list[tuple[Any, Any]] = []
        for member, check in self._checks:
            try:
                made = value if check is None else check(value)
            except Mismatch as error:
                if error.path and (deepest is None or len(error.path) > len(deepest.path)):
                    deepest = error
                continue
            if type(value) is dict and _is_record(member):
                records.append((member, made))
            elif not records:
                return made
        if len(records) > 1:
            records = [(member, made) for member, made in records if _field_names(member) == value.keys()] or records
        if len(records) > 1:
            names = " or ".join(_name(member) for member, _ in records)
            raise Mismatch(f"could be {names}: its fields fit all of them (Structs can have a tag: tag=True)")
        if records:
            return records[0][1]
        raise deepest or Mismatch(f"expected {_name(self._annotation)}, got {_describe(value)}")


def _is_record(annotation: Any) -> bool:
    """Whether this is a dataclass, or a Struct that does not say itself which one it is."""
    if not _is_class(annotation):
        return False
    if issubclass(annotation, msgspec.Struct):
        return annotation.__struct_config__.tag is None
    return dataclasses.is_dataclass(annotation)


def _field_names(kind: Any) -> set[str]:
    """The names of a dataclass's or Struct's fields, as they are sent."""
    if issubclass(kind, msgspec.Struct):
        return set(kind.__struct_encode_fields__)
    return {field.name for field in dataclasses.fields(kind)}


class _SequenceCheck:
    """Converts a list, set or tuple item by item."""

    def __init__(self, annotation: Any, kind: Any, arguments: tuple[Any, ...]) -> None:
        self._annotation = annotation
        self._kind = kind
        self._fixed = kind is tuple and arguments[1:] != (Ellipsis,)
        self._checks = [_lazy_check(item) for item in (arguments if self._fixed else arguments[:1])]

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise Mismatch(f"expected {_name(self._annotation)}, got {_describe(value)}")
        checks = self._checks if self._fixed else self._checks * len(value)
        if len(checks) != len(value):
            raise Mismatch(f"expected {_name(self._annotation)}, got {len(value)} items")
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
            raise Mismatch(f"expected {_name(self._annotation)}, got {_describe(value)}")
        return {_at(".keys()", self._key, key): _at("[...]", self._item, item) for key, item in value.items()}


class _RecordCheck:
    """Converts to a dataclass or Struct that has a field which msgspec does not know."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._found: dict[str, tuple[str, Check]] | None = None

    @property
    def _fields(self) -> dict[str, tuple[str, Check]]:
        """The attribute and the check for each name in the message. Looked up late, because a class may name itself."""
        if self._found is None:  # not by `cached_property`: its lock may be another thread's when this process forks
            self._found = self._find_fields()
        return self._found

    def _find_fields(self) -> dict[str, tuple[str, Check]]:
        if issubclass(self._kind, msgspec.Struct):
            names = dict(zip(self._kind.__struct_encode_fields__, self._kind.__struct_fields__, strict=True))
        else:
            names = {field.name: field.name for field in dataclasses.fields(self._kind) if field.init}
        annotations = {}
        for base in reversed(self._kind.__mro__):
            space = vars(sys.modules.get(base.__module__, typing))
            own = inspect.get_annotations(base)
            annotations.update({name: resolve(own[name], space) for name in own})
        return {name: (own, _lazy_check(annotations.get(own, Any))) for name, own in names.items()}

    def _is_tagged(self, value: dict[Any, Any]) -> bool:
        config = getattr(self._kind, "__struct_config__", None)
        return config is None or config.tag is None or value.get(config.tag_field, config.tag) == config.tag

    def __call__(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return value
        if type(value) is not dict or not self._is_tagged(value):
            raise Mismatch(f"expected {_name(self._kind)}, got {_describe(value)}")
        found = {}
        for name, (attribute, check) in self._fields.items():
            if name in value:
                found[attribute] = _at(f".{name}", check, value[name])
        try:
            return self._kind(**found)
        except Exception as error:  # a field is missing, or the class refuses the values
            raise _explain(error, self._kind, value) from None


def _lazy_check(annotation: Any) -> Check:
    return check_for(annotation) or (lambda value: value)


def _at(step: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except Mismatch as error:
        raise Mismatch(error.text, step + error.path) from None


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
        return f"{kind.__name__} {short(value)}"
    if kind in (bool, float) or (kind is int and value.bit_length() <= 128):
        return f"{kind.__name__} {value!r}"
    return kind.__name__


def short(value: str | bytes) -> str:
    """Text in an error message, cut short."""
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
