"""`elastic.State` and its copies: what was, is again, bit for bit."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

from phalanx import UsageError, elastic
from phalanx.elastic.state import Snapshot

torch = pytest.importorskip("torch")


class Moments(NamedTuple):
    """As optax keeps its state."""

    mean: Any
    count: int


def through_bytes(snapshot: Snapshot) -> Snapshot:
    """The snapshot as a rank that joins gets it: in three shares."""
    copy = Snapshot.empty(snapshot.head())
    total = snapshot.nbytes
    for begin, end in ((0, total // 3), (total // 3, total // 2), (total // 2, total)):
        copy.fill(begin, snapshot.share(begin, end))
    assert copy.checksum() == snapshot.checksum()
    return copy


def test_arrays_and_plain_data() -> None:
    x = np.arange(6.0).reshape(2, 3)
    state = elastic.State(
        x=x,
        scalar=np.float32(2.5),
        empty=np.zeros((0, 3)),
        none=None,
        odd=[float("nan"), 1 + 2j, b"\0\1", (1, "two"), Moments(np.ones(2), 3)],
        nested={"a": {1: np.array(7)}},
        strided=np.arange(10)[::2],
    )
    before = Snapshot.of(state)
    x += 1
    state.scalar = np.float32(9)
    state.odd = []
    state.nested["a"][1][...] = 8
    state.strided[:] = 0
    Snapshot.restore(through_bytes(before), state)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state.x is x
    assert state.scalar == 2.5
    assert state.strided.tolist() == [0, 2, 4, 6, 8]
    assert state.nested["a"][1] == 7
    assert state.odd[1:4] == [1 + 2j, b"\0\1", (1, "two")]
    assert np.isnan(state.odd[0])


def test_a_named_tuple_stays_one() -> None:
    state = elastic.State(moments=Moments(np.ones(2), 3))
    before = Snapshot.of(state)
    state.moments = Moments(np.zeros(2), 4)
    before.restore(state)
    assert isinstance(state.moments, Moments)
    assert (state.moments.mean.tolist(), state.moments.count) == ([1, 1], 3)


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model.half_buffer = torch.nn.Buffer(torch.ones(3, dtype=torch.bfloat16)) if hasattr(torch.nn, "Buffer") else None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, schedule


def train(model: Any, optimizer: Any, schedule: Any, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().sum().backward()
    optimizer.step()
    schedule.step()


def bits(parts: Any) -> list[Any]:
    model, optimizer, schedule = parts
    found = [t.clone().tolist() for t in model.state_dict().values()]
    for entry in optimizer.state_dict()["state"].values():
        found += [value.clone().tolist() for value in entry.values()]
    return [*found, optimizer.param_groups[0]["lr"], schedule.state_dict()["_step_count"]]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("by_bytes", [False, True])
def test_a_model_goes_back(steps: int, by_bytes: bool) -> None:
    """Also to where the optimizer had no state yet, and through copies that use the memory of older ones."""
    model, optimizer, schedule = parts = make(0)
    state = elastic.State(model=model, optimizer=optimizer, schedule=schedule)
    snapshot = Snapshot.of(state)
    for step in range(steps):
        train(*parts, step)
        snapshot = Snapshot.of(state, into=snapshot)
    wanted = bits(parts)
    train(*parts, 77)
    assert bits(parts) != wanted
    (through_bytes(snapshot) if by_bytes else snapshot).restore(state)
    assert bits(parts) == wanted
    train(*parts, 5)
    again = bits(parts)
    snapshot.restore(state)
    train(*parts, 5)
    assert bits(parts) == again


def test_a_new_rank_gets_everything() -> None:
    parts = make(0)
    for step in range(3):
        train(*parts, step)
    other = make(1)
    names = ("model", "optimizer", "schedule")
    head = Snapshot.of(elastic.State(**dict(zip(names, parts, strict=True))))
    through_bytes(head).restore(elastic.State(**dict(zip(names, other, strict=True))))
    assert bits(other) == bits(parts)
    train(*parts, 9)
    train(*other, 9)
    assert bits(other) == bits(parts)


def test_a_parameter_that_is_replaced_is_seen() -> None:
    model = torch.nn.Linear(2, 2)
    state = elastic.State(model=model)
    snapshot = Snapshot.of(state)
    model.weight = torch.nn.Parameter(torch.full((2, 2), 5.0))
    snapshot = Snapshot.of(state, into=snapshot)
    model.weight.data = torch.full((2, 2), 6.0)
    assert Snapshot.of(state).checksum() != snapshot.checksum()
    snapshot.restore(state)
    assert model.weight.tolist() == [[5, 5], [5, 5]]


def test_jax_arrays_are_set_anew() -> None:
    jax = pytest.importorskip("jax")
    state = elastic.State(params={"w": jax.numpy.arange(3.0)})
    snapshot = through_bytes(Snapshot.of(state))
    state.params = {"w": state.params["w"] * 2}
    snapshot.restore(state)
    assert isinstance(state.params["w"], jax.Array)
    assert state.params["w"].tolist() == [0, 1, 2]


def test_what_cannot_be_kept_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="thing is of type object"):
        elastic.State(thing=object())
    with pytest.raises(UsageError, match="at least one part"):
        elastic.State()
    state = elastic.State(x=1)
    with pytest.raises(AttributeError, match="no part 'y'"):
        state.y = 3
    with pytest.raises(AttributeError, match="no part 'z'"):
        _ = state.z


def test_the_sampler_gives_each_sample_once_an_epoch() -> None:
    sampler = elastic.Sampler(10, 4, seed=1)
    seen: list[int] = []
    for step in range(5):
        size = step % 3 + 1
        shares = [sampler.take(rank, size).tolist() for rank in range(size)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        seen += [sample for share in shares for sample in share]
        sampler.advance()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert sampler.epoch == 2
    again = elastic.Sampler(10, 4, seed=1)
    again.load_state_dict({"position": 4})
    assert again.batch().tolist() == seen[4:8]


def test_dicts_and_lists_of_the_program_are_changed_in_place() -> None:
    log: dict[str, Any] = {"steps": 0, "losses": [], "deep": {"rows": [np.zeros(2)]}}
    counts, words, raw = Counter("aab"), defaultdict(list, a=[1]), bytearray(b"ab")
    state = elastic.State(log=log, counts=counts, words=words, raw=raw)
    before = Snapshot.of(state)
    losses, row = log["losses"], log["deep"]["rows"][0]
    log["steps"] += 1
    losses.append(0.5)
    row += 1
    log["deep"]["rows"].append(np.ones(3))
    log["new"] = 1
    counts["a"] += 5
    words["b"].append(2)
    raw += b"c"
    through_bytes(before).restore(state)
    assert log["steps"] == 0
    assert losses == []
    assert log["losses"] is losses
    assert row.tolist() == [0, 0]
    assert len(log["deep"]["rows"]) == 1
    assert log["deep"]["rows"][0] is row
    assert "new" not in log
    assert counts == Counter("aab")
    assert words["b"] == []
    assert raw == b"ab"
    assert (state.log, state.counts, state.words, state.raw) == (log, counts, words, raw)
    assert state.words is words


def test_parts_whose_names_look_alike() -> None:
    a, b = np.zeros(2), np.ones(2)
    state = elastic.State(**{"a": {"b": a}, "a.b": b})
    before = Snapshot.of(state)
    a += 5
    b += 5
    through_bytes(before).restore(state)
    assert (a.tolist(), b.tolist()) == ([0, 0], [1, 1])


def test_an_array_that_changes_its_form_in_place_is_seen() -> None:
    a = np.arange(4.0)
    weight = torch.arange(4.0).reshape(2, 2)
    state = elastic.State(a=a, weight=weight)
    Snapshot.of(state)
    a.resize(2, 2)  # setting its shape is not liked by NumPy any more
    weight.data = weight.data.t()
    before = Snapshot.of(state)
    a += 1
    weight += 1
    before.restore(state)
    assert state.a is a
    assert a.tolist() == [[0, 1], [2, 3]]
    assert weight.tolist() == [[0, 2], [1, 3]]
    a.resize(5000, refcheck=False)
    assert Snapshot.of(state).nbytes == 5000 * 8 + 16


def test_an_optimizer_goes_on_as_the_others_do_after_it_was_loaded() -> None:
    """Loading makes another dict of an optimizer's state: what is copied afterwards must be that one."""

    def trained(steps: int) -> tuple[Any, Any, elastic.State]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        state = elastic.State(model=model, optimizer=optimizer)
        train(model, optimizer, steps)
        return model, optimizer, state

    def train(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)) ** 2).sum().backward()
            optimizer.step()

    *here, at_work = trained(2)
    *there, joins = trained(0)
    theirs = Snapshot.of(at_work)
    mine = through_bytes(theirs)
    mine.check_fits(joins)
    mine.restore(joins)
    for _ in range(3):
        train(*here, 1)
        train(*there, 1)
        theirs, mine = Snapshot.of(at_work, into=theirs), Snapshot.of(joins, into=mine)
        assert mine.checksums() == theirs.checksums()
    train(*here, 1)
    theirs.restore(at_work)  # a step that is taken back, and done again
    train(*here, 1)
    train(*there, 1)
    assert Snapshot.of(at_work, into=theirs).checksums() == Snapshot.of(joins, into=mine).checksums()


