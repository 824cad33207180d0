"""Directives: errors, conditions, include files and limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import messages, origin, output, run


def test_malformed_directives_are_named() -> None:
    text = "#define\n#undef 3\n#include\n#pragma\n#if\n#endif\n#ifdef\n#endif\n"
    text += "#define defined\n#define F(a,,b)\n#define F(a\n"
    expected = """\
t.rpn:1:1: error: malformed #define directive
    #define
    ^~~~~~~
hint: write '#define NAME TEXT'
t.rpn:2:1: error: malformed #undef directive
    #undef 3
    ^~~~~~~~
hint: write '#undef NAME'
t.rpn:3:1: error: malformed #include directive
    #include
    ^~~~~~~~
hint: write '#include "FILE"'
t.rpn:5:1: error: malformed #if directive
    #if
    ^~~
hint: write '#if EXPRESSION'
t.rpn:7:1: error: malformed #ifdef directive
    #ifdef
    ^~~~~~
hint: write '#ifdef NAME'
t.rpn:9:9: error: 'defined' cannot be the name of a macro
    #define defined
            ^~~~~~~
t.rpn:10:1: error: malformed #define directive
    #define F(a,,b)
    ^~~~~~~~~~~~~~~
t.rpn:11:1: error: missing ')' in macro arguments
    #define F(a
    ^~~~~~~~~~~"""
    assert expected == messages(text)


def test_misplaced_and_unterminated_conditionals_are_errors() -> None:
    expected = """\
t.rpn:1:1: error: #else without #if
    #else
    ^~~~~
t.rpn:2:1: error: #endif without #if
    #endif
    ^~~~~~
t.rpn:3:1: error: unterminated #if
    #if 1
    ^~~~~
t.rpn:5:1: error: #elif after #else
    #elif 1
    ^~~~~~~
t.rpn:3:1: note: the #if is here
    #if 1
    ^~~~~"""
    assert expected == messages("#else\n#endif\n#if 1\n#else\n#elif 1\n")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1 +", "t.rpn:1:1: error: malformed #if directive: the expression ends too early\n    #if 1 +\n    ^~~~~~~"),
        ("1 2", "t.rpn:1:7: error: malformed #if directive: unexpected '2'\n    #if 1 2\n          ^"),
        ("08", "t.rpn:1:5: error: malformed #if directive: unexpected '08'\n    #if 08\n        ^~"),
        ("(1", "t.rpn:1:1: error: malformed #if directive: a '(' has no ')'\n    #if (1\n    ^~~~~~"),
        ("1/0", "t.rpn:1:6: error: malformed #if directive: division by zero\n    #if 1/0\n         ^"),
        ("1?2", "t.rpn:1:1: error: malformed #if directive: '?' without ':'\n    #if 1?2\n    ^~~~~~~"),
        (
            "defined 1",
            "t.rpn:1:5: error: malformed #if directive: 'defined' needs a name\n    #if defined 1\n        ^~~~~~~",
        ),
    ],
)
def test_a_bad_condition_is_an_error_where_it_is_bad(expression: str, expected: str) -> None:
    assert expected == messages(f"#if {expression}\n#endif\n")


def test_line_directives_give_the_lines_behind_them_other_numbers_and_names() -> None:
    text = (
        '#define N 90\n#line N "gen\\"1.y"\npush __LINE__ \\\n __FILE__ \\\n+ x\n'
        '# 7\ny __LINE__\n#line 5 "z" junk\n__FILE__ z"\n'
    )
    result, errors = run(text)
    assert result.text == '\n\npush 90  "gen\\"1.y" + x\n\n\n\ny 7\n\n"z" z"\n'
    assert [str(origin(result, word)) for word in ("push", "x\n", "y 7", 'z"\n')] == [
        'gen"1.y:90:1',
        'gen"1.y:92:3',
        'gen"1.y:7:1',
        "z:5:10",
    ]
    assert (
        errors
        == """\
z:5:11: error: unterminated string
    __FILE__ z"
              ^"""
    )


def test_a_line_directive_does_not_change_where_include_files_are(tmp_path: Path) -> None:
    (tmp_path / "i.h").write_text("included\n")
    result, errors = run('#line 3 "elsewhere/x"\n#include "i.h"\n', name=f"{tmp_path}/t.rpn")
    assert (errors, result.text) == ("", "\nincluded\n\n")


@pytest.mark.parametrize("arguments", ["", "0", "x", "1.5", "2147483648", "9" * 5000, "7 gen.y"])
def test_a_malformed_line_directive_says_what_it_should_be(arguments: str) -> None:
    text = f"#line {arguments}".rstrip()
    first = messages(f"{text}\n").splitlines()
    assert first[0] == "t.rpn:1:1: error: malformed #line directive"
    assert first[-1] == "hint: write '#line NUMBER' or '#line NUMBER \"FILE\"', with a number from 1 to 2147483647"


def test_error_and_warning_directives_become_diagnostics() -> None:
    expected = """\
