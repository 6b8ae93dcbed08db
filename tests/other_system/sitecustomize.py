"""Python as on a system that is not Linux: loaded at the start of every process that has this folder in PYTHONPATH.

What only Linux has is gone from the standard library's modules, and a look into /proc or /sys is an error. The system's
own `ps` stays, as macOS has one.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
from types import ModuleType

LINUX_ONLY: dict[ModuleType, tuple[str, ...]] = {
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW"),
    os: ("memfd_create", "eventfd", "sched_getaffinity", "sched_setaffinity", "waitid", "pidfd_open", "O_PATH"),
    select: ("epoll", "POLLRDHUP"),
    socket: ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "SO_PEERCRED"),
}
for module, names in LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(f"there is no {arguments[0]} on this system")


sys.addaudithook(refuse)
