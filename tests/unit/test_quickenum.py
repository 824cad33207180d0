"""Enumerations that are made quickly are equal to those of the standard library."""

from __future__ import annotations

import copy
import enum
import inspect
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dprobes import quickenum
from dprobes.bpf.asm.isa import Helper
from dprobes.record.layout import Item
from dprobes.rpn.isa import OperandKind
from dprobes.rpn.tables import TableKind

if TYPE_CHECKING:
    from collections.abc import Callable

BASES = {"Enum": enum.Enum, "IntEnum": enum.IntEnum, "IntFlag": enum.IntFlag}

BODY = '''
class Made(base):
    """What it is."""

    ONE = 1
    """A word on it."""
    TWO = 2
    FOUR = 4
    ALSO_TWO = 2

    @property
    def half(self):
        return self.value / 2

    @classmethod
    def first(cls):
        return cls.ONE

    def is_one(self):
        return self is Made.ONE
'''


def made(base: object) -> Any:
    namespace: dict[str, Any] = {"base": base, "__name__": __name__}
    exec(BODY, namespace)
    return namespace["Made"]


Made = made(quickenum.IntFlag)
"""Pickles know a class by its module and its name."""


@pytest.mark.parametrize("name", BASES)
def test_a_class_is_like_one_of_the_standard_library(name: str) -> None:
    quick, usual = made(getattr(quickenum, name)), made(BASES[name])
    assert quick.__mro__[1:] == usual.__mro__[1:]
    assert (quick.__doc__, quick.__module__, quick.__qualname__) == (
        usual.__doc__,
        usual.__module__,
        usual.__qualname__,
    )
    assert [(key, one.name, one.value) for key, one in quick.__members__.items()] == [
        (key, one.name, one.value) for key, one in usual.__members__.items()
    ]
    for one, other in zip(quick, usual, strict=True):
        for of in (repr, str, hash, bool, lambda each: f"{each:>9}", lambda each: (each.half, each.is_one())):
            assert of(one) == of(other)
        assert one is quick(one.value) is quick[one.name] is getattr(quick, one.name) is copy.deepcopy(one)
        assert one in quick
    assert quick.ALSO_TWO is quick.TWO
    assert quick.first() is quick.ONE
    assert len(quick) == len(usual)


@pytest.mark.parametrize("name", BASES)
def test_what_is_wrong_is_refused_alike(name: str) -> None:
    quick, usual = made(getattr(quickenum, name)), made(BASES[name])
    for wrong in (lambda each: each("x"), lambda each: each["FIVE"], lambda each: setattr(each, "ONE", 5)):
        raised = []
        for one in (quick, usual):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the standard library raises
                wrong(one)
            raised.append((caught.type, str(caught.value)))
        assert raised[0] == raised[1]


def test_flags_are_combined_alike() -> None:
    quick, usual = made(quickenum.IntFlag), made(enum.IntFlag)
    combinations: tuple[Callable[[Any], Any], ...] = (
        lambda each: each.ONE | each.FOUR,
        lambda each: ~each.TWO,
        lambda each: (each.ONE | each.TWO) & each.TWO,
        lambda each: each.ONE ^ each.ONE,
        lambda each: each(8) | each.ONE,
    )
    for of in combinations:
        assert (int(of(quick)), str(of(quick)), repr(of(quick))) == (int(of(usual)), str(of(usual)), repr(of(usual)))
        assert [one.name for one in of(quick)] == [one.name for one in of(usual)]
        assert type(of(quick)) is quick


@pytest.mark.parametrize("member", [Helper.MAP_LOOKUP_ELEM, Item.PID, Item.PID | Item.TID, *OperandKind, *TableKind])
def test_members_of_ours_are_the_same_after_a_pickle(member: enum.Enum) -> None:
    assert pickle.loads(pickle.dumps(member)) == member
    if isinstance(member, (OperandKind, TableKind)):
        assert pickle.loads(pickle.dumps(member)) is member


def test_a_subclass_of_what_was_made_is_refused_as_usual() -> None:
    with pytest.raises(TypeError, match="cannot extend"):
        exec("class More(Helper): pass", {"Helper": Helper})


def test_without_the_quick_way_the_bases_are_those_of_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(enum, "_simple_enum")
    monkeypatch.delitem(sys.modules, "dprobes.quickenum")
    spec: dict[str, Any] = {"__name__": "dprobes.quickenum"}
    exec(inspect.getsource(quickenum), spec)
    assert [spec[name] for name in BASES] == list(BASES.values())
