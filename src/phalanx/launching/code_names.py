"""The global names that a code object uses."""

from __future__ import annotations

import dis
import types

__all__ = ["global_names"]

_GLOBAL = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_OF_A_BODY = "LOAD_NAME"
"""How the body of a class reads names, its own and global ones."""


def global_names(code: types.CodeType) -> set[str]:
    """The names of globals that the code reads or writes, also in functions and classes inside it."""
    found: set[str] = set()
    waiting = [code]
    while waiting:
        code = waiting.pop()
        for instruction in dis.get_instructions(code):
            name = instruction.opname
            # Newer Pythons have more of them, such as LOAD_FROM_DICT_OR_GLOBALS.
            if name in _GLOBAL or name.startswith(_OF_A_BODY) or name.endswith("_OR_GLOBALS"):
                found.add(str(instruction.argval))
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found
