"""`DistributedDataParallel.join`, for ranks that have more or fewer inputs than others.

Before each forward pass a rank gives notice that it still has inputs. torch's reducer, in C++, gets the work of that
notice, and with `divide_by_initial_world_size=False` it asks the work how many ranks gave one. It does not keep the
Python part of a work alive, and waits for ever on what is left.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.distributed.algorithms.join import Join

__all__ = ["register"]

_notices: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The last work of each model: the reducer drops it for the next one."""


@functools.cache  # once per process
def register() -> None:
    """Keeps the work of a notice until the next one."""
    original: Any = Join.notify_join_context

    @functools.wraps(original)
    def notify(joinable: Any) -> Any:
        work = original(joinable)
        if work is not None:
            _notices[joinable] = work
        return work

    Join.notify_join_context = staticmethod(notify)
