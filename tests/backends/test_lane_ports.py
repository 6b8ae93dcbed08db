"""Streams made of the messages of a lane, and the thread that moves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest

import phalanx as px
from phalanx.deadline import Deadline
from phalanx.testing.worlds import open_world
from phalanx.transports.mailbox import BufferSink, PendingTransfer
from phalanx.transports.stream import Stream

CONTEXT = bytes(16)
COUNT = 3000
"""Messages, each a call on top of the last if they were taken by recursion."""


def test_thousands_of_messages_that_came_before_they_were_taken() -> None:
    with open_world(2, "simulated") as (one, other):
        streams: list[Stream] = []
        ports = [end.open_port(CONTEXT, 0, [0, 1], lambda _src, stream: streams.append(stream)) for end in (one, other)]
        try:
            stream = ports[0].dial(1, Deadline(10.0))
            sent = b"".join(number.to_bytes(4, "little") for number in range(COUNT))
            for at in range(0, len(sent), 4):
                assert stream.send([sent[at : at + 4]]) == 4
            ports[1].start()
            found = bytearray(len(sent))
            at = 0
            while count := streams[0].receive_into(memoryview(found)[at:]):
                at += count
            assert found == sent
        finally:
            for port in ports:
                port.close()


def test_an_error_that_nobody_expected_ends_the_lane_and_not_its_thread_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_operations: Sequence[PendingTransfer]) -> NoReturn:
        raise MemoryError("none left")

    with open_world(2, "mesh") as (one, _other):
        lane = one.open_lane(CONTEXT, 0, [0, 1])
        monkeypatch.setattr(lane, "drive", fail)
        receive = lane.post(1, None, BufferSink(memoryview(bytearray(4))))
        lane.move_in_background(receive, Deadline(60.0), lambda: None)
        error = lane.await_error(10.0)
        assert receive.error is error
        assert isinstance(error, px.PhalanxError)
        assert str(error) == "the thread that moves this group's messages has failed: MemoryError: none left"
        assert "the thread that moves messages has failed" in caplog.text
        lane.close()
