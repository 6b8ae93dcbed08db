"""How long a rank looks before it sleeps: the policy's decisions, on a clock of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from phalanx._native import core

if TYPE_CHECKING:
    from phalanx._core import WaitPolicy

pytestmark = pytest.mark.usefixtures("native")

LOOK, YIELD, SLEEP, REST, TURN_AWAY = range(5)  # Wait::Next in cpp/phalanx/wait_policy.hpp
US, MS = 1_000, 1_000_000


def _policy(*, oversubscribed: bool = False) -> WaitPolicy:
    assert core is not None
    made: WaitPolicy = core.WaitPolicy(oversubscribed)
    return made


def _ends_after(policy: WaitPolicy, ns: int, now: int = 0, *, receives: bool = True) -> list[int]:
    """What a wait did that looked every 10 us and ended after so long."""
    assert core is not None
    wait = core.Wait(policy)
    done = [wait.next(at, receives) for at in range(now, now + ns, 10 * US)]
    wait.end(now + ns)
    return done


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_on_a_quiet_machine_a_rank_gives_way_until_its_patience_ends(oversubscribed: bool) -> None:
    done = _ends_after(_policy(oversubscribed=oversubscribed), 2 * MS)
    assert done == [YIELD] * 100 + [SLEEP] * 100


def test_waits_that_are_too_long_to_look_for_make_it_impatient() -> None:
    policy = _policy()
    for _ in range(10):
        _ends_after(policy, 30 * MS)
    assert policy.patience_ns(0) == 50 * US  # as long as being woken costs, never less


def test_waits_that_would_have_been_worth_looking_make_it_patient_again() -> None:
    policy = _policy()
    for _ in range(10):
        _ends_after(policy, 30 * MS)
    for _ in range(5):
        assert SLEEP in _ends_after(policy, 900 * US)  # it sleeps, and learns that it need not have
    assert SLEEP not in _ends_after(policy, 900 * US)


def test_after_a_long_yield_it_keeps_its_core_for_a_moment_only() -> None:
    policy = _policy()
    policy.yielded(0, 40 * US)
    assert not policy.contended(41 * US)
    policy.yielded(0, 3 * MS)
    assert policy.contended(4 * MS)
    assert _ends_after(policy, 100 * US, now=4 * MS) == [LOOK] + [SLEEP] * 9


def test_where_ranks_share_cores_it_sleeps_at_once_after_a_yield_of_a_whole_slice() -> None:
    policy = _policy(oversubscribed=True)
    policy.yielded(0, 200 * US)  # another rank was busy for a moment
    assert not policy.contended(201 * US)
    policy.yielded(0, 3 * MS)
    assert _ends_after(policy, 20 * US, now=4 * MS) == [SLEEP, SLEEP]


def test_it_tries_again_later_and_later_as_long_as_the_core_is_wanted() -> None:
    policy = _policy()
    now, pauses = 0, []
    for _ in range(9):
        policy.yielded(now, now + 3 * MS)
        began = now = now + 3 * MS
        while policy.contended(now):
            now += MS
        pauses.append((now - began) // MS)
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 1000, 1000]
    now += 10_000 * MS  # it was quiet for long
    policy.yielded(now, now + 3 * MS)
    assert not policy.contended(now + 14 * MS)


def test_who_only_receives_where_ranks_share_cores_rests_a_few_times_and_then_waits_as_ever() -> None:
    policy = _policy(oversubscribed=True)
    for _ in range(8):
        assert REST not in _ends_after(policy, 30 * US)
        policy.ended(only_received=True)
    assert _ends_after(policy, 200 * US) == [REST] * 8 + [YIELD] * 12


def test_who_has_sent_or_has_a_core_for_itself_does_not_rest() -> None:
    shared, alone = _policy(oversubscribed=True), _policy()
    for _ in range(20):
        shared.ended(only_received=True)
        alone.ended(only_received=True)
    shared.ended(only_received=False)
    assert {REST, TURN_AWAY}.isdisjoint(_ends_after(shared, 200 * US))
    assert REST not in _ends_after(alone, 200 * US)


def _receives(policy: WaitPolicy, operations: int) -> tuple[int, int]:
    """Nanoseconds and number of the rests in a wait after so many operations that only received."""
    for _ in range(operations):
        policy.ended(only_received=True)
    done = _ends_after(policy, 200 * US)
    return policy.rest_ns, done.count(REST)


def test_rests_that_find_many_operations_become_longer_and_fewer() -> None:
    policy = _policy(oversubscribed=True)
    rests = [_receives(policy, 8) for _ in range(5)]
    assert rests == [(100 * US, 8), (200 * US, 4), (400 * US, 2), (800 * US, 1), (800 * US, 1)]


def test_a_rest_that_finds_few_operations_is_followed_by_a_short_one() -> None:
    policy = _policy(oversubscribed=True)
    for _ in range(5):
        _receives(policy, 8)
    assert _receives(policy, 7) == (100 * US, 8)


def test_after_an_operation_that_sends_the_rests_begin_short_again() -> None:
    policy = _policy(oversubscribed=True)
    for _ in range(5):
        _receives(policy, 8)
    policy.ended(only_received=False)
    assert _receives(policy, 8) == (100 * US, 8)


def _turns_away(policy: WaitPolicy, operations: int) -> int:
    """Nanoseconds for which a rank turns away at its next wait, after so many operations that only received."""
    for _ in range(operations):
        policy.ended(only_received=True)
    return policy.turn_away(0)


def test_who_has_a_core_for_itself_turns_away_once_and_then_waits_as_ever() -> None:
    policy = _policy()
    for _ in range(8):
        assert TURN_AWAY not in _ends_after(policy, 30 * US)
        policy.ended(only_received=True)
    assert _ends_after(policy, 50 * US) == [TURN_AWAY] + [YIELD] * 4


def test_it_turns_away_for_longer_while_operations_come_close_together() -> None:
    policy = _policy()
    assert [_turns_away(policy, 13) for _ in range(5)] == [20 * US, 40 * US, 80 * US, 100 * US, 100 * US]


def test_it_turns_away_for_a_shorter_time_when_they_come_at_intervals() -> None:
    policy = _policy()
    for _ in range(5):
        _turns_away(policy, 13)
    assert [_turns_away(policy, 4) for _ in range(5)] == [50 * US, 25 * US, 50 * US, 25 * US, 50 * US]


def test_where_that_finds_too_few_of_them_it_tries_again_after_longer_and_longer_runs() -> None:
    policy, waits = _policy(), []
    for _ in range(9):
        waits.append(0)
        while not _turns_away(policy, 1):
            waits[-1] += 1
        assert not _turns_away(policy, 2)
    assert waits == [7, 15, 31, 63, 127, 255, 511, 999, 999]
    assert _turns_away(policy, 1000)
    assert _turns_away(policy, 13)  # now it has found many: the next try comes as soon as the first one
    assert not _turns_away(policy, 2)
    assert [bool(_turns_away(policy, 1)) for _ in range(16)] == [False] * 15 + [True]


def test_who_waits_twice_in_an_operation_does_not_go_on_with_it() -> None:
    policy = _policy()
    assert _turns_away(policy, 8)
    assert not _turns_away(policy, 0)
    assert not _turns_away(policy, 15)


def test_an_operation_that_sends_begins_the_run_anew() -> None:
    policy = _policy()
    assert not _turns_away(policy, 7)
    policy.ended(only_received=False)
    assert not _turns_away(policy, 7)
    assert _turns_away(policy, 1)


def test_messages_that_come_one_by_one_are_enough_to_turn_away_but_not_to_rest() -> None:
    alone, shared = _policy(), _policy(oversubscribed=True)
    for _ in range(8):
        alone.received()
        shared.received()
    assert TURN_AWAY in _ends_after(alone, 30 * US)
    assert {REST, TURN_AWAY}.isdisjoint(_ends_after(shared, 200 * US))


@pytest.mark.parametrize("reason", ["has to send", "shares its core", "wants a core that others want"])
def test_who_does_not_turn_away(reason: str) -> None:
    policy = _policy(oversubscribed=reason == "shares its core")
    if reason == "wants a core that others want":
        policy.yielded(-3 * MS, 0)
    for _ in range(20):
        policy.ended(only_received=True)
    assert TURN_AWAY not in _ends_after(policy, 30 * US, receives=reason != "has to send")
