"""`elastic.steps`: every step counts on all ranks or on none, whoever is killed and wherever. Real processes."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import Group, Options, elastic
from phalanx.testing import faults, run_ranks

LENGTH, BATCH, TOTAL = 40, 12, 20


def reference(total: int = TOTAL) -> tuple[str, list[int]]:
    """What one process gets, and all samples in the order of the steps."""
    sampler = elastic.Sampler(LENGTH, BATCH, seed=3)
    weights = np.arange(5, dtype=np.float64)
    samples: list[int] = []
    for _ in range(total):
        batch = sampler.batch()
        weights = update(weights, gradient(weights, batch))
        samples += batch.tolist()
        sampler.advance()
    return digest(weights), samples


def gradient(weights: Any, batch: Any) -> Any:
    """Whole numbers, so that no order of summing can matter."""
    return np.array([float(sum((int(i) + 1) * (n + 3) % 17 for i in batch)) for n in range(5)])


def update(weights: Any, total: Any) -> Any:
    return (weights * 3 + total) % 1009


def digest(weights: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(weights).tobytes()).hexdigest()


def run(n: int, fn: Any, *args: Any, may_die: Any = (), transport: Any = "auto") -> list[Any]:
    return run_ranks(n, fn, *args, backend="mesh", may_die=may_die, options=Options(transport=transport))


def train(world: Group, die: Any, style: str = "with", total: int = TOTAL) -> Any:
    """Trains; `die(point, step, rank)` says where a rank ends."""
    weights = np.arange(5, dtype=np.float64)
    sampler = elastic.Sampler(LENGTH, BATCH, seed=3)
    state = elastic.State(weights=weights, sampler=sampler, log=[])
    rank = world.rank

    def maybe(point: str, step: Any) -> None:
        if die(point, step.number, rank):
            faults.kill_self()

    def body(step: Any) -> None:
        maybe("begin", step)
        total = gradient(weights, step.batch)
        maybe("before", step)
        step.group.all_reduce(total)
        maybe("after", step)
        if style.startswith("commit"):
            if not step.commit():
                return
            maybe("committed", step)
        weights[:] = update(weights, total)
        state.log = [*state.log, [step.number, list(step.group.members)]]
        maybe("end", step)

    sizes = []
    for step in elastic.steps(world, state, total=total, copy=style != "commit", timeout=20):
        if style == "plain":
            body(step)
        else:
            with step:
                body(step)
        sizes.append(step.group.world_size)
    return digest(weights), sampler.position, [entry[0] for entry in state.log], sizes[-1], state.log


@pytest.mark.parametrize("style", ["with", "plain", "commit", "commit and copy"])
def test_without_a_loss(style: str) -> None:
    results = run(3, train, lambda point, step, rank: False, style)
    wanted, samples = reference()
    for found, position, log, size, _ in results:
        assert (found, position, log, size) == (wanted, len(samples), list(range(TOTAL)), 3)


@pytest.mark.parametrize("style", ["with", "plain", "commit", "commit and copy"])
@pytest.mark.parametrize("point", ["begin", "before", "after", "end"])
def test_a_kill_at_any_point(style: str, point: str) -> None:
    results = run(3, train, lambda at, step, rank: (at, step, rank) == (point, 7, 1), style, may_die=[1])
    wanted, samples = reference()
    assert results[0] == results[2]
    found, position, log, size, members = results[0]
    assert (found, position, log, size) == (wanted, len(samples), list(range(TOTAL)), 2)
    assert members[-1] == [TOTAL - 1, [0, 2]]
    assert members[6] == [6, [0, 1, 2]]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ranks_die_one_after_the_other_and_two_at_once(transport: str) -> None:
    def die(point: str, step: int, rank: int) -> bool:
        return (point, step, rank) in {
            ("before", 3, 0),
            ("after", 3, 2),
            ("end", 9, 3),
            ("after", 9, 4),
        }

    results = run(6, train, die, may_die=[0, 2, 3, 4], transport=transport)
    wanted, _ = reference()
    assert results[1] == results[5]
    assert (results[1][0], results[1][2], results[1][3]) == (wanted, list(range(TOTAL)), 2)


def test_the_last_rank_goes_on_alone() -> None:
    results = run(
        3, train, lambda point, step, rank: point == "after" and step == 5 + rank and rank < 2, may_die=[0, 1]
    )
    assert results[2][0] == reference()[0]
    assert results[2][3] == 1


def test_a_world_of_one_needs_nothing() -> None:
    results = run_ranks(1, train, lambda point, step, rank: False)
    assert results[0][0] == reference()[0]


def test_a_program_that_raises_is_not_taken_for_a_loss() -> None:
    def work(world: Group) -> Any:
        def loop() -> None:
            for step in elastic.steps(world, elastic.State(x=np.zeros(3)), total=3):
                with step:
                    _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            loop()
        return True

    assert all(run(2, work))


def test_a_group_is_not_used_after_commit() -> None:
    def work(world: Group) -> Any:
        state = elastic.State(x=np.zeros(3))

        def reduces_after_commit() -> None:
            for step in elastic.steps(world, state, total=3, copy=False):
                with step:
                    step.commit()
                    step.group.all_reduce(np.ones(1))

        def never_commits() -> None:
            for _step in elastic.steps(world, state, total=3, copy=False):
                state.x += 1

        with pytest.raises(px.UsageError, match="after commit"):
            reduces_after_commit()
        with pytest.raises(px.UsageError, match=r"step\.commit"):
            never_commits()
        return True

    assert all(run(2, work))


def test_a_state_that_changes_before_commit_is_found() -> None:
    """Without a copy, what a failed step has changed stays changed: that must not go unnoticed."""

    def work(world: Group) -> Any:
        x = np.zeros(1000)
        state = elastic.State(x=x)
        try:
            for step in elastic.steps(world, state, total=5, copy=False, timeout=20):
                with step:
                    x += world.rank  # too early
                    if step.number == 2 and world.rank == 2:
                        faults.kill_self()
                    step.group.all_reduce(np.ones(10))
                    step.commit()
        except px.UsageError as error:
            return str(error)
        return "not found"

    results = run(3, work, may_die=[2])
    assert "changes before step.commit()" in results[0] == results[1]


def test_too_few_ranks_wait_and_say_so() -> None:
    def work(world: Group) -> Any:
        state = elastic.State(x=np.zeros(3))
        try:
            for step in elastic.steps(world, state, total=50, min_size=2, timeout=1.0):
                with step:
                    if step.number == 2 and world.rank == 1:
                        faults.kill_self()
                    step.group.barrier()
        except px.Timeout as error:
            return str(error)
        return "went on"

    assert "1 of at least 2 ranks are left" in run(2, work, may_die=[1])[0]


def test_a_stopped_rank_is_voted_out_and_nothing_of_it_reaches_the_others() -> None:
    def work(world: Group) -> Any:
        x, rank = np.zeros(1000), world.rank
        state = elastic.State(x=x)
        try:
            for step in elastic.steps(world, state, total=30, timeout=1.0):
                with step:
                    part = np.ones(1000)
                    if step.number == 5 and rank == 1:
                        faults.stop_self(4.0)
                    step.group.all_reduce(part, timeout=0.5)
                    x += part
        except px.Evicted as error:
            return "evicted", str(error)
        return x[0], step.group.members

    results = run(3, work)
    assert results[0] == results[2] == (5 * 3 + 25 * 2, (0, 2))
    assert results[1][0] == "evicted"
    assert "did not answer in time" in results[1][1]


def test_a_loss_that_the_program_keeps_for_itself_takes_the_step_back() -> None:
    """Also in another thread. What a rank made without the others must not count."""

    def work(world: Group, in_thread: bool) -> Any:
        import threading

        x, rank = np.zeros(1), world.rank
        for step in elastic.steps(world, elastic.State(x=x), total=10, timeout=20):
            with step:
                part = np.full(1, float(rank + 1))
                if step.number == 5 and rank == 1:
                    faults.kill_self()

                def reduce(part: Any = part, step: Any = step) -> None:
                    try:
                        step.group.all_reduce(part)
                    except px.PhalanxError:
                        part += 100

                if in_thread:
                    thread = threading.Thread(target=reduce)
                    thread.start()
                    thread.join()
                else:
                    reduce()
                x += part
        return x[0]

    for in_thread in (False, True):
        results = run(3, work, in_thread, may_die=[1])
        assert results[0] == results[2] == 5 * 6 + 5 * 4


def test_loops_one_after_the_other_and_a_group_for_what_follows() -> None:
    def work(world: Group) -> Any:
        x, rank = np.zeros(1), world.rank
        state = elastic.State(x=x, epoch=0)
        numbers, groups = [], []
        while state.epoch < 3:
            for step in elastic.steps(world, state, total=6, timeout=20):
                with step:
                    if (state.epoch, step.number, rank) == (1, 2, 1):
                        faults.kill_self()
                    x += step.group.all_reduce(np.ones(1))
            numbers.append(step.number)
            groups.append(step.group.epoch)
            state.epoch += 1
        total = step.group.all_reduce(np.full(1, float(rank)))  # as an evaluation after the training
        return x[0], numbers, groups, total[0], step.group.members

    results = run(3, work, may_die=[1])
    assert results[0] == results[2] == (6 * 3 + 2 * 3 + 4 * 2 + 6 * 2, [5, 5, 5], [0, 1, 1], 2.0, (0, 2))


def test_a_loss_between_two_loops() -> None:
    def work(world: Group) -> Any:
        x, rank = np.zeros(1), world.rank
        state = elastic.State(x=x)
        for epoch in range(2):
            if epoch == 1 and rank == 0:
                faults.kill_self()
            for step in elastic.steps(world, state, total=4, timeout=20):
                with step:
                    x += step.group.all_reduce(np.ones(1))
        return x[0], step.group.members

    results = run(3, work, may_die=[0])
    assert results[1] == results[2] == (4 * 3 + 4 * 2, (1, 2))


def test_quiet_verbs_by_keyword_and_without_waiting() -> None:
    def work(world: Group, later: bool) -> Any:
        x, rank = np.zeros(1), world.rank
        for step in elastic.steps(world, elastic.State(x=x), total=10, timeout=20):
            if step.number == 5 and rank == 1:
                faults.kill_self()
            (part,) = step.group.all_reduce_many(arrays=[np.ones(1)])
            if later:
                step.group.all_reduce(part, async_op=True).wait()
            x += part
        return x[0]

    results = run(3, work, False, may_die=[1])
    assert results[0] == results[2] == 5 * 3 + 5 * 2
    with pytest.raises(px.errors.RankFailed, match="rank 1 is lost"):
        run(3, work, True, may_die=[1])


def test_memory_of_groups_that_were_left_is_given_back() -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd" in line for line in file)

    def work(world: Group) -> Any:
        rank, counts = world.rank, []
        for step in elastic.steps(world, elastic.State(x=np.zeros(1)), total=8, timeout=20):
            with step:
                if step.number == 5 - rank and rank > 1:
                    faults.kill_self()
                step.group.all_reduce(np.ones(1 << 18))
                counts.append(mappings())
        gc.collect()  # errors and their frames point at each other
        counts.append(mappings())
        return counts[0], counts[-1], step.group.members

    results = run(5, work, may_die=[2, 3, 4])
    for first, last, members in results[:2]:
        assert members == (0, 1)
        assert last <= first


def test_the_state_is_that_of_the_last_step_when_the_job_ends() -> None:
    def work(world: Group, leaves: str) -> Any:
        x, rank = np.zeros(1), world.rank
        state = elastic.State(x=x)
        try:
            for step in elastic.steps(world, state, total=10, min_size=2, timeout=1.0):
                with step:
                    x += 1 + rank * 100  # a half of the step, other on each rank
                    if step.number == 4 and rank == 1:
                        faults.kill_self()
                    if step.number == 4 and leaves == "inside":
                        raise px.RendezvousError("as if the directory were gone")
                    part = np.ones(1)
                    step.group.all_reduce(part)
                    x += part - rank * 100
        except px.PhalanxError as error:
            return type(error).__name__, x[0]

    assert run(2, work, "outside", may_die=[1])[0] == ("Timeout", 4 * 3)
    assert run(2, work, "inside", may_die=[1])[0] == ("RendezvousError", 4 * 3)


def test_a_step_is_committed_once() -> None:
    def work(world: Group) -> Any:
        for step in elastic.steps(world, elastic.State(x=1), total=3, copy=False):
            with step:
                step.commit()
                with pytest.raises(px.UsageError, match="was called before in this step"):
                    step.commit()
        return True

    assert all(run(2, work))


def test_arguments_that_make_no_sense() -> None:
    def work(world: Group) -> Any:
        state: Any = elastic.State(x=1)
        for wrong, words in (
            (lambda: elastic.steps(world, {"x": 1}, total=2), "a state of type dict"),  # type: ignore[arg-type]
            (lambda: elastic.steps(None, state, total=2), "world=None"),  # type: ignore[arg-type]
            (lambda: elastic.steps(world, state, total=-1), "total=-1"),
            (lambda: elastic.steps(world, state, total=1, min_size=0), "min_size=0"),
            (lambda: elastic.steps(world, state, total=1, timeout=-1), "timeout=-1"),
            (lambda: elastic.Sampler(10, 2, seed=-1), "seed=-1"),
        ):
            with pytest.raises(px.UsageError, match=words):
                wrong()
        return True

    assert all(run(1, work))


def test_states_that_differ_from_the_beginning_are_refused_on_all_ranks() -> None:
    def work(world: Group) -> Any:
        state = elastic.State(x=np.zeros(3), w=np.full(2, float(world.rank == 2)))
        with pytest.raises(px.UsageError, match="the part 'w' of the state is another on rank 2 than on rank 0"):
            next(iter(elastic.steps(world, state, total=3)))
        return True

    assert all(run(3, work))
