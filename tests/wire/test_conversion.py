"""Plain data as the classes that a receiver names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from phalanx.errors import UsageError
from phalanx.group.data.typed import ObjectType
from phalanx.wire.conversion import Mismatch, check_for


@dataclass
class Cat:
    name: str


@dataclass
class Dog:
    name: str


@dataclass
class Bird:
    name: str
    wings: int = 2


class Tagged(msgspec.Struct, tag=True):
    name: str


class OtherTagged(msgspec.Struct, tag=True):
    name: str


def converted(annotation: Any, value: Any) -> Any:
    check = check_for(annotation)
    assert check is not None
    return check(value)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Cat | Bird, {"name": "a"}, Cat("a")),
        (Bird | Cat, {"name": "a"}, Cat("a")),
        (Cat | Bird, {"name": "a", "wings": 1}, Bird("a", 1)),
        (Cat | Bird | None, {"name": "a", "wings": 1}, Bird("a", 1)),
        (Cat | int, {"name": "a"}, Cat("a")),
        (Cat | int, 3, 3),
        (Tagged | OtherTagged, {"type": "OtherTagged", "name": "a"}, OtherTagged("a")),
    ],
)
def test_the_alternative_with_these_fields_is_meant(annotation: Any, value: Any, expected: Any) -> None:
    assert converted(annotation, value) == expected


def test_two_classes_with_the_same_fields_are_not_told_apart() -> None:
    for annotation in (Cat | Dog, Cat | Dog | None, Cat | Dog | dict[str, str]):
        with pytest.raises(Mismatch, match=r"could be Cat or Dog: its fields fit all of them \(Structs can have a tag"):
            converted(annotation, {"name": "a"})
    with pytest.raises(Mismatch, match="could be Cat or Dog") as caught:
        converted(list[Cat | Dog], [{"name": "a"}])
    assert caught.value.path == "[0]"


@pytest.mark.parametrize(
    ("annotation", "obj", "words"),
    [
        (Cat, Dog("a"), "cannot send a Dog as a Cat"),
        (list[Cat], [Cat("a"), Dog("b")], "cannot send a Dog as a Cat"),
        (dict[str, list[Cat]], {"a": [Dog("b")]}, "cannot send a Dog as a Cat"),
        (tuple[int, Cat], (1, Dog("b")), "cannot send a Dog as a Cat"),
        (Cat | Bird, Dog("b"), "cannot send a Dog as a Cat"),
    ],
)
def test_an_object_of_another_class_is_not_sent(annotation: Any, obj: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ObjectType(annotation, allow_pickle=False).check_own(obj)


@pytest.mark.parametrize(
    ("annotation", "obj"),
    [
        (Any, 3),
        (list[Cat], [Cat("a")]),
        (list[float], [1]),
        (Cat | None, None),
        (tuple[Cat, ...], (Cat("a"), Cat("b"))),
        (list[Any], [Dog("a")]),
        (dict[str, Any], {"a": Dog("b")}),
    ],
)
def test_what_fits_is_sent(annotation: Any, obj: Any) -> None:
    ObjectType(annotation, allow_pickle=False).check_own(obj)


AT_ONCE = """
import dataclasses, sys, threading
import msgspec
from phalanx.wire.conversion import cached_check

sys.setswitchinterval(1e-6)
layer = {"name": "a", "weights": [1.0]}
value = {"layers": [layer], "more": {"x": {"rate": 0.1, "layers": [layer, layer]}}}

def convert(kind, barrier, found):
    barrier.wait()
    found.append(cached_check(list[kind])([value]))

for _ in range(200):
    Layer = dataclasses.make_dataclass("Layer", [("name", str), ("weights", list[float])])
    Part = msgspec.defstruct("Part", [("rate", float), ("layers", list[Layer])])
    Model = dataclasses.make_dataclass("Model", [("layers", list[Layer]), ("more", dict[str, Part])])
    barrier, found = threading.Barrier(4), []
    threads = [threading.Thread(target=convert, args=(Model, barrier, found)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one[0].more["x"].layers[1].weights for one in found] == [[1.0]] * 4
"""


def test_threads_meet_a_class_at_once() -> None:
    """msgspec alone crashes: a process that ends so would take all tests of this worker along."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
