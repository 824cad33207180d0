"""What the instructions of a program need and do is found without executing them."""

from __future__ import annotations

import pytest

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import parse_source
from dprobes.rpn.program_needs import (
    entry_instructions,
    makes_records,
    needs_target,
    skipping_instruction,
    usdt_arguments,
)
from dprobes.source_text import SourceFile

HEAD = "name = p\nvars = 1\noffset = f\n"


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("inc lv, 0\nabort\n", False),
        ("inc lv, 0\nexit\n", True),
        ("inc lv, 0\n", True),  # an exit is added
        ("jmp on\non: abort\n", False),
        ("jmp on\nabort\non: nop\n", True),
        ("remove\n", True),
        ("exit 1\n", True),
        ("call out\nabort\nproc out\nret\nendproc\n", False),
        ("call out\nabort\nproc out\nexit\nendproc\n", True),
    ],
)
def test_a_program_makes_records_if_a_handler_may_end_with_one(handler: str, *, expected: bool) -> None:
    program = parse_source(SourceFile("p.rpn", HEAD + handler), Diagnostics())
    assert makes_records(program) == expected


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("push r, x0; push r, arg1; push r, sp; push tid; push time; log 5; exit\n", False),
        ("inc lv, 0\nsetmin 2\nabort\n", False),
        ("sx out\npush 1; push 0; div\nout: log st; exit\n", False),
        ("push r, v0; log 2; exit\n", True),  # a stub may be asked for it alone
        ("push r, arg0; push mem, u8; log 1; exit\n", True),
        ("push r, arg0; log str; exit\n", True),
        ('push r, arg0; match str, "x"; log 1; exit\n', True),
        ("log ustack; exit\n", True),
        ("push 0; pop r, x0; exit\n", True),
        ("call it\nexit\nproc it\nremove\nendproc\n", True),
        ("exit 3\n", True),
        ("push 0; skip\n", True),
    ],
)
def test_a_handler_needs_the_target_if_it_looks_at_more_than_registers(handler: str, *, expected: bool) -> None:
    diagnostics = Diagnostics()
    program = parse_source(SourceFile("p.rpn", HEAD + handler), diagnostics)
    assert needs_target(program, program.definitions[0], architecture("aarch64")) == expected


def test_an_argument_on_the_stack_is_memory() -> None:
    program = parse_source(SourceFile("p.rpn", HEAD + "push r, arg0; log 1; exit\n"), Diagnostics())
    assert needs_target(program, program.definitions[0], architecture("i386"))
    assert not needs_target(program, program.definitions[0], architecture("x86_64"))


def test_the_call_stack_as_a_key_is_memory() -> None:
    text = "name = p\ntable = calls, count, ustack[2]\noffset = f\ntally calls\nabort\n"
    program = parse_source(SourceFile("p.rpn", text), Diagnostics())
    assert needs_target(program, program.definitions[0], architecture("aarch64"))


def test_one_of_several_handlers_is_enough() -> None:
    text = HEAD + "abort\noffset = g\nminor = 2\nlog b, 1\nexit\n"
    assert makes_records(parse_source(SourceFile("p.rpn", text), Diagnostics()))


def test_instructions_are_those_of_the_definition_and_of_its_procedures() -> None:
    text = (
        "name = p\noffset = f\npush usdt, 0; log 1; call timed; exit\n"
        "offset = g\npush 0; skip\noffset = h\nabort\nproc timed\npush elapsed; log 1; ret\nendproc\n"
    )
    program = parse_source(SourceFile("p.rpn", text), Diagnostics())
    assert {"skip", "push elapsed", "abort"} <= program.syntaxes
    found = [
        [*map(str, usdt_arguments(program, each)), *map(str, entry_instructions(program, each))]
        for each in program.definitions
    ]
    assert found == [["push usdt, 0", "push elapsed"], [], []]
    skips = [skipping_instruction(program, each) for each in program.definitions]
    assert [each and str(each) for each in skips] == [None, "skip", None]
