"""A short version of the fuzzing soak, and proofs that the soak can fail."""

from __future__ import annotations

from typing import Any

import pytest
from tests.soak import fuzz
from tests.soak.fuzz_targets import TARGETS, Target

from phalanx.errors import ProtocolError

FEW = 100
"""Inputs of which perhaps none is left whole, or all are: that each parser takes its seeds is tested below."""


def test_six_thousand_inputs() -> None:
    tally = fuzz.run(6_000, seconds=110, guided=False)
    assert not tally.failures, fuzz.summary(tally, 0)
    assert tally.inputs >= 6_000, fuzz.summary(tally, 0)
    for name, outcomes in tally.outcomes.items():
        if outcomes.total() >= FEW:
            assert bool(outcomes["accepted"]) == (name != "handshake stranger"), f"{name}: {outcomes}"
            assert outcomes.total() > outcomes["accepted"], f"no input of {name} was refused"


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leaves one parser, with a fault."""

    def install(parse: Any) -> None:
        target = Target("faulty", parse, (ProtocolError,), [b"abc", b"a valid message"])
        monkeypatch.setattr(fuzz, "TARGETS", {"faulty": target})

    return install


def test_another_error_is_found_and_made_small(only: Any) -> None:
    def parse(data: bytes) -> None:
        if 0x80 in data[3:]:
            raise KeyError("oops")

    only(parse)
    tally = fuzz.run(3000, guided=False)
    assert {failure.what for failure in tally.failures} == {"KeyError: 'oops'"}
    assert tally.failures[0].data == bytes([0, 0, 0, 0x80])
    assert "--replay 'faulty' 00000080" in fuzz.summary(tally, 1)


def test_memory_beyond_the_bound_is_found(only: Any) -> None:
    only(lambda data: bytes(8 << 20) if len(data) > 20 else None)
    tally = fuzz.run(2000, guided=False)
    assert tally.failures
    assert all("bytes were allocated at once" in failure.what for failure in tally.failures)


def test_a_slow_input_is_found(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MAX_SECONDS", -1.0)
    with pytest.raises(TimeoutError):
        fuzz.Tally().feed(TARGETS["frame header"], b"", "valid")


def test_every_seed_is_bytes_that_its_parser_knows() -> None:
    for target in TARGETS.values():
        assert target.seeds
        accepted = 0
        for data in target.seeds:
            try:
                target.parse(data)
                accepted += 1
            except target.errors:
                pass
        assert bool(accepted) == (target.name != "handshake stranger"), target.name
