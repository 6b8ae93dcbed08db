"""Python as on a system that is not Linux: loaded at the start of every process that has this folder in PYTHONPATH.

What only Linux has is gone from the standard library's modules, and a look into /proc or /sys is an error. The system's
own `ps` stays, as macOS has one.
"""

from __future__ import annotations

import importlib
import sys

from linux_only import FOLDERS, MODULES  # type: ignore[import-not-found]

for module, names in MODULES.items():
    found = importlib.import_module(module)
    for name in names.split():
        if hasattr(found, name):
            delattr(found, name)
if "tempfile" in sys.modules:  # a .pth file has imported it before, and it has looked what there is
    sys.modules["tempfile"]._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(FOLDERS):
        raise FileNotFoundError(f"there is no {arguments[0]} on this system")


sys.addaudithook(refuse)
