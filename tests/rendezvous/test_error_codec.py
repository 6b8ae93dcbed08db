"""Errors that travel to other ranks: with their type, their attributes, and in a size that fits."""

from __future__ import annotations

import pytest

from phalanx import errors
from phalanx.rendezvous.error_codec import decode_error, encode_error, shorten_error
from phalanx.wire.control import pack_error, parse_error
from phalanx.wire.frames import MAX_DESCRIPTION

LONG = "\N{GRINNING FACE}" * 100_000
EXAMPLES = [
    errors.PeerLost(3, "the connection was reset"),
    errors.PeerLost(3, "it raised ValueError: words", remote_traceback="Traceback ...\nValueError: words\n"),
    errors.ChannelClosed(2, "it has closed this group"),
    errors.Timeout("barrier #2: not done", missing=[1, 4], arrived=[0, 2], operation="barrier #2"),
    errors.Timeout("barrier #2: not done", missing=[7], peer=7),
    errors.Desync("rank 0 called a, but rank 1 called b", mine="a at x.py:1", theirs="b at y.py:2", peer=1),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("brief", [False, True])
def test_an_error_arrives_as_it_was(error: errors.PhalanxError, brief: bool) -> None:
    encoded = shorten_error(encode_error(error)) if brief else encode_error(error)
    found = decode_error(parse_error(pack_error(encoded)), 5)
    assert type(found) is type(error)
    assert error.message in found.message
    for name in ("peer", "missing", "arrived", "mine", "theirs", "reason", "remote_traceback"):
        assert getattr(found, name, None) == getattr(error, name, None), name


def test_a_timeout_says_on_which_rank_it_was_and_says_so_once() -> None:
    first = decode_error(encode_error(errors.Timeout("barrier: not done", missing=[1])), 5)
    assert str(first) == "on rank 5: barrier: not done"
    assert str(decode_error(encode_error(first), 6)) == "on rank 5: barrier: not done"


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerLost(3, LONG, remote_traceback=LONG),
        errors.Timeout(LONG, missing=range(60_000), arrived=range(60_000, 120_000)),
        errors.Desync(LONG, mine=LONG, theirs=LONG),
        errors.ProtocolError(LONG),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_longest_words_fit_a_frame(error: errors.PhalanxError) -> None:
    assert len(pack_error(shorten_error(encode_error(error)))) <= MAX_DESCRIPTION


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\xff" * 100, pack_error(encode_error(EXAMPLES[0]))[:-1]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(errors.ProtocolError, match="not an encoded error"):
        parse_error(data)