def test_lists_in_an_optimizer_are_copied() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = [1]
    optimizer.param_groups[0]["marks"] = [1]
    state = elastic.State(optimizer=optimizer)
    Snapshot.of(state)
    optimizer.state[model.weight]["history"].append(2)
    optimizer.param_groups[0]["marks"].append(2)
    before = Snapshot.of(state)
    optimizer.state[model.weight]["history"].append(3)
    optimizer.param_groups[0]["marks"].append(3)
    before.restore(state)
    assert optimizer.state[model.weight]["history"] == [1, 2]
    assert optimizer.param_groups[0]["marks"] == [1, 2]


def test_arrays_that_cannot_be_kept_are_named() -> None:
    with pytest.raises(UsageError, match=r"names: dtype .* cannot be saved"):
        elastic.State(names=np.array(["a"]))
    with pytest.raises(UsageError, match=r"wide has several elements in one place"):
        elastic.State(wide=torch.zeros(1).expand(5))
    with pytest.raises(UsageError, match=r"model has parameters without a shape"):
        elastic.State(model=torch.nn.LazyLinear(3))


def test_a_state_from_other_ranks_must_fit() -> None:
    theirs = elastic.State(x=np.zeros(4, np.float32), log=[1], sampler=elastic.Sampler(100, 20))
    comes = through_bytes(Snapshot.of(theirs))
    sampler = elastic.Sampler(100, 20)
    comes.check_fits(elastic.State(x=np.ones(4, np.float32), log=[], sampler=sampler))
    for x in (np.zeros(6, np.float32), np.zeros(4, np.float64), 3):
        mine = elastic.State(x=x, log=[], sampler=sampler)
        if isinstance(x, int):
            comes.check_fits(mine)  # it may have become an array
            continue
        with pytest.raises(UsageError, match="x is float32 of shape"):
            comes.check_fits(mine)
    with pytest.raises(UsageError, match="this one has log, sampler, weights"):
        comes.check_fits(elastic.State(weights=np.zeros(4, np.float32), log=[], sampler=sampler))
    with pytest.raises(UsageError, match="this sampler has batch_size=10"):
        comes.restore(elastic.State(x=np.zeros(4, np.float32), log=[], sampler=elastic.Sampler(100, 10)))
    theirs.x = np.zeros(9)
    through_bytes(Snapshot.of(theirs)).check_fits(elastic.State(x=np.zeros(4), log=[], sampler=sampler))


def test_a_copy_sees_every_way_to_give_a_tensor_other_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    state = elastic.State(model=model)
    Snapshot.of(state)
    ways = [
        lambda: setattr(model[0].weight, "data", torch.full((3, 3), 7.0)),
        lambda: setattr(model[0].weight, "data", model[0].weight.data.t()),
        lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.full((3, 3), 8.0))),
        lambda: setattr(model[1], "bias", None),
        lambda: model.double(),
    ]
    for change in ways:
        change()
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        kept = Snapshot.of(state)
        for value in model.state_dict().values():
            value += 1
        kept.restore(state)
        found = model.state_dict()
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