t.rpn:1:1: warning: #warning old
    #warning old // x
    ^~~~~~~~~~~~
t.rpn:2:1: error: #error no way
    #error no way
    ^~~~~~~~~~~~~
t.rpn:3:1: error: unknown directive '#ifdfe'
    #ifdfe X
    ^~~~~~~~
hint: did you mean '#ifdef'?"""
    assert expected == messages("#warning old // x\n#error no way\n#ifdfe X\n")


def test_include_files_are_found_and_named_as_the_user_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"d/a.h": '#include "b.h"\n', "d/b.h": "pop bad", "inc/c.h": "inc"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result, errors = run('#include "d/a.h"\n#include <c.h>\n#define H "c.h"\n#include H\n', include_dirs=[Path("inc")])
    assert (errors, result.text.split()) == ("", ["pop", "bad", "inc", "inc"])
    assert str(origin(result, "bad")) == "d/b.h:1:5"
    assert str(origin(result, "inc")) == "inc/c.h:1:1"


def test_a_file_is_included_again_unless_it_says_once(tmp_path: Path) -> None:
    (tmp_path / "twice.h").write_text("#ifndef T\n#define T\n1\n#else\n2\n#endif\n")
    (tmp_path / "once.h").write_text("#pragma once\n3\n")
    text = '#include "twice.h"\n#include "once.h"\n' * 2
    assert output(text, name=str(tmp_path / "t.rpn")).split() == ["1", "3", "2"]


def test_a_missing_include_file_names_the_directories_searched() -> None:
    expected = """\
t.rpn:1:1: error: cannot find include file 'no.h'
    #include "no.h"
    ^~~~~~~~~~~~~~~
note: searched in '.', '/nowhere'
hint: name its directory with '-I DIR'
t.rpn:2:1: error: cannot find include file 'no.h'
    #include <no.h>
    ^~~~~~~~~~~~~~~
note: searched in '/nowhere'
hint: name its directory with '-I DIR'"""
    assert expected == messages('#include "no.h"\n#include <no.h>\n', include_dirs=[Path("/nowhere")])


def test_a_cycle_of_includes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.h").write_text('#include "b.h"\n')
    (tmp_path / "b.h").write_text('#include "a.h"\n#include "a.h"\n')
    expected = """\
b.h:1:1: error: 'a.h' is included more than 64 files deep
    #include "a.h"
    ^~~~~~~~~~~~~~
a.h:1:1: note: included from 'a.h'
    #include "b.h"
    ^~~~~~~~~~~~~~"""
    assert expected == messages('#include "a.h"\n')


def test_an_include_file_that_is_not_text_is_an_error_at_the_directive(tmp_path: Path) -> None:
    (tmp_path / "bin.h").write_bytes(b"ok\n\xff\xfe")
    name = str(tmp_path / "t.rpn")
    expected = f"""\
{name}:1:1: error: '{tmp_path}/bin.h' is not a text file
    #include "bin.h"
    ^~~~~~~~~~~~~~~~
note: invalid UTF-8 at byte 3"""
    assert expected == messages('#include "bin.h"\n', name=name)


def test_long_text_with_directives_is_refused() -> None:
    expected = """\
error: 't.rpn' has more than 2 MiB of text, too much for the built-in preprocessor
hint: remove directives, macros and names that begin with '__', or use '--cpp "gcc -E"'"""
    assert expected == messages("#define A\n" + "push 1\n" * 400_000)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    run('#error x\n#define\n#if 1 +\n#endif\n#include "no"\n#foo\n#define F(x) x\nF(\n')
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize(
    ("condition", "is_true"),
    [
        ("1 < 2", True), ("2 < 2", False), ("3 < 2", False), ("-1 < 0", True), ("-1 < 0u", False),
        ("1 >= 2", False), ("2 >= 2", True), ("3 >= 2", True), ("-1 >= 0", False), ("-1 >= 0u", True),
        ("1 > 2", False), ("2 > 2", False), ("3 > 2", True), ("1 <= 2", True), ("2 <= 2", True), ("3 <= 2", False),
        ("1 == 2", False), ("2 == 2", True), ("1 != 2", True), ("2 != 2", False),
    ],
)  # fmt: skip
def test_numbers_are_compared_as_c_compares_them(condition: str, is_true: bool) -> None:
    result, errors = run(f"#if {condition}\nyes\n#else\nno\n#endif\n")
    assert (errors, result.text.split()) == ("", ["yes" if is_true else "no"])
