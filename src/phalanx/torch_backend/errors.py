"""Phalanx's errors as torch users expect them: torch's types, Phalanx's words, and the original as an attribute."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import Closed, ConfigError, NoConnection, PeerLost, PhalanxError, RendezvousError, Timeout, UsageError

__all__ = ["translated"]


def translated(error: BaseException) -> BaseException:
    """The error to raise instead, `from None`: it says all that the original says, which need not be shown as well.

    What is wrong with a call stays as it is: those errors are `ValueError`s, here as with Gloo. A rank or a connection
    that is lost becomes `DistNetworkError`, everything else `DistBackendError`; both are `RuntimeError`s. `rank`,
    `peer` and `operation` are kept, and `phalanx_error` is the original.
    """
    if not isinstance(error, PhalanxError):
        return error
    if isinstance(error, (UsageError, ConfigError)) and not isinstance(error, Closed):
        return error
    network = isinstance(error, (PeerLost, NoConnection, RendezvousError))
    kind = dist.DistNetworkError if network else dist.DistBackendError
    words = _as_torch_says(str(error)) if isinstance(error, Timeout) and not network else str(error)
    shown: BaseException = kind(words)
    shown.__dict__.update(rank=error.rank, peer=error.peer, operation=error.operation, phalanx_error=error)
    return shown


def _as_torch_says(words: str) -> str:
    """Programs look for torch's words for a deadline that passed, because torch has no type for it.

    `init()` is not what a user of torch calls.
    """
    words = words.replace("timeout= of the call or of init()", "timeout= of init_process_group()")
    return f"phalanx: Timed out {words}" if words.startswith("on rank ") else f"phalanx: Timed out in {words}"
