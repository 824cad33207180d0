"""Dataclasses whose methods are made late do what those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import TYPE_CHECKING, ClassVar

import pytest

from dprobes.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable


def _examples(decorator: Callable[..., Callable[[type], type]]) -> dict[str, type]:
    """Return classes made by a decorator, ours or the original."""

    @decorator(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2
        note: str = field(default="", compare=False, repr=False)
        kind: ClassVar[str] = "point"

    @decorator(frozen=True, slots=True)
    class Named(Point):
        name: str = "none"

    @decorator(slots=True)
    class Basket:
        items: list[int] = field(default_factory=list)
        size: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            self.size = len(self.items)

    @decorator(slots=True, eq=False)
    class Handle:
        number: int

    @decorator(frozen=True)
    class Open:
        number: int

        def __repr__(self) -> str:
            return f"<{self.number}>"

        def __hash__(self) -> int:
            return 5

    return {made.__name__: made for made in (Point, Named, Basket, Handle, Open)}


OURS, THEIRS = _examples(dataclass), _examples(dataclasses.dataclass)


@pytest.mark.parametrize(
    ("name", "arguments", "keywords"),
    [
        ("Point", (1,), {}),
        ("Point", (1, 3), {"note": "n"}),
        ("Named", (1,), {"name": "a"}),
        ("Basket", ([1, 2],), {}),
        ("Basket", (), {}),
        ("Handle", (3,), {}),
        ("Open", (), {"number": 3}),
    ],
)
def test_instances_are_alike(name: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
    ours, theirs = (kinds[name](*arguments, **keywords) for kinds in (OURS, THEIRS))
    again = OURS[name](*arguments, **keywords)
    assert repr(ours) == repr(theirs)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
    assert (ours == again) == (name != "Handle")
    assert ours != theirs
    assert type(ours).__match_args__ == type(theirs).__match_args__
    assert hasattr(ours, "__dict__") == hasattr(theirs, "__dict__")
    assert (type(ours).__hash__ is None) == (type(theirs).__hash__ is None)
    if name in {"Point", "Named", "Open"}:
        assert hash(ours) == hash(again) == hash(theirs)
    assert repr(copy.copy(ours)) == repr(ours)


@pytest.mark.parametrize("arguments", [(), (1, 2, "", 4), (1, 2, "", "a", 5)])
def test_wrong_arguments_are_refused_in_the_same_words(arguments: tuple[object, ...]) -> None:
    said = []
    for kinds in (OURS, THEIRS):
        with pytest.raises(TypeError) as caught:
            kinds["Point"](*arguments)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("kinds", [OURS, THEIRS])
def test_frozen_ones_cannot_be_changed(kinds: dict[str, type]) -> None:
    point = kinds["Named"](1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'name'"):
        del point.name
    assert dataclasses.replace(point, x=5).x == 5


def test_fields_that_do_not_count_are_not_compared() -> None:
    assert OURS["Point"](1, note="a") == OURS["Point"](1, note="b")
    assert OURS["Point"](1) != OURS["Point"](2)


def test_an_inherited_init_is_the_base_class_s_own() -> None:
    # Whoever is made first: the method of one class is never that of another.
    kinds = _examples(dataclass)
    assert kinds["Named"](1, name="b").name == "b"
    assert repr(kinds["Point"](1)).endswith("Point(x=1, y=2)")


@dataclass(frozen=True, slots=True)
class Pickled:
    """One that pickles find by its name."""

    a: int
    b: tuple[int, ...] = ()


def test_pickles_bring_instances_back() -> None:
    one = Pickled(1, (2, 3))
    assert pickle.loads(pickle.dumps(one)) == one


def test_an_init_is_compiled_for_classes_of_many_instances() -> None:
    @dataclass(frozen=True, slots=True)
    class Late:
        a: int

    before = Late.__init__
    assert Late(1).a == 1
    assert Late.__init__ is before
    assert [Late(n).a for n in range(20)] == list(range(20))
    assert Late.__init__ is not before


@pytest.mark.parametrize("instances", [1, 20])
def test_an_init_is_the_same_before_and_after_it_is_compiled(instances: int) -> None:
    for kinds in (OURS, THEIRS):
        for _ in range(instances):
            basket = kinds["Basket"]([1, 2])
            assert (basket.items, basket.size) == ([1, 2], 2)
        assert kinds["Basket"]().items is not kinds["Basket"]().items
        assert repr(kinds["Named"](y=5, x=4, name="b")) == f"{kinds['Named'].__qualname__}(x=4, y=5, name='b')"
