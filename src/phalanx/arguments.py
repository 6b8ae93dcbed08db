"""Arguments of public calls as plain Python values, checked before anything is done with them.

Anything with `__index__` is an integer, so NumPy's integers and torch's scalars are ranks, counts and lengths as good
as Python's own. A bool is not one: as a rank or a timeout it is a flag in the wrong place.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .errors import InvalidRank, InvalidWorldSize, UsageError

__all__ = [
    "as_counts",
    "as_index",
    "as_rank",
    "as_ranks",
    "as_seconds",
    "as_shape",
    "as_world_size",
    "did_you_mean",
    "explain_unexpected",
    "in_units",
    "plain_number",
    "shown",
]

LONGEST = 1e9
"""Seconds: thirty years. The core counts nanoseconds in 63 bits."""
LARGEST_ARRAY = 2**63 - 1
"""Bytes that can be counted."""
_SHOWN = 100


def shown(value: Any) -> str:
    """A value in an error message: its `repr`, cut short; its type where it has none."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def in_units(size: int) -> str:
    """A number of bytes for a person: `1 GiB`, or where that is not exact `1.5 GiB (1610612737 bytes)`."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << bits:
            exact = "" if size % (1 << bits) == 0 else f" ({size} bytes)"
            return f"{size / (1 << bits):.4g} {unit}{exact}"
    return f"{size} bytes"


def as_index(value: Any, name: str, expected: str = "a whole number") -> int:
    """A plain int.

    Raises:
        UsageError: `value` has no `__index__`, or is a bool.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except Exception:  # whatever the type's own `__index__` raises
        raise UsageError(f"{name}={shown(value)} is not valid (expected {expected})") from None


def as_rank(value: Any, size: int, message: str | None = None) -> int:
    """A rank of a world or group of this size.

    Args:
        message: What to say of a rank that does not exist; `{}` stands for it.

    Raises:
        InvalidRank: It is not a whole number, or not one of the ranks.
    """
    try:
        rank = as_index(value, "rank", f"a whole number from 0 to {size - 1}")
    except UsageError as error:
        raise InvalidRank(value, size, str(error)) from None
    if not 0 <= rank < size:
        alone = "; `phalanx run -n 2 script.py` starts a script on two ranks" if size == 1 else ""
        message = message or f"rank {{}} is not in a world of {size} (valid ranks: 0 to {size - 1}{alone})"
        raise InvalidRank(value, size, message.format(shown(value)))
    return rank


def as_ranks(values: Any, size: int, name: str = "ranks") -> list[int]:
    """Several of them, in the order given.

    Raises:
        UsageError: It is not a list or another iterable.
        InvalidRank: As `as_rank`.
    """
    return [as_rank(value, size) for value in _items(values, name, "a list of ranks")]


def as_world_size(value: Any, minimum: int = 1) -> int:
    """A number of ranks.

    Raises:
        InvalidWorldSize: It is not a whole number, or too small.
    """
    try:
        size = as_index(value, "world_size")
    except UsageError as error:
        raise InvalidWorldSize(value, str(error)) from None
    if size < minimum:
        raise InvalidWorldSize(size, minimum=minimum)
    return size


def as_counts(values: Any, length: int, name: str) -> list[int]:
    """So many whole numbers, none of them negative.

    Raises:
        UsageError: There are more or fewer, or one is not a whole number from 0.
    """
    expected = f"{length} whole numbers, 0 or more"
    counts = [as_index(value, name, expected) for value in _items(values, name, expected)]
    if len(counts) != length or not all(0 <= count <= LARGEST_ARRAY for count in counts):
        raise UsageError(f"{name}={shown(counts)} is not valid (expected {expected})")
    return counts


