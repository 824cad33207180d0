"""A program has a limit, which a text with macros could exceed without end."""

from __future__ import annotations

import pytest

from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.rpn import rpn_parser
from dprobes.rpn.compilation_passes import CompileOptions, parse_source
from dprobes.source_text import SourceFile


def test_a_program_has_no_more_instructions_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpn_parser, "MAX_INSTRUCTIONS", 20)
    text = 'name = "m"\n#define TEN(x) x; x; x; x; x; x; x; x; x; x\noffset = main\nTEN(nop)\nTEN(nop)\n'
    diagnostics = Diagnostics()
    assert parse_source(SourceFile("a.rpn", text), diagnostics, CompileOptions()) is not None
    with pytest.raises(SourceError) as error:
        parse_source(SourceFile("a.rpn", text + "exit\n"), diagnostics, CompileOptions())
    assert error.value.message.splitlines()[0] == "a.rpn:6:1: error: the program has more than 20 instructions"
