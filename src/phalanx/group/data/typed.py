"""Objects of the user's own types in the object verbs: dataclasses, Structs, named tuples and members of an enum.

They travel as plain data with the names of their types. The receiver names the type that it expects by `type=`, and
makes only that; without it, it refuses them.
"""

from __future__ import annotations

import typing
from typing import Any

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
        is_type = isinstance(annotation, type) or typing.get_origin(annotation) is not None or annotation is Any
        if annotation is not None and not is_type:
            raise UsageError(
                f"type={shown(annotation)} is not valid (expected a class, or a type such as list[Config])"
            )
        if annotation is not None and allow_pickle:
            raise UsageError("type= and allow_pickle=True exclude each other (a pickle says itself what it is)")
        self._annotation = annotation

    @property
    def is_given(self) -> bool:
        """True if objects of the sender's types are expected."""
        return self._annotation is not None

    def check_own(self, obj: Any) -> None:
        """Refuses an object of this rank that the others would refuse, before it is sent.

        Raises:
            UsageError: The type is a class, and the object is not of it.
        """
        kind = self._annotation
        if isinstance(kind, type) and typing.get_origin(kind) is None and not isinstance(obj, kind):
            raise UsageError(f"cannot send a {type(obj).__name__} as a {kind.__name__} (type={kind.__name__})")

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
            name = getattr(self._annotation, "__name__", str(self._annotation))
            where = f" at ${error.path}" if error.path else ""
            raise UsageError(f"what rank {src} sent is not a {name}: {error.text}{where}", peer=src) from None


PLAIN_DATA = ObjectType(None, allow_pickle=False)