def as_shape(value: Any, itemsize: int) -> tuple[int, ...]:
    """The lengths of an array's dims; one number is a shape of one dim.

    Raises:
        UsageError: A length is negative or not a whole number, or the array would have more bytes than can be counted.
    """
    expected = "a length or a tuple of lengths, 0 or more"
    is_scalar = getattr(value, "ndim", 1) == 0
    if hasattr(value, "__iter__") and not is_scalar:
        lengths = tuple(as_index(length, "shape", expected) for length in _items(value, "shape", expected))
    else:
        lengths = (as_index(value, "shape", expected),)
    size = itemsize
    for length in lengths:
        size *= max(1, length)
    if any(length < 0 for length in lengths) or size > LARGEST_ARRAY or len(lengths) > _MOST_DIMS:
        raise UsageError(f"shape={shown(value)} is not valid (expected {expected}, at most 2**63 bytes in all)")
    return lengths


_MOST_DIMS = 32
"""NumPy 1 has no more."""


def as_seconds(value: Any, name: str = "timeout") -> float:
    """Seconds as a plain float.

    Raises:
        UsageError: It is not a number, negative, or longer than thirty years: no wait is without an end.
    """
    seconds = value if type(value) is float or type(value) is int else _as_float(value)
    if not 0 <= seconds <= LONGEST:  # also refuses NaN
        raise UsageError(f"{name}={shown(value)} is not valid (expected seconds, from 0 to {LONGEST:.0e})")
    return float(seconds)


def plain_number(value: Any) -> Any:
    """A number of any library as Python's own int or float; what is none, as it is."""
    if isinstance(value, (int, float, str, bytes)) or value is None:
        return value
    try:
        return as_index(value, "")
    except UsageError:
        number = _as_float(value)
        return value if math.isnan(number) else number


def _as_float(value: Any) -> float:
    """NaN if it is no number."""
    is_flag = isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"
    number = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if is_flag or not number or getattr(value, "ndim", 0):
        return float("nan")
    try:
        return float(value)
    except Exception:  # whatever the type's own `__float__` raises
        return float("nan")


def _items(values: Any, name: str, expected: str) -> Iterable[Any]:
    try:
        if isinstance(values, (str, bytes, dict)):
            raise TypeError
        return list(values)
    except Exception:  # whatever the type's own `__iter__` raises
        raise UsageError(f"{name}={shown(values)} is not valid (expected {expected})") from None


_OTHER_NAMES = {
    "root": ("src", "dst"),
    "source": ("src",),
    "dest": ("dst",),
    "destination": ("dst",),
    "to": ("dst",),
    "peer": ("src", "dst"),
    "rank": ("src", "dst"),
    "reduce_op": ("op",),
    "reduction": ("op",),
    "output": ("out",),
    "tensor": ("x",),
    "array": ("x",),
    "object": ("obj",),
    "returns": ("type",),
}
"""Names of other libraries for the same arguments."""


def did_you_mean(given: str, names: Sequence[str]) -> str:
    """`did you mean 'src'? ` for an argument of a name that a function does not have; empty if none is like it."""
    meant = [name for name in _OTHER_NAMES.get(given, ()) if name in names]
    meant = meant or difflib.get_close_matches(given, names, 1)
    return f"did you mean {meant[0]!r}? " if meant else ""


def explain_unexpected(error: BaseException, function: Callable[..., Any]) -> None:
    """Says in the error of a call with an argument that a function does not have, or has already, what it takes."""
    if type(error) is not TypeError or len(error.args) != 1:
        return
    words = r"([\w.]+)\(\) got (an unexpected keyword argument|multiple values for argument) '(\w+)'$"
    found = re.match(words, str(error.args[0]))
    if found is not None and found[1] == function.__qualname__:
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        listed = f"it takes {', '.join(names)}"
        if found[2].startswith("an"):
            wrong = f"has no argument {found[3]!r} ({did_you_mean(found[3], names)}{listed})"
        else:
            wrong = f"was given {found[3]!r} twice, by its place and by its name ({listed})"
        error.args = (f"{function.__name__}() {wrong}",)
        error.__traceback__ = None  # the line that called it says it all
