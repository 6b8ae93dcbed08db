"""`PHALANX_AS_GLOO=1`: the name "gloo" means Phalanx, for programs that take no other name.

Only what torch makes for "gloo" on the CPU is replaced. The group says that it is Gloo's, as its program expects. For
tensors on a GPU there is still Gloo itself.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed.distributed_c10d as c10d

from .. import config
from ..frames import hides_frames

__all__ = ["install"]

_INSTALLED = "phalanx_as_gloo"
"""The attribute by which torch's function is known to be replaced."""


def install() -> None:
    """Does what the variable asks for. May be called twice.

    Raises:
        ConfigError: The variable is neither true nor false.
    """
    helper: Any = c10d._new_process_group_helper
    if not config.as_gloo() or hasattr(helper, _INSTALLED):
        return
    signature = inspect.signature(helper)

    @hides_frames
    @functools.wraps(helper)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        asked = call.arguments["backend"]
        devices = str(c10d.BackendConfig(asked))
        meant = _meant(devices)
        if meant is None:
            return helper(*args, **kwargs)
        call.arguments["backend"] = c10d.Backend(meant)
        made, store = helper(*call.args, **call.kwargs)
        if made in c10d._world.pg_map:  # not on a rank that is no member
            c10d._world.pg_map[made] = (asked, store)
            c10d._world.pg_backend_config[made] = devices
        return made, store

    setattr(make, _INSTALLED, True)
    c10d._new_process_group_helper = make


def _meant(devices: str) -> str | None:
    """The devices and backends with Phalanx in place of Gloo on the CPU; None if that is not among them."""
    pairs = dict(pair.split(":") for pair in devices.split(","))
    if pairs.get("cpu") != "gloo":
        return None
    # It comes first: torch makes nothing for a device after a backend that is a whole group, as ours is.
    others = [f"{device}:{name}" for device, name in pairs.items() if device != "cpu"]
    return ",".join(["cpu:phalanx", *others])
