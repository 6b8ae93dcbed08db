"""Which argument was meant, in the error of a call that Python itself refuses because a verb has no such argument."""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

from ..arguments import did_you_mean

__all__ = ["add_hint", "missing_attribute"]

_REFUSED = re.compile(r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"(\w+)\.(\w+)\(\) missing \d+ required positional arguments?: (.*)")
_TOO_MANY = re.compile(r"(\w+)\.(\w+)\(\) takes .* positional arguments? but .* (?:was|were) given")
_OF_WORK = re.compile(r"unsupported operand type\(s\) for .*'\w*Work'|'\w*Work' object is not")


_OTHER_VERBS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather",
    "alltoall": "all_to_all",
    "bcast": "broadcast",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "gatherv": "gather",
    "scatterv": "scatter",
    "get_rank": "rank",
    "get_size": "world_size",
    "get_world_size": "world_size",
    "size": "world_size",
    "num_ranks": "world_size",
    "all_gather_into_tensor": "all_gather",
    "all_reduce_coalesced": "all_reduce_many",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast_object_list": "broadcast_object",
    "new_group": "subgroup",
    "destroy": "close",
    "finalize": "close",
    "shutdown": "close",
    "wait": "barrier",
    "sync": "barrier",
}
"""Names of other libraries, in lower case, for the same verbs and properties."""


def missing_attribute(group: type, name: str) -> str:
    """The message for an attribute that groups do not have, with the one that was meant."""
    text = f"{group.__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return text
    public = [known for known in dir(group) if not known.startswith("_")]
    near = difflib.get_close_matches(name.lower(), public, 1)
    meant = _OTHER_VERBS.get(name.lower()) or (near[0] if near else "")
    return f"{text} (did you mean {meant!r}?)" if meant else text


def add_hint(error: BaseException, group: type) -> None:
    """Says in the error of a call that Python itself refuses which argument was meant, and which the verb has.

    Args:
        group: The class with the verbs.
    """
    if type(error) is not TypeError or len(error.args) != 1:
        return
    text = str(error.args[0])
    if _OF_WORK.match(text):
        text = re.sub(r"'\w+Work'", "'Work'", text)  # there are several kinds, which nobody has to know
        error.args = (f"{text} (a Work is an operation under way: its wait() gives the result)",)
        return
    found = _REFUSED.match(text) or _MISSING.match(text) or _TOO_MANY.match(text)
    if found is None or found[1] not in (base.__name__ for base in group.__mro__):
        return
    verb: Any = getattr(group, found[2], None)
    if callable(verb):
        error.args = (_explained(text, found, verb),)


def _explained(text: str, found: re.Match[str], verb: Any) -> str:
    parameters = [one for one in inspect.signature(verb).parameters.values() if one.name != "self"]
    names = [one.name for one in parameters]
    if found.re is _REFUSED:
        return f"{found[2]}() has no argument {found[3]!r} ({did_you_mean(found[3], names)}it takes {', '.join(names)})"
    if found.re is _MISSING:
        return f"{found[2]}() needs {found[3]} (it takes {', '.join(names)})"
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return f"{text.partition('.')[2]} ({', '.join(f'{name}=' for name in named)} must be named)"
