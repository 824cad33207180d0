"""Where in a program a position is; a bar marks it."""

from __future__ import annotations

import pytest

from dprobes.cli.languageserver.edited_program import Position, position_at


def at(text: str) -> Position:
    return position_at(text.replace("|", "", 1), text.index("|"))


@pytest.mark.parametrize(
    ("text", "in_block", "is_text"),
    [
        ("libc.so.6:mal|", False, False),
        ("f { @ = |", True, False),
        ("f { if (1) { } |", True, False),
        ("f { } g|", False, False),
        ("// a { |", False, True),
        ("/* { |", False, True),
        ("/* { */ |", False, False),
        ('f { printf("{ |', True, True),
        ('f { printf("{ ") |', True, False),
        ('f { printf("}"); |', True, False),
        ("} } f { |", True, False),
        ("|", False, False),
    ],
)
def test_blocks_comments_and_strings(text: str, in_block: bool, is_text: bool) -> None:
    found = at(text)
    assert (found.in_block, found.is_text) == (in_block, is_text)


def test_what_a_probe_says_before_its_block() -> None:
    found = at("static int x;\nreturn libc.so.6:f(char *name, size, int) when (size > 1) { |")
    assert (found.parameters, found.is_return) == (("name", "size"), True)
    found = at("tracepoint sched:sched_switch, syscall openat { |")
    assert found.events == ("tracepoint:sched:sched_switch", "syscall:openat")
    assert (found.parameters, found.is_return) == ((), False)
    assert not at("void g() { return; } f { |").is_return
