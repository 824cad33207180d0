"""Every message of the language has a case that asserts it literally."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dprobes.rpn import header_statements, operands, program_checker, rpn_expressions, rpn_parser
from support.case_interpreter import compile_case

if TYPE_CHECKING:
    from types import FrameType, ModuleType

    from support.case_format import Case

MODULES = (rpn_expressions, operands, header_statements, rpn_parser, program_checker)

IN_UNIT_TESTS = {"dprobes.rpn.rpn_parser": ["{MAX_INSTRUCTIONS}"]}
"""Parts of the lines of messages that ``test_limits`` asserts: a case with so many instructions would take long."""

_REPORTERS = {"StatementError", "ExpressionError", "error", "warning", "note", "_error", "_report", "_wrong"}


def _reports(module: ModuleType) -> list[int]:
    """Return the lines of the statements of a module that make a message."""
    assert module.__file__ is not None
    lines = []
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Raise, ast.Return, ast.Expr)):
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            lines += [node.lineno for call in calls if _called(call) in _REPORTERS and (call.args or call.keywords)]
    return lines


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return ""


@pytest.fixture(scope="module")
def executed(all_cases: list[Case]) -> set[tuple[str, int]]:
    """Return the (file, line) of the compiler that ran for the cases with diagnostics."""
    found: set[tuple[str, int]] = set()
    files = {module.__file__ for module in MODULES}

    def trace(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for case in all_cases:
            if case.text("diagnostics", case.targets[0]) is not None:
                compile_case.__wrapped__(case, case.targets[0])  # cases may have run before in this process
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_message_of_a_module_is_asserted_by_a_case(module: ModuleType, executed: set[tuple[str, int]]) -> None:
    lines = _reports(module)
    assert len(lines) >= 3
    missing = [line for line in lines if (module.__file__, line) not in executed]
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8").splitlines()
    expected = IN_UNIT_TESTS.get(module.__name__, [])
    assert [part for line in missing for part in expected if part in text[line - 1]] == expected
    assert len(missing) == len(expected), missing
