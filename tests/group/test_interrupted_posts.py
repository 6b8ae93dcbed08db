"""Signal handlers that raise at the worst moments of messages that are under way, and programs that go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from tests.group.test_lent_messages import warm_up

import phalanx as px
from phalanx import _native
from phalanx.group.verbs import sinks
from phalanx.group.verbs.prepared import PreparedMessages, UnpostedWork
from phalanx.group.work import Work
from phalanx.testing import run_ranks
from phalanx.transports.channel import Outbound
from phalanx.transports.mailbox import Mailbox

SIZE = 8_000_000
"""Bytes of a message: no channel takes them at once."""
SOON = 8.0
"""Seconds, far from the deadlines of the messages."""
Where = tuple[type, str, Callable[..., bool]]

over_all = pytest.mark.parametrize("transport", ["auto", "tcp"])
needs_core = pytest.mark.skipif(not _native.available, reason="without the core, no message stands in line")


class Alarmed(Exception):
    """What the handler raises."""


def alarm(*_: Any) -> None:
    raise Alarmed


def always(*_: Any) -> bool:
    return True


def is_halfway(channel: Outbound, *_: Any) -> bool:
    return bool(channel._queue) and channel._queue[0].begun and not channel._queue[0].done


HALFWAY: Where = (Outbound, "push", is_halfway)
QUEUED: Where = (Outbound, "go_on_with", always)
NAMED: Where = (UnpostedWork, "_go_on", always)
ACCOUNTED: Where = (PreparedMessages, "_account_of", always)
POSTED: Where = (Mailbox, "post", always)
OPENED: Where = (sinks.ArraySink, "open", always)
FINISHED: Where = (Work, "_finish", always)


def interrupt_after(where: Where) -> Callable[[], None]:
    """Has the handler come as that method returns in the main thread: once, after what this returns is called."""
    owner, name, condition = where
    method, state = getattr(owner, name), {"armed": False}

    def interrupted(self: Any, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        if state["armed"] and threading.current_thread() is threading.main_thread() and condition(self):
            state["armed"] = False
            os.kill(os.getpid(), signal.SIGALRM)
        return result

    setattr(owner, name, interrupted)
    signal.signal(signal.SIGALRM, alarm)
    return lambda: state.update(armed=True)


def wait_for(work: px.Work[Any]) -> None:
    """A short wait first, which has the general way go on with it."""
    for seconds in (0.05, None, None):
        try:
            work.wait(seconds)
            return
        except (Alarmed, px.Timeout) as error:
            if isinstance(error, px.Timeout) and seconds is None:
                raise
    raise AssertionError("there was one signal, and two waits raised its error")


def exchange(group: px.Group, sender: int, where: Where) -> list[tuple[int, str]]:
    """Four messages, of which rank 0 is interrupted in one. What it sends, or has got: the bytes, or the error."""
    peer, found = 1 - group.rank, []
    arm = interrupt_after(where) if group.rank == 0 else None
    warm_up(group)
    outs = [np.zeros(SIZE, np.uint8) for _ in range(4)]
    works: list[px.Work[Any]] = []
    if group.rank == 1:
        works = [
            group.irecv(out, peer) if sender == 0 else group.isend(np.full(SIZE, i + 1, np.uint8), peer)
            for i, out in enumerate(outs)
        ]
        time.sleep(0.3)  # the lane knows them
    if arm is not None:
        arm()
    began = time.monotonic()
    for i, out in enumerate(outs):
        try:
            if group.rank == 0:
                try:
                    works.append(
                        group.irecv(out, peer) if sender == 1 else group.isend(np.full(SIZE, i + 1, np.uint8), peer)
                    )
                except Alarmed:
                    continue  # this message was not sent
            wait_for(works[-1] if group.rank == 0 else works[i])
            found.append((i + 1, "sent") if group.rank == sender else (int(out[0]), "got"))
            assert group.rank == sender or (out == out[0]).all()
        except px.ChannelClosed:
            found.append((i + 1, "closed"))
    assert time.monotonic() - began < SOON, found
    return found


def run(transport: Literal["auto", "tcp"], function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(2, function, *args, backend="mesh", options=px.Options(transport=transport))


@needs_core
@over_all
@pytest.mark.parametrize("where", [QUEUED, NAMED, ACCOUNTED, HALFWAY], ids=lambda where: where[1])
def test_a_send_goes_on_where_it_was_interrupted(transport: Literal["auto", "tcp"], where: Where) -> None:
    sent, got = run(transport, exchange, 0, where)
    assert got == [(i, "got") for i in (1, 2, 3, 4)], (sent, got)
    assert sent == [(i, "sent") for i in (1, 2, 3, 4)]


@needs_core
@over_all
@pytest.mark.parametrize("where", [POSTED, NAMED, ACCOUNTED, FINISHED], ids=lambda where: where[1])
def test_a_receive_goes_on_where_it_was_interrupted(transport: Literal["auto", "tcp"], where: Where) -> None:
    got, sent = run(transport, exchange, 1, where)
    assert got == [(i, "got") for i in (1, 2, 3, 4)], (got, sent)
    assert sent == [(i, "sent") for i in (1, 2, 3, 4)]


@over_all
def test_a_message_that_was_cut_is_followed_by_none(transport: Literal["auto", "tcp"]) -> None:
    """In the general way, its call raises: nobody will go on with it."""
    sent, got = run(transport, in_pure_python, HALFWAY)
    assert {what for _, what in sent} == {"closed"}
    assert {what for _, what in got} == {"closed"}


def in_pure_python(group: px.Group, where: Where) -> list[tuple[int, str]]:
    group._fast_messages = None
    return exchange(group, 0, where)


@over_all
def test_a_message_whose_memory_is_being_found_is_lost_with_a_word(transport: Literal["auto", "tcp"]) -> None:
    got, _ = run(transport, exchange, 1, OPENED)
    assert all(what == "closed" or i == number for number, (i, what) in enumerate(got, start=1)), got
