"""The rank to blame when a world ends: the directory hears of one end by several connections, in any order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import pytest
from tests.rendezvous.support import LIMIT, LOOPBACK, TOKEN, Stranger, directory, eventually, rank_hello

from phalanx.errors import PeerLost
from phalanx.rendezvous.error_codec import EndCause, encode_error
from phalanx.wire import control

SIZE = 2


def join(stranger: Stranger, rank: int, size: int = SIZE) -> None:
    stranger.shake(rank_hello(rank, size), TOKEN)
    stranger.send(control.pack(control.Join(control.Member(rank, "here", "x", 1, LOOPBACK, 1, rank))))


def leave(peer: Stranger) -> None:
    peer.send(control.pack(control.Leave()))


def announce(peer: Stranger) -> None:
    peer.send(control.pack(control.Leaving()))


@pytest.mark.parametrize(
    ("then", "rank", "words"),
    [
        (leave, 1, "it left before the others were done: rank 0: rank 1 is no longer there"),
        (announce, 1, "it left before the others were done: rank 0: rank 1 is no longer there"),
        (Stranger.close, 1, "the connection was"),
        (lambda _: None, 0, "rank 1 is no longer there"),
    ],
    ids=["leaves", "is leaving", "is lost", "stays"],
)
def test_an_abort_overtakes_the_end_that_it_is_about(then: Callable[[Stranger], None], rank: int, words: str) -> None:
    causes: queue.SimpleQueue[EndCause] = queue.SimpleQueue()
    with directory(SIZE) as hosted, contextlib.ExitStack() as stack:
        hosted.on_end(causes.put)
        ranks = [stack.enter_context(Stranger(hosted.address)) for _ in range(SIZE)]
        for number, stranger in enumerate(ranks):
            join(stranger, number)
        eventually(lambda: hosted._state.value == "formed", "the world")
        ranks[0].send(control.pack(control.Abort(0, "rank 1 is no longer there", "", peer=1)))
        eventually(lambda: hosted._blaming or hosted._cause, "the abort to be heard")
        ranks[0].close()
        then(ranks[1])
        cause = causes.get(timeout=LIMIT)
    assert cause.rank == rank
    assert words in cause.reason
    assert causes.empty(), "a world ends once"


def test_the_last_words_of_ranks_that_cannot_be_told_anything_any_more() -> None:
    # Two have each said two things and are gone. The first thing is passed on, which fails, in the middle of reading.
    causes: queue.SimpleQueue[EndCause] = queue.SimpleQueue()
    with directory(3) as hosted, contextlib.ExitStack() as stack:
        hosted.on_end(causes.put)
        ranks = [stack.enter_context(Stranger(hosted.address)) for _ in range(3)]
        for number, stranger in enumerate(ranks):
            join(stranger, number, 3)
        eventually(lambda: hosted._state.value == "formed", "the world")
        all_is_said = threading.Event()
        hosted._reactor.call_soon(all_is_said.wait)
        announce(ranks[2])
        for rank in (0, 1):
            broken = control.Break(b"c" * 16, rank, encode_error(PeerLost(2, "it is gone")))
            abort = control.Abort(rank, "rank 2 is no longer there", "", peer=2)
            ranks[rank].send(control.pack(broken) + control.pack(abort))
            ranks[rank].close()
        all_is_said.set()
        cause = causes.get(timeout=LIMIT)
    assert cause.rank == 2
    assert "it left before the others were done" in cause.reason
