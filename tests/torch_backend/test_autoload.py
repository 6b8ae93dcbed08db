"""torch loads the plug-in with itself: it must be cheap, and never in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx import torch_backend

LOOK = """
import json, sys
import torch, torch.distributed as dist
before = set(sys.modules)
dist.Backend.backend_list.remove("phalanx") if "phalanx" in dist.Backend.backend_list else None
import phalanx.torch_backend
phalanx.torch_backend.autoload()
phalanx.torch_backend.autoload()
print(json.dumps([sorted(set(sys.modules) - before), dist.Backend.backend_capability["phalanx"],
                  dist.is_backend_available("phalanx")]))
"""


def test_it_imports_nothing_but_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        check=True,
        capture_output=True,
        text=True,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    modules, devices, available = json.loads(done.stdout)
    assert modules == ["phalanx", "phalanx.torch_backend"]
    assert devices == ["cpu", "cuda"]
    assert available


def test_the_entry_point_is_where_torch_looks() -> None:
    (found,) = entry_points(group="torch.backends", name="phalanx")
    assert found.value == "phalanx.torch_backend:autoload"


@pytest.mark.parametrize("distributed", [None, SimpleNamespace(is_available=lambda: False)])
def test_a_torch_without_distributed(distributed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    torch_backend.autoload()
