"""Every backend passes the suite that ships in `phalanx.testing`, whole and as a sub-group of a larger world."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest

from phalanx import Group, Options, TlsOptions
from phalanx.errors import UsageError
from phalanx.testing import RankFailed, conformance, open_world, run_ranks
from phalanx.testing.conformance import Check, Make

KINDS = ["simulated", "tcp", "mesh", "mesh-tls", "mesh-classic"]
VIEWS: dict[str, Callable[[Make], Make]] = {"whole": lambda make: make, "subgroup": conformance.as_subgroup}
LEAST = {"tcp": 2, "mesh-classic": 2}
"""The classic wire has no world of one."""


@pytest.fixture
def make(kind: str, view: str, request: pytest.FixtureRequest) -> Make:
    """Worlds of one kind."""
    options = None
    if kind == "mesh-tls":
        tls: TlsOptions = request.getfixturevalue("tls")
        options = Options(tls=tls)
    backend = "mesh" if kind == "mesh-tls" else kind
    return VIEWS[view](functools.partial(open_world, backend=backend, timeout=20, options=options))


def cases() -> list[object]:
    """Every check on every kind of world, as far as it can exist."""
    return [
        pytest.param(kind, view, check, id=f"{kind}-{view}-{check}")
        for kind in KINDS
        for view in VIEWS
        # What encrypts a link knows nothing of sub-groups: on TLS these have their own checks, as all worlds have.
        if (kind, view) != ("mesh-tls", "subgroup")
        for check in conformance.checks()
        if check.ranks + (view == "subgroup") >= LEAST.get(kind, 1)
    ]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("kind", "view", "check"), cases())
def test_in_one_process(make: Make, check: Check) -> None:
    conformance.run(check, make)


@pytest.mark.parametrize("view", ["whole"])
@pytest.mark.parametrize("kind", ["tcp", "mesh"])
@pytest.mark.parametrize("check", conformance.checks(large=True), ids=str)
def test_large(make: Make, check: Check) -> None:
    conformance.run(check, make, timeout=100)


# -- in processes -----------------------------------------------------------------------------------------------------

IN_PROCESSES = [
    "raw.messages_arrive_intact",
    "raw.another_length",
    "raw.barrier_holds",
    "threads.all_pairs_at_once",
    "timeouts.timeout_in_the_middle",
    "closing.sent_before_close",
    "subgroups.crossing_traffic",
    "messages.arrays_arrive",
    "asynchronous.many_at_once",
    "objects.objects_with_arrays",
    "objects.typed_objects",
    "scans.scan",
    "scans.extremes",
    "uneven.gathered",
    "uneven.scattered",
    "collectives.all_reduce",
    "collectives.same_bits",
]


@pytest.mark.parametrize("backend", ["tcp", "mesh", "mesh-ipv6", "mesh-classic"])
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_in_processes(name: str, backend: str) -> None:
    run_ranks(conformance.find(name).ranks, conformance.on_group, name, backend=backend)


def without_core(group: Group, names: list[str]) -> bool:
    from phalanx import _native

    for name in names:
        if conformance.find(name).ranks == group.world_size:
            conformance.on_group(group, name)
    return _native.available


@pytest.mark.parametrize("backend", ["tcp", "mesh"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_without_the_core(ranks: int, backend: str) -> None:
    """All checks that leave the world as it was, one after another, in processes without the native core."""
    names = [one.name for one in conformance.checks() if not one.name.startswith(("closing.", "timeouts.send_"))]
    left_out = ("subgroups.close_parent", "asynchronous.async_send_timeout")
    names = [name for name in names if not name.startswith(left_out)]
    assert sum(conformance.find(name).ranks == ranks for name in names) > 5
    found = run_ranks(ranks, without_core, names, backend=backend, env={"PHALANX_PURE": "1"}, timeout=100)
    assert found == [False] * ranks


def test_simulated_without_the_core() -> None:
    names = [one.name for one in conformance.checks() if one.name.startswith("collectives.")]
    found = run_ranks(1, simulated_without_core, names, backend="mesh", env={"PHALANX_PURE": "1"}, timeout=100)
    assert found == [(False, len(names))]


def simulated_without_core(_group: Group, names: list[str]) -> tuple[bool, int]:
    from phalanx import _native

    for name in names:
        conformance.run(name, functools.partial(open_world, backend="simulated"))
    return _native.available, len(names)


# -- the suite itself -------------------------------------------------------------------------------------------------


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no check 'raw.nothing' .*raw.messages_arrive_intact"):
        conformance.find("raw.nothing")


def test_checks_can_be_chosen() -> None:
    plain = conformance.checks(lanes=False)
    everything = conformance.checks()
    large = conformance.checks(large=True)
    assert {one.name for one in plain} < {one.name for one in everything}
    assert all(not one.lanes for one in plain)
    assert large
    assert not {one.name for one in large} & {one.name for one in everything}
    assert all(one.rule.endswith(".") for one in everything + large)


def test_a_backend_that_breaks_a_rule_is_found() -> None:
    """Wrapped so that every third message is cut by a byte: the suite must see it."""
    from contextlib import contextmanager

    class Cutting:
        def __init__(self, backend: object) -> None:
            self.backend = backend
            self.count = 0

        def send(self, data: bytes, dst: int, **kwargs: object) -> None:
            self.count += 1
            self.backend.send(bytes(data)[: -1 if self.count % 3 == 0 else None], dst, **kwargs)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self.backend, name)

    @contextmanager
    def make(n: int):  # type: ignore[no-untyped-def]
        with open_world(n, "simulated", timeout=5) as backends:
            yield [Cutting(backend) for backend in backends]

    with pytest.raises(RankFailed, match="rank [01] failed"):
        conformance.run("raw.messages_keep_their_order", make)


def test_the_core_is_there() -> None:
    """Else all of the above would have tested NumPy alone."""
    from phalanx import _native

    assert _native.available or sys.platform != "linux", _native.why_not
