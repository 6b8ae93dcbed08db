"""One suite for every backend. A new backend is one more parameter.

A check is a function that every rank runs at the same time with its own backend. It talks to the other ranks only
through that backend, so the ranks may be threads or processes:

```python
@pytest.mark.parametrize("check", conformance.checks(), ids=str)
def test_my_backend(check):
    conformance.run(check, make)          # make(n): a context manager that gives the n backends of a world


def test_my_backend_in_processes():
    run_ranks(3, conformance.on_group, "raw.messages_arrive_intact", backend=my_factory)
```

Rules that only hold where a backend has what they are about look at it themselves: `topology` (is every rank connected
with every other, or with rank 0 only?) and `self_send`. A backend without these is taken to be fully connected and
without a way to itself. One that is no `LaneBackend` leaves out some checks: `conformance.checks(lanes=False)`.
"""

from __future__ import annotations

from . import (
    asynchronous,
    closing,
    collectives,
    gathers,
    groups,
    large,
    messages,
    objects,
    raw,
    scans,
    subgroups,
    threads,
    timeouts,
    uneven,
)
from .check import Check, Make, as_subgroup, checks, find, on_group, run

__all__ = [
    "Check",
    "Make",
    "as_subgroup",
    "asynchronous",
    "checks",
    "closing",
    "collectives",
    "find",
    "gathers",
    "groups",
    "large",
    "messages",
    "objects",
    "on_group",
    "raw",
    "run",
    "scans",
    "subgroups",
    "threads",
    "timeouts",
    "uneven",
]
