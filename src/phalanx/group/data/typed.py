"""Objects of the user's own types in the object verbs: dataclasses, Structs, named tuples and members of an enum.

They travel as plain data with the names of their types. The receiver names the type that it expects by `type=`, and
makes only that; without it, it refuses them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgspec

from ...arguments import shown
from ...errors import UsageError
from ...wire.conversion import Mismatch, cached_check

__all__ = ["PLAIN_DATA", "ObjectType"]


class ObjectType:
    """The argument `type` of an object verb.

    Args:
        annotation: A class, or an annotation such as `list[Config]`; None if the verb was not given any.

    Raises:
        UsageError: It is neither, or `allow_pickle` is set as well.
    """

    __slots__ = ("_annotation",)

    def __init__(self, annotation: Any, *, allow_pickle: bool) -> None:
        self._annotation = annotation
        if annotation is None:
            return
        if not (isinstance(annotation, type) or typing.get_origin(annotation) is not None or annotation is Any):
            raise UsageError(
                f"type={shown(annotation)} is not valid (expected a class, or a type such as list[Config])"
            )
        if allow_pickle:
            raise UsageError("type= and allow_pickle=True exclude each other (a pickle says itself what it is)")

    @property
    def is_given(self) -> bool:
        """True if objects of the sender's types are expected."""
        return self._annotation is not None

    @property
    def _name(self) -> str:
        if isinstance(self._annotation, type) and typing.get_origin(self._annotation) is None:
            return self._annotation.__name__
        return str(self._annotation).replace("typing.", "")

    def check_own(self, obj: Any) -> None:
        """Refuses an object of this rank that the others would refuse, before it is sent.

        Raises:
            UsageError: It is not of the class that the type names, or something in a list, tuple, set or dict of the
                type is not of the class that stands there.
        """
        wrong = _stranger_in(obj, self._annotation) if self.is_given else None
        if wrong is not None:
            thing, kind = wrong
            raise UsageError(f"cannot send a {type(thing).__name__} as a {kind.__name__} (type={self._name})")

    def convert(self, value: Any, src: int) -> Any:
        """Plain data as an object of this type.

        Args:
            src: The world rank that it came from, for errors.

        Raises:
            UsageError: It does not fit.
        """
        check = cached_check(self._annotation) if self.is_given else None
        if check is None:
            return value
        try:
            return check(value)
        except Mismatch as error:
            where = f" at ${error.path}" if error.path else ""
            raise UsageError(f"what rank {src} sent is not a {self._name}: {error.text}{where}", peer=src) from None


def _stranger_in(obj: Any, annotation: Any) -> tuple[Any, type] | None:
    """Something in `obj` that is not of the class that an annotation has in its place, and that class; None if none."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None:
        if annotation is Any or not isinstance(annotation, type) or isinstance(obj, annotation):
            return None
        return obj, annotation
    if origin in (typing.Union, types.UnionType):
        found = [_stranger_in(obj, member) for member in arguments]
        return None if None in found else found[0]
    pairs: list[tuple[Any, Any]] = []
    if origin in (list, set, frozenset) and isinstance(obj, origin):
        pairs = [(item, arguments[0]) for item in obj]
    elif origin is tuple and isinstance(obj, tuple):
        kinds = arguments[:1] * len(obj) if arguments[1:] == (Ellipsis,) else arguments
        pairs = list(zip(obj, kinds, strict=False))
    elif origin is dict and isinstance(obj, dict):
        pairs = [(item, arguments[1]) for item in obj.values()]
    # An int is a float, and so on: only classes of the user's own are looked at inside.
    wrong = (_stranger_in(item, kind) for item, kind in pairs if _is_own(item))
    return next((one for one in wrong if one is not None), None)


def _is_own(obj: Any) -> bool:
    return dataclasses.is_dataclass(obj) or isinstance(obj, (msgspec.Struct, list, tuple, dict))


PLAIN_DATA = ObjectType(None, allow_pickle=False)
