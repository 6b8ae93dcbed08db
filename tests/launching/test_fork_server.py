"""What a fork server has imported is right for every rank that is forked from it."""

from __future__ import annotations

import os
import subprocess
import sys

from phalanx.launching import fork_server
from phalanx.testing import run_ranks

LOOK = """
import importlib, os, pkgutil
read = set()
plain = os._Environ.__getitem__

def noted(self, name):
    read.add(name)
    return plain(self, name)

os._Environ.__getitem__ = noted
import phalanx
skipped = ("phalanx._core", "phalanx.__main__", "phalanx.parallel", "phalanx.torch_backend.")
for module in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
    if not module.name.startswith(skipped):
        importlib.import_module(module.name)
phalanx.torch_backend.autoload()
print(*sorted(name for name in read if name.startswith("PHALANX_")))
"""


def test_no_other_variable_is_read_at_import() -> None:
    # Without ours: whoever copies the whole environment reads none of them.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert "PHALANX_PURE" in found
    assert found <= fork_server.READ_AT_IMPORT


def test_other_variables_have_no_server_of_their_own() -> None:
    def parent(_group: object) -> tuple[int, str | None]:
        return os.getppid(), os.environ.get("PHALANX_TRANSPORT")

    ((first, _),) = run_ranks(1, parent, backend="mesh")
    assert run_ranks(1, parent, backend="mesh", env={"PHALANX_TRANSPORT": "tcp"}) == [(first, "tcp")]
    ((other, _),) = run_ranks(1, parent, backend="mesh", env={"PHALANX_PURE": "1"})
    assert other != first
