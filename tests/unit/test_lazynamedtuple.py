"""Named tuples whose ``__new__`` is made late do what those of the standard library do."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest

from dprobes.lazynamedtuple import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Point(NamedTuple):
    """One that pickles find by its name."""

    x: int
    y: int = 2

    @property
    def total(self) -> int:
        return self.x + self.y


class Single(NamedTuple):
    number: int


class Empty(NamedTuple):
    pass


class Boxed(NamedTuple, Generic[T]):
    content: T


class Original(typing.NamedTuple):
    x: int
    y: int = 2


FEW_AND_MANY = pytest.mark.parametrize("before", [0, 20])
"""How many instances were made before: ``__new__`` is compiled after some."""


def fresh() -> type[Any]:
    """Return a class of which there are no instances."""

    class Fresh(NamedTuple):
        x: int
        y: int = 2

    return Fresh


@FEW_AND_MANY
def test_instances_are_tuples_of_their_fields(before: int) -> None:
    kind = fresh()
    for _ in range(before):
        kind(1)
    assert kind(1) == (1, 2)
    assert kind(1, 3) == (1, 3)
    assert kind(y=4, x=5) == (5, 4)
    assert kind(6, y=7) == (6, 7)
    assert (kind(8).x, kind(8).y) == (8, 2)
    assert isinstance(kind(1), tuple)
    assert not hasattr(kind(1), "__dict__")


def test_a_new_is_compiled_for_classes_of_many_instances() -> None:
    kind = fresh()
    before = kind.__new__
    assert kind(1) == (1, 2)
    assert kind.__new__ is before
    for _ in range(20):
        kind(1)
    assert kind.__new__ is not before


def test_a_derived_class_makes_instances_of_its_own() -> None:
    base = fresh()

    class Derived(base):  # type: ignore[misc,valid-type]
        __slots__ = ()

    assert [type(Derived(n)) for n in range(20)] == [Derived] * 20
    assert type(base(1)) is base


@FEW_AND_MANY
@pytest.mark.parametrize(
    "call",
    [
        lambda kind: kind(),
        lambda kind: kind(1, 2, 3),
        lambda kind: kind(1, x=2),
        lambda kind: kind(1, z=2),
        lambda kind: kind(y=2),
        lambda kind: kind._make([1]),
        lambda kind: kind(1)._replace(z=3),
    ],
)
def test_wrong_arguments_are_refused_in_the_same_words(call: Callable[[Any], Any], before: int) -> None:
    said = []
    for kind in (fresh(), Original):
        for _ in range(before):
            kind(1)
        with pytest.raises((TypeError, ValueError)) as caught:
            call(kind)
        said.append((type(caught.value), str(caught.value).rpartition(f"{kind.__qualname__}.")[2]))
    assert said[0] == said[1]


def test_fields_and_defaults_are_known_by_the_usual_names() -> None:
    assert Point._fields == Original._fields == ("x", "y")
    assert Point._field_defaults == Original._field_defaults == {"y": 2}
    assert Point.__match_args__ == ("x", "y")
    assert Point(1)._asdict() == {"x": 1, "y": 2}
    assert Point(1)._replace(y=5) == (1, 5)
    assert Point._make([3, 4]) == (3, 4)
    assert repr(Point(1)) == "Point(x=1, y=2)"
    assert type(Point(1)._replace(x=2)) is Point


def test_classes_keep_their_methods_and_base_classes() -> None:
    assert Point(1).total == 3
    assert Boxed[int](3) == Boxed(1)._replace(content=3) == (3,)
    assert Single(1) == Single(number=1) == (1,)
    assert Empty() == ()
    assert Point.__doc__ == "One that pickles find by its name."
    match Point(1):
        case Point(x, y=y):
            assert (x, y) == (1, 2)


def test_pickles_and_copies_bring_instances_back() -> None:
    for again in (pickle.loads(pickle.dumps(Point(3, 4))), copy.copy(Point(3, 4)), copy.deepcopy(Point(3, 4))):
        assert again == (3, 4)
        assert type(again) is Point


def test_a_default_before_a_field_without_one_is_refused() -> None:
    with pytest.raises(AssertionError, match="a field of 'Wrong' lacks a default"):

        class Wrong(NamedTuple):
            x: int = 1
            y: int  # type: ignore[misc]
