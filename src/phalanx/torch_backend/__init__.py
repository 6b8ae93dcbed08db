"""`torch.distributed.init_process_group("phalanx")`: the collectives of Phalanx under PyTorch, by one string.

torch calls `autoload` by itself while it is imported (the entry-point group `torch.backends`), so this module must cost
nothing: it imports neither torch nor anything of Phalanx. The rest is imported when the first group is made.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["autoload"]

NAME = "phalanx"


def autoload() -> None:
    """Makes the name known to torch. Does nothing where this torch has no `torch.distributed`, or knows it already."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if "phalanx.group" in sys.modules:  # a group may be there already, made before torch was
        from ..untraced import leave_calls_alone

        leave_calls_alone()
    if "PHALANX_AS_GLOO" in os.environ:  # whether it is true is looked up there: that takes an import
        from . import as_gloo

        as_gloo.install()


def _create(options: Any, backend_options: Any) -> Any:
    """Makes a group; torch calls this."""
    from .create import create

    return create(options, backend_options)
