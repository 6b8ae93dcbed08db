"""Ranks that come late to a collective that another has given up: they fail as well, and touch nobody's memory."""

from __future__ import annotations

import pytest
from tests.failures.ranks import Worlds, worlds  # noqa: F401

from phalanx import _native

LATE = """
import ctypes
world = init()
last = world.world_size - 1
def hold_the_gil_until_told():  # as any C extension may: no thread of this process hears anything meanwhile
    say("held")
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(3), 3)
def call(verb, group, x, timeout):
    if verb == "barrier": group.barrier(timeout=timeout)
    if verb == "broadcast": group.broadcast(x[:3], last, timeout=timeout)
    if verb == "long broadcast": group.broadcast(x, last, timeout=timeout)
    if verb == "short all_reduce": group.all_reduce(x[:3], timeout=timeout)
    if verb == "all_reduce": group.all_reduce(x, timeout=timeout)
    if verb == "reduce": group.reduce(x, 0, timeout=timeout)
    if verb == "all_gather": group.all_gather(x, timeout=timeout)
    if verb == "all_to_all": group.all_to_all(x, timeout=timeout)
for verb in VERBS:
    group = world.subgroup(range(world.world_size))
    for _ in range(2):  # connects everybody
        for warm_up in VERBS:
            call(warm_up, group, np.ones(60), None)
    x = group.empty(60000, np.float64)
    x[:] = world.rank + 1
    world.barrier()
    if world.rank == last:
        hold_the_gil_until_told()
        expect(lambda: call(verb, group, x, None), verb)
    else:
        expect(lambda: call(verb, group, x, 0.3), verb)
        x[:] = 7.0  # the call has failed: the memory is the program's again
        say("mine")
        hear()
        say(verb + ", after", changed=int(np.count_nonzero(x != 7.0)))
    world.barrier()
    group.close()
"""

VERBS = [
    "barrier",
    "broadcast",
    "long broadcast",
    "short all_reduce",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_to_all",
]


@pytest.mark.parametrize(
    ("size", "env"),
    [
        pytest.param(2, {}, id="segment"),
        pytest.param(3, {}, id="segment of three"),
        pytest.param(2, {"PHALANX_TRANSPORT": "tcp"}, id="tcp"),
        pytest.param(3, {"PHALANX_TRANSPORT": "tcp"}, id="tcp of three"),
        pytest.param(2, {"PHALANX_PURE": "1"}, id="without the core"),
    ],
)
def test_who_comes_late_does_not_succeed(worlds: Worlds, size: int, env: dict[str, str]) -> None:
    if not _native.available and not env:
        pytest.skip("the segment needs the core (PHALANX_PURE is set)")
    world = worlds(size, LATE, env=env, VERBS=VERBS, host="parent")
    *early, late = world
    for number, verb in enumerate(VERBS, 1):
        late.wait("held", count=number)
        for rank in early:
            event = rank.wait(verb)
            rank.wait("mine", count=number)
            # Whoever only had to send may be done.
            assert event["type"] in ({"Timeout"} if rank is early[0] else {"Timeout", ""}), (verb, event)
        late.tell()
        event = late.wait(verb)
        assert event["type"] == "Timeout", (verb, event)
        assert late.number in event["missing"], (verb, event)
        for rank in early:
            rank.tell()
            assert rank.wait(f"{verb}, after")["changed"] == 0, verb
    assert world.finish() == [0] * size, "".join(rank.errors for rank in world)


CLOSES = """
world = init(options=px.Options(transport="tcp"))
world.barrier()
group = world.subgroup(range(4))
if world.rank == 2:
    hear()
out = np.zeros(5)
call = lambda: group.scatter(np.ones(20) if world.rank == 0 else None, 0, out, timeout=1.5)
if world.rank < 2:
    call()
    group.close()
    say("closed")
    hear()
else:
    expect(call, "late")
    say("over")
"""


def test_who_was_done_and_has_closed_the_group_is_not_missing(worlds: Worlds) -> None:
    """Rank 3 hears from rank 2 what rank 0 has sent: so the others may be gone while it waits."""
    world = worlds(4, "import phalanx as px\n" + CLOSES)
    for rank in (0, 1):
        world[rank].wait("closed")
    event = world[3].wait("late")
    assert (event["type"], event["missing"], event["arrived"]) == ("Timeout", [2], [0, 1, 3]), event
    world[2].tell()
    world[2].wait("over")
    for rank in (0, 1):
        world[rank].tell()
    assert world.finish() == [0, 0, 0, 0], "".join(rank.errors for rank in world)
