from __future__ import annotations

from phalanx.algorithms import chunk_bounds, ring

from .simulate import check_overlap, counts, every_size, integers, simulate, some_sizes, wild_floats


@every_size
def test_all_reduce(size: int) -> None:
    schedules = [ring.all_reduce(rank, size) for rank in range(size)]
    for schedule in schedules:
        check_overlap(schedule)
        assert schedule.parts == size
        assert len(schedule.steps) == 2 * (size - 1)
    for i, count in enumerate(counts(size)):
        buffers = integers(size, count)
        wanted = buffers.sum(axis=0)
        report = simulate(schedules, buffers, buffered=bool((i + size) % 2), seed=size)
        assert (buffers == wanted).all()
        assert report.rounds == 2 * (size - 1)
        for moved in (*report.sent, *report.received):
            exact = 2 * (size - 1) * wanted.nbytes / size
            assert abs(moved - exact) <= (0 if count % size == 0 else 2 * wanted.itemsize)


@some_sizes
def test_all_ranks_have_the_same_bits_in_every_run(size: int) -> None:
    schedules = [ring.all_reduce(rank, size) for rank in range(size)]
    results = set()
    for seed in range(2):
        buffers = wild_floats(size, 2 * size + 1)
        simulate(schedules, buffers, buffered=bool(seed), seed=seed)
        results |= {buffer.tobytes() for buffer in buffers}
    assert len(results) == 1


def test_a_chunk_is_reduced_on_its_way_round_and_finished_on_its_own_rank() -> None:
    size, count = 7, 30
    data = wild_floats(size, count)
    buffers = data.copy()
    simulate([ring.all_reduce(rank, size) for rank in range(size)], buffers)
    for chunk, (start, stop) in enumerate(chunk_bounds(count, size)):
        path = [(chunk + 1 + i) % size for i in range(size)]
        total = data[path[0]][start:stop]
        for rank in path[1:]:
            total = data[rank][start:stop] + total
        assert total.tobytes() == buffers[0][start:stop].tobytes()
    # The data can tell: another order gives other bits.
    assert data[::-1].sum(axis=0).tobytes() != buffers[0].tobytes()


@every_size
def test_a_rank_talks_to_its_neighbours_only(size: int) -> None:
    for rank in range(size):
        for step in ring.all_reduce(rank, size).steps:
            assert [send.peer for send in step.sends] == [(rank + 1) % size]
            assert [recv.peer for recv in step.recvs] == [(rank - 1) % size]
