"""Errors where people slip say what was meant."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx import Group
from phalanx.group.hints import add_hint
from phalanx.testing import run_ranks

X = np.ones(3)


@pytest.mark.parametrize(
    ("op", "meant"),
    [("avg", "mean"), ("SUM", "sum"), ("product", "prod"), ("maximum", "max"), ("summ", "sum"), ("and", "band")],
)
def test_a_reduction_of_another_name(op: str, meant: str) -> None:
    with px.init() as world, pytest.raises(px.UnsupportedOp, match=rf"did you mean '{meant}'\? Expected one of 'sum'"):
        world.all_reduce(X, op=op)


def test_no_hint_where_nothing_is_alike() -> None:
    with px.init() as world, pytest.raises(px.UnsupportedOp, match=r"not a reduction \(expected one of 'sum'"):
        world.all_reduce(X, op="xyzzy")


def test_a_list_instead_of_an_array() -> None:
    with px.init() as world, pytest.raises(px.UnsupportedArray, match=r"np\.asarray .*all_reduce_many .*_object"):
        world.all_reduce([1, 2, 3])


def test_a_verb_of_the_module() -> None:
    with pytest.raises(AttributeError, match=r"all_reduce belongs to the group that phalanx\.init\(\) returns"):
        px.all_reduce  # type: ignore[attr-defined]
    verbs = {name for name, value in vars(Group).items() if callable(value)}
    for base in Group.__mro__[1:-1]:
        verbs |= {name for name, value in vars(base).items() if callable(value)}
    wanted = {name for name in verbs if not name.startswith("_")} - {"close"}
    assert wanted <= px._OF_A_GROUP
    assert all(hasattr(Group, name) for name in px._OF_A_GROUP)


@pytest.mark.parametrize(
    ("verb", "argument", "meant"),
    [("broadcast", "root", "src"), ("reduce", "root", "dst"), ("send", "dest", "dst"), ("all_reduce", "opp", "op")],
)
def test_an_argument_of_another_name(verb: str, argument: str, meant: str) -> None:
    with (
        pytest.raises(TypeError, match=rf"^{verb}\(\) has no argument '{argument}' \(did you mean '{meant}'\?"),
        px.init() as world,
    ):
        getattr(world, verb)(X, **{argument: 0})


def test_errors_of_others_are_left_alone() -> None:
    for error in (TypeError("f() got an unexpected keyword argument 'root'"), KeyError("x"), TypeError()):
        before = error.args
        add_hint(error, Group)
        assert error.args == before


def ragged(group: Group) -> str:
    try:
        group.all_gather(np.ones(2 + group.rank))
    except px.Desync as error:
        return str(error)
    return ""


def test_an_all_gather_of_unequal_parts() -> None:
    for text in run_ranks(2, ragged):
        assert 'counts="auto" gathers them' in text


def too_much(group: Group) -> str:
    try:
        group.all_gather_object(np.zeros(1 << 20, np.uint8))
    except px.UsageError as error:
        return str(error)
    return ""


def test_an_object_over_the_limit() -> None:
    found = run_ranks(2, too_much, backend="mesh", options=px.Options(max_object=1 << 19))
    assert "its arrays take 1 MiB" in found[0]
    assert (
        "512 KiB are allowed (send it in parts, or raise the limit: Options.max_object or PHALANX_MAX_OBJECT)"
        in found[0]
    )


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_a_collective_inside_of_jit() -> None:
    def in_jit(group: Group) -> str:
        import jax

        def step(x: Any) -> Any:
            return group.all_reduce(x)

        try:
            jax.jit(step)(jax.numpy.ones(3))
        except px.UnsupportedArray as error:
            return str(error)
        return ""

    (text,) = run_ranks(1, in_jit, backend="mesh")
    assert "cannot be inside of a function that JAX traces for jit" in text
