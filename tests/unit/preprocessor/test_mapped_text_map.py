"""Where the characters of the result came from."""

from __future__ import annotations

from dprobes.diagnostics import Diagnostics

from .support import chain, origin, run


def test_plain_text_has_exact_columns_before_and_after_comments() -> None:
    result, _ = run("push /* x */ 123 // y\n  pop\n")
    assert str(origin(result, "123")) == "t.rpn:1:14"
    assert str(origin(result, "pop")) == "t.rpn:2:3"
    assert result.span(0, result.text.index("3") + 1).text == "push /* x */ 123"


def test_the_end_of_the_text_is_a_place() -> None:
    for text in ("", "push", "push\n", "#define A 1\nA"):
        result, _ = run(text)
        end = len(result.text)
        assert len(text) == result.span(end, end).end


def test_a_macro_leads_from_its_use_to_its_definition() -> None:
    result, _ = run("#define LOAD push r, eax\n  LOAD\n")
    assert chain(origin(result, "push")) == [("t.rpn:2:3", "LOAD", ""), ("t.rpn:1:14", "push", "LOAD")]
    assert chain(origin(result, "push r, eax")) == [("t.rpn:2:3", "LOAD", ""), ("t.rpn:1:14", "push r, eax", "LOAD")]


def test_nested_macros_lead_from_use_to_use() -> None:
    result, _ = run("#define IN(x) bad x\n#define OUT(x) IN(x) ok\nOUT(arg)\n")
    assert result.text.strip() == "bad arg ok"
    expected = [("t.rpn:3:1", "OUT(arg)", ""), ("t.rpn:2:16", "IN(x)", "OUT"), ("t.rpn:1:15", "bad", "IN")]
    assert expected == chain(origin(result, "bad"))
    assert chain(origin(result, "arg")) == [("t.rpn:3:5", "arg", "")]


def test_a_macro_of_the_command_line_has_a_place_there() -> None:
    result, _ = run("push PID\n", defines=[("PID", "12x")])
    diagnostics = Diagnostics()
    diagnostics.error(origin(result, "12x"), "not a number")
    expected = """\
t.rpn:1:6: error: not a number
    push PID
         ^~~
<command line>:1:8: note: in the expansion of macro 'PID'
    -D PID=12x
           ^~~"""
    assert expected == diagnostics.render()


def test_a_statement_of_plain_text_and_macro_has_one_span() -> None:
    result, _ = run("#define N 12\npush N\n")
    span = origin(result, "push 12")
    assert (str(span), span.text, span.expansion) == ("t.rpn:2:1", "push N", None)
