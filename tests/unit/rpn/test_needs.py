"""What the instructions of a program need and do is found without executing them."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.rpn.needs import makes_records
from dprobes.rpn.pipeline import parse_source
from dprobes.source import SourceFile

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


def test_one_of_several_handlers_is_enough() -> None:
    text = HEAD + "abort\noffset = g\nminor = 2\nlog b, 1\nexit\n"
    assert makes_records(parse_source(SourceFile("p.rpn", text), Diagnostics()))
