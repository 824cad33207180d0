"""Groups and types choose definitions; a group binds stronger than a type."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.rpn.compilation_passes import parse_file, parse_source
from dprobes.rpn.rpn_program import select, select_all, without_opcodes
from dprobes.source_text import SourceFile

if TYPE_CHECKING:
    from dprobes.rpn.rpn_program import Program

FIXTURES = Path(__file__).parents[2] / "fixtures" / "seeds"


@pytest.fixture(scope="module")
def example() -> Program:
    """Return example 6 of the man page, whose text says what its command lines select."""
    return parse_file(FIXTURES / "man-example-6.fixed.rpn", Diagnostics())


def minors(program: Program) -> list[tuple[str | None, tuple[str, ...], int]]:
    return [(d.group, d.types, d.minor) for d in program.definitions]


def test_without_names_all_definitions_stay(example: Program) -> None:
    assert select(example) is example


def test_groups_and_types_select(example: Program) -> None:
    everything = minors(example)
    for groups in ((), ("process",), ("memory", "FILESYS"), ("faults", "process", "memory", "filesys")):
        for types in ((), ("enter",), ("Leave",), ("enter", "leave")):
            wanted = [
                (group, kinds, minor)
                for group, kinds, minor in everything
                if (not groups or group in [name.lower() for name in groups])
                and (not types or {name.lower() for name in types} & set(kinds))
            ]
            if wanted:
                assert minors(select(example, groups, types)) == wanted
            else:
                with pytest.raises(SourceError, match="no probe definition has"):
                    select(example, groups, types)


def test_an_unknown_name_is_an_error_with_a_near_one(example: Program) -> None:
    with pytest.raises(SourceError) as caught:
        select(example, ["filesystem"], ["entry"])
    assert [(d.message, d.hint) for d in caught.value.diagnostics] == [
        ("the program has no group 'filesystem'", "did you mean 'filesys'?"),
        ("the program has no type 'entry'", "did you mean 'enter'?"),
    ]
    plain = parse_source(SourceFile("a.rpn", "name = a\noffset = 1\nexit\n"), Diagnostics())
    with pytest.raises(SourceError) as caught:
        select(plain, ["zzz"])
    assert caught.value.message == (
        "a.rpn:1:1: error: the program has no group 'zzz'\n    name = a\n    ^~~~~~~~\n"
        "hint: the program has no 'groupdef ='"
    )


def test_opcodes_are_forgotten_where_they_choose_nothing() -> None:
    text = 'name = a\noffset = f\nopcode = 0x55\nexit\noffset = "f*"\nopcode = 0x55\nexit\n'
    program = without_opcodes(parse_source(SourceFile("a.rpn", text), Diagnostics()))
    assert [definition.opcode for definition in program.definitions] == [None, 0x55]


def test_of_several_programs_some_may_have_none_left_but_not_all() -> None:
    head = "name = {}\ngroupdef = a b c\n"
    texts = [head.format("m") + "offset = f\ngroup = a\nexit\n", head.format("n") + "offset = g\ngroup = b\nexit\n"]
    programs = [parse_source(SourceFile("a.rpn", text), Diagnostics()) for text in texts]
    assert [len(each.definitions) for each in select_all(programs, ["a"])] == [1, 0]
    assert [len(each.definitions) for each in select_all(programs, ["B", "a"])] == [1, 1]
    with pytest.raises(SourceError, match="no probe definition has group 'c'"):
        select_all(programs, ["c"])
