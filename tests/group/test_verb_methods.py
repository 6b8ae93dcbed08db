"""Verbs that are methods of the core look and behave as the Python methods whose place they take."""

import inspect
import pydoc
import types
import weakref
from unittest import mock

import numpy as np
import pytest

import phalanx as px
from phalanx._native import core

pytestmark = pytest.mark.skipif(core is None, reason="there is no core")

VERBS = () if core is None else core.VERBS


@pytest.fixture
def group():
    with px.init() as group:
        group.barrier()  # the first collective opens the fast path
        assert group._fast_path is not None
        yield group


@pytest.mark.parametrize("verb", VERBS)
def test_it_looks_like_the_method(verb):
    method, function = getattr(px.Group, verb), getattr(px.Group, verb).__wrapped__
    assert isinstance(function, types.FunctionType)
    assert (method.__name__, method.__doc__, method.__module__) == (verb, function.__doc__, function.__module__)
    assert inspect.signature(method) == inspect.signature(function)
    assert method.__qualname__ in repr(method)
    assert f"{verb}(" in pydoc.render_doc(px.Group, renderer=pydoc.plaintext)


def test_bound_to_a_group_it_is_a_method(group):
    assert isinstance(group.all_reduce, types.MethodType)
    assert list(inspect.signature(group.all_reduce).parameters) == ["x", "op", "timeout", "async_op"]
    assert group.all_reduce == group.all_reduce


def test_it_passes_for_a_function(group):
    assert inspect.isfunction(px.Group.all_reduce)
    assert weakref.WeakMethod(group.barrier)() == group.barrier
    with mock.patch.object(px.Group, "all_reduce", autospec=True) as replaced:
        group.all_reduce("x")
        with pytest.raises(TypeError):
            group.all_reduce()
    replaced.assert_called_once_with(group, "x")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {"x": True}),
        ((True,), {}),
        ((True, "sum"), {}),
        ((True,), {"op": "sum", "timeout": 5.0, "async_op": False}),
    ],
)
def test_arguments_are_taken_by_place_and_by_name(group, args, named):
    x = np.arange(3.0)
    args = tuple(x if one is True else one for one in args)
    named = {name: x if one is True and name == "x" else one for name, one in named.items()}
    assert group.all_reduce(*args, **named) is x


def test_names_that_are_not_interned_are_taken(group):
    x = np.arange(3.0)
    assert group.all_reduce(x, **{"".join(["time", "out"]): 5.0, "".join(["o", "p"]): "max"}) is x


@pytest.mark.parametrize("call", [{"wrong": 1}, {"x": 1, "op": "sum"}, {"tag": 3}])
def test_what_does_not_fit_is_refused_as_by_the_method(group, call):
    x = np.arange(3.0)
    with pytest.raises(TypeError, match=r"all_reduce\(\) got"):
        group.all_reduce(x, **call)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        group.all_reduce()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'self'"):
        px.Group.barrier()


def test_a_program_can_override_it(group, monkeypatch):
    x = np.arange(3.0)
    former = px.Group.all_reduce
    monkeypatch.setattr(px.Group, "all_reduce", lambda self, x, **named: ("mine", former(self, x, **named)))
    assert group.all_reduce(x, op="max") == ("mine", x)


def test_an_error_has_no_frames_of_phalanx(group):
    x = np.arange(4, dtype=np.float32)
    group.close()
    with pytest.raises(px.Closed) as caught:
        group.all_reduce(x)
    assert [entry.path.name for entry in caught.traceback] == ["test_verb_methods.py"]
