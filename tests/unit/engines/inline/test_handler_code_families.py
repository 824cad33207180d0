from __future__ import annotations

from dprobes.engines.inline.handler_code import Families


def test_a_process_and_its_children_are_one_family() -> None:
    families = Families()
    first = families.of(10)
    assert families.of(10) == first
    families.copied(11, 10)
    families.copied(12, 11)
    assert (families.of(11), families.of(12)) == (first, first)
    assert families.of(20) != first


def test_a_child_of_a_process_without_a_family_has_none() -> None:
    families = Families()
    families.copied(11, 10)
    assert families.of(11) != families.of(10)


def test_a_family_ends_with_its_last_process() -> None:
    families = Families()
    first = families.of(10)
    families.copied(11, 10)
    assert families.left(10) is None
    assert families.left(10) is None  # it is known no longer
    assert families.left(11) == first
    assert families.left(11) is None


def test_a_process_that_executes_another_program_begins_another_family() -> None:
    families = Families()
    first = families.of(10)
    families.copied(11, 10)
    families.left(11)
    assert families.of(11) != first
    assert families.of(10) == first
