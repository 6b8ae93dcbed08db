"""The handle of an operation: waited for, asked, called back, awaited."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from tests.lateness import bound

from phalanx import Timeout, UsageError, Work
from phalanx.deadline import Deadline


def work(seconds: float = 30.0) -> Work:
    return Work("recv(src=1)", Deadline(seconds))


def test_the_result_is_waited_for() -> None:
    one = work()
    threading.Timer(0.02, one._finish, ["result"]).start()
    assert not one.done()
    assert one.wait() == "result"
    assert one.done()
    assert one.result() == "result"
    assert one.exception() is None
    assert one.wait(timeout=0) == "result"


def test_an_error_is_raised_every_time() -> None:
    one = work()
    error = ValueError("trouble")
    one._finish(error=error)
    for ask in (one.wait, one.result):
        with pytest.raises(ValueError, match="trouble"):
            ask()
    assert one.exception() is error
    assert one.done()


def test_a_wait_that_ends_early_leaves_the_work_alone() -> None:
    one = work()
    with pytest.raises(Timeout, match=r"recv\(src=1\) is not done after 0.02 s") as caught:
        one.wait(timeout=0.02)
    assert caught.value.operation == "recv(src=1)"
    assert not one.done()
    one._finish(1)
    assert one.wait() == 1


def test_without_a_timeout_it_waits_as_long_as_the_operation_may_take() -> None:
    start = time.monotonic()
    with pytest.raises(Timeout):
        work(0.05).wait()
    assert time.monotonic() - start < bound(10)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(UsageError):
        work().wait(timeout)


def test_the_result_of_unfinished_work_is_a_mistake() -> None:
    one = work()
    with pytest.raises(UsageError, match=r"still under way \(call wait"):
        one.result()
    assert one.exception() is None


def test_only_the_first_end_counts() -> None:
    one = work()
    one._finish(1)
    one._finish(error=ValueError("late"))
    assert one.result() == 1


def test_callbacks_run_once_with_the_work_in_order() -> None:
    one = work()
    told: list[tuple[str, Work]] = []
    for name in "ab":
        one.add_done_callback(lambda w, n=name: told.append((n, w)))
    assert told == []
    one._finish(error=ValueError("trouble"))
    one._finish()
    assert told == [("a", one), ("b", one)]
    one.add_done_callback(lambda w: told.append(("late", w)))
    assert told[2:] == [("late", one)]


def test_a_callback_that_fails_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    one = work()
    told: list[Work] = []

    def fails(_work: Work) -> None:
        raise RuntimeError("the callback's own trouble")

    one.add_done_callback(fails)
    one.add_done_callback(told.append)
    with caplog.at_level(logging.ERROR, "phalanx"):
        one._finish(1)
        one.add_done_callback(fails)
    assert told == [one]
    assert one.result() == 1
    assert [record.name for record in caplog.records] == ["phalanx.group"] * 2
    assert "the callback's own trouble" in caplog.text


def test_a_callback_added_while_it_ends_is_never_lost() -> None:
    for _ in range(200):
        one = work()
        told = threading.Event()
        finisher = threading.Thread(target=one._finish)
        finisher.start()
        one.add_done_callback(lambda _w, t=told: t.set())
        finisher.join()
        assert told.is_set()


def test_the_waiting_thread_moves_the_bytes() -> None:
    seen: list[float] = []

    def drive(deadline: Deadline) -> None:
        seen.append(deadline.seconds)
        one._finish("moved")

    one = Work("recv", Deadline(30), drive=drive)
    assert one.wait(timeout=7) == "moved"
    assert seen == [7]
    assert one.wait() == "moved"
    assert len(seen) == 1


def test_it_can_be_awaited() -> None:
    async def main() -> list[object]:
        ones = [work() for _ in range(3)]
        for delay, one in zip((0.02, 0.0, 0.01), ones, strict=True):
            threading.Timer(delay, one._finish, [delay]).start()
        done = work()
        done._finish("done before")
        return [await one for one in ones] + [await done]

    assert asyncio.run(main()) == [0.02, 0.0, 0.01, "done before"]


def test_awaiting_raises_what_the_work_raised() -> None:
    async def main() -> None:
        one = work()
        threading.Timer(0.01, one._finish, [None, ValueError("trouble")]).start()
        await one

    with pytest.raises(ValueError, match="trouble"):
        asyncio.run(main())


def test_whoever_stops_awaiting_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    one = work()

    async def wait(_one: Work) -> object:
        return await _one

    async def main() -> None:
        await asyncio.wait_for(wait(one), 0.01)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(main())
    one._finish("late")  # the loop is closed by now
    assert one.result() == "late"
    assert caplog.text == ""


def test_the_words() -> None:
    one, two = work(), work()
    assert repr(one) == "<Work recv(src=1): under way>"
    one._finish()
    two._finish(error=ValueError())
    assert repr(one) == "<Work recv(src=1): done>"
    assert repr(two) == "<Work recv(src=1): failed>"
