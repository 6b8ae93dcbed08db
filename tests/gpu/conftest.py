"""What a test has put in the place of the driver and of NCCL is taken away after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.cuda.driver import use_driver
from phalanx.cuda.nccl import use_nccl
from phalanx.group.engines.cuda import routing


@pytest.fixture(autouse=True)
def own_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routing, "SLICE", routing.SLICE)
    monkeypatch.setattr(routing, "SHORT_IF_CLOSED", routing.SHORT_IF_CLOSED)
    yield
    use_driver(None)
    use_nccl(None)
