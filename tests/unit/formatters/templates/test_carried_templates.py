"""Numbers that templates print with a sign, and handlers log as whole registers."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.formatters.templates.carried_templates import check_widths
from dprobes.formatters.templates.template_collection import Templates
from dprobes.rpn.compilation_passes import parse_source
from dprobes.source_text import SourceFile


def warnings_of(handler: str, fmt: str, definitions: int = 1) -> str:
    text = 'name = "libc.so.6"\nmajor = 1\n' + f"offset = open\nminor = 2\n{handler}\n" * definitions
    program = parse_source(SourceFile("open.rpn", text), Diagnostics())
    templates = Templates.from_files({
        "templates.lst": b"1 open.fmt\n",
        "open.fmt": f'major = 1\nminor = 2\nfmt = "{fmt}"\n'.encode(),
    })  # fmt: skip
    diagnostics = Diagnostics()
    check_widths(templates, program, diagnostics)
    return diagnostics.render()


def test_a_whole_register_that_may_be_an_int_is_warned_of() -> None:
    assert warnings_of("push r, retval; push pid; log 2", "pid=%d fd=%d") == (
        "open.fmt:3:18: warning: this prints all of the register 'retval', in which the -1 of an int is 4294967295\n"
        '    fmt = "pid=%d fd=%d"\n'
        "                     ^~\n"
        "hint: write 'retval:s32' where the handler pushes it, if it is an int, else 'retval:s64'"
    )


@pytest.mark.parametrize(
    ("handler", "fmt"),
    [
        ("push r, retval:s32; log 1", "fd=%d"),
        ("push r, retval:s64; log 1", "fd=%nd"),
        ("push r, retval; log 1", "fd=%u %r"),
        ("push r, retval; log d, 1", "fd=%dd"),
        ("push r, retval; log 1", "fd=%dd %+4"),
        ("push r, sp; push lv, 0; push 5; log 3", "%d %d %d"),
        ("push r, arg0; push mem, u64; log 1", "%d"),
        ("push 10; push r, arg0; log str; push r, arg1; log 1", "%*s %d"),
        ("jz end; push r, arg0; log 1\nend: exit", "%d"),
    ],
)
def test_nothing_is_said_of_others(handler: str, fmt: str) -> None:
    assert warnings_of(handler, fmt) == ""


def test_places_are_counted_in_bytes() -> None:
    handler = "push r, arg0; log b, 1; push r, arg1; log 1; push r, arg2; log 1"
    assert "'arg2'" in warnings_of(handler, "%bu %+8 %d")
    assert "'arg1'" in warnings_of(handler, "%bu %d %+8")
    assert warnings_of(handler, "%d %d") == ""
