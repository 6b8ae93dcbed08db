"""The GPT of the examples in a pipeline of four ranks, beside one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.parallel.gpt import data, in_parts, layers_of, loss_of, model_of

import phalanx as px
from phalanx.testing import run_ranks

STEPS, MICROBATCHES = 20, 8


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ranks are threads: torch's own would only be in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_losses_of_one_process_and_of_each_schedule() -> None:
    batches = data(STEPS)
    whole = in_parts(model_of(), batches, 1)
    parts = in_parts(model_of(), batches, MICROBATCHES)
    assert whole == pytest.approx(parts, abs=1e-5)

    def body(world: px.Group, schedule: str) -> list[float]:
        pipe = px.parallel.Pipeline(layers_of(model_of()), world, schedule=schedule, microbatches=MICROBATCHES)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        losses = []
        for letters, following in batches:
            optimizer.zero_grad()
            losses.append(float(pipe.step(letters, following, loss_of)))
            optimizer.step()
        return losses

    for schedule in ("gpipe", "1f1b", "interleaved"):
        for losses in run_ranks(4, body, schedule, timeout=200):
            assert losses == parts, schedule
