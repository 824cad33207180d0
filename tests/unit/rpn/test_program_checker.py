"""Equal handlers of several definitions: none of their messages may be lost because an equal one was checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.arch import architecture
from dprobes.diagnostics import Diagnostics
from dprobes.rpn.compilation_passes import parse_file
from dprobes.rpn.instruction_set import ExceptionCode
from dprobes.rpn.program_checker import check

if TYPE_CHECKING:
    from pathlib import Path


def _messages(directory: Path, text: str) -> list[tuple[int, str]]:
    """Return the lines and the messages of the checks of a program with this text."""
    source = directory / "equal.rpn"
    source.write_text(f'name = "m"\nlogmax = 8\nvars = 1\n{text}')
    program, found = parse_file(source, Diagnostics()), Diagnostics()
    check(program, architecture("x86_64"), found)
    return [(each.span.line, each.message) for each in found if each.span is not None]


def test_each_of_equal_handlers_has_its_error(tmp_path: Path) -> None:
    text = "".join(f"offset = {place}\ninc lv, 3\nexit\n" for place in (1, 2))
    message = "local variable 3 does not exist: the program has 1"
    assert _messages(tmp_path, text) == [(5, message), (8, message)]


def test_each_of_equal_handlers_has_its_note(tmp_path: Path) -> None:
    text = "".join(f"offset = {place}\ninc lv, 0\n" for place in (1, 2))
    message = "the handler has no 'exit' at its end; it acts as if it had one"
    assert _messages(tmp_path, text) == [(5, message), (7, message)]


def test_equal_handlers_with_other_exception_masks_are_both_checked(tmp_path: Path) -> None:
    handler = "push 1\npush 2\nlog 2\nexit\n"
    text = f"offset = 1\nex_mask = {ExceptionCode.LOG_OVERFLOW:#x}\n{handler}offset = 2\n{handler}"
    message = "'log 2' has no room: the log has 8 bytes, and at least 16 bytes are needed"
    assert _messages(tmp_path, text) == [(13, message)]


def test_equal_handlers_with_other_labels_are_both_checked(tmp_path: Path) -> None:
    text = "offset = 1\njmp a\na: exit\noffset = 2\njmp a\nb: exit\n"
    message = "unknown label 'a' in the handler of minor 0 at line 7"
    assert _messages(tmp_path, text) == [(8, message)]
