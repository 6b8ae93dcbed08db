"""Which argument was meant, in the error of a call that Python itself refuses because a verb has no such argument."""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

__all__ = ["add_hint"]

_REFUSED = re.compile(r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")
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


def add_hint(error: BaseException, group: type) -> None:
    """Says in the error of a call with an argument that the verb does not have which one was meant, and which it has.

    Args:
        group: The class with the verbs.
    """
    if type(error) is not TypeError or len(error.args) != 1:
        return
    found = _REFUSED.match(str(error.args[0]))
    if found is None or found[1] not in (base.__name__ for base in group.__mro__):
        return
    verb: Any = getattr(group, found[2], None)
    if not callable(verb):
        return
    names = [name for name in inspect.signature(verb).parameters if name != "self"]
    meant = [name for name in _OTHER_NAMES.get(found[3], ()) if name in names]
    meant = meant or difflib.get_close_matches(found[3], names, 1)
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    error.args = (f"{found[2]}() has no argument {found[3]!r} ({hint}it takes {', '.join(names)})",)
