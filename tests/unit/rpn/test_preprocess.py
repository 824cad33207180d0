"""The preprocessor: text, origins, diagnostics, limits, and agreement with the preprocessor of gcc."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.diagnostics import Diagnostics
from dprobes.errors import SourceError
from dprobes.rpn.preprocess import FILE_LIMIT, Preprocessed, preprocess, read_source
from dprobes.source import SourceFile, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def run(
    text: str,
    *,
    name: str = "t.rpn",
    defines: Sequence[tuple[str, str]] = (),
    include_dirs: Sequence[Path] = (),
    external: str | None = None,
) -> tuple[Preprocessed, str]:
    diagnostics = Diagnostics()
    source = SourceFile(name, text)
    result = preprocess(source, diagnostics, defines=defines, include_dirs=include_dirs, external=external)
    return result, diagnostics.render()


def output(text: str, **options: object) -> str:
    result, messages = run(text, **options)  # type: ignore[arg-type]
    assert messages == ""
    return result.text


def messages(text: str, **options: object) -> str:
    return run(text, **options)[1]  # type: ignore[arg-type]


def origin(result: Preprocessed, word: str) -> Span:
    start = result.text.index(word)
    return result.span(start, start + len(word))


def chain(span: Span) -> list[tuple[str, str, str]]:
    """Return place, text, and macro name of a span and of the definitions behind it."""
    links = [(str(span), span.text, "")]
    while span.expansion is not None:
        assert span.expansion.body is not None
        name, span = span.expansion.name, span.expansion.body
        links.append((str(span), span.text, name))
    return links


# Comments, strings and lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("push 1 // one\npop\n", "push 1 \npop\n"),
        ("push /* a */ 1\n", "push   1\n"),
        ("a/* b */c\n", "a c\n"),
        ("a /* b\nc */ d\ne\n", "a  \n d\ne\n"),
        ('name = "http://x/*y*/" // z\n', 'name = "http://x/*y*/" \n'),
        ('"a\\"//b" // c', '"a\\"//b" '),
        ("'\"' // c\n", "'\"' \n"),
        ("push \\\n 1\npop\n", "push  1\n\npop\n"),
        ("pu\\  \nsh 1\npop\n", "push 1\n\npop\n"),
        ("// a \\\n b\npop\n", "\n\npop\n"),
        ('"ab\\\ncd" e\nf', '"abcd" e\n\nf'),
        ("push 1\r\npop // x\r\nend\r\n", "push 1\npop \nend\n"),
        ("a\rb", "a b"),
        ("\ufeffpush 1\n", "push 1\n"),
        ("don't // x\nit's\n", "don't \nit's\n"),
        ("a ??= b\n", "a ??= b\n"),
    ],
)
def test_comments_and_continuations_go_and_lines_keep_their_numbers(text: str, expected: str) -> None:
    assert expected == output(text)
    assert expected == output(text, defines=[("UNUSED", "1")])


def test_an_unterminated_comment_or_string_is_an_error_at_its_start() -> None:
    expected = """\
t.rpn:1:8: error: unterminated string
    name = "abc // x
           ^
t.rpn:2:5: error: unterminated comment
    pop /* abc
        ^~"""
    assert expected == messages('name = "abc // x\npop /* abc\n\n')


FRAGMENTS = [
    '"',
    "'",
    "/",
    "*",
    "//",
    "/*",
    "*/",
    "\\",
    "\n",
    "\r\n",
    "\r",
    " ",
    "\t",
    "a",
    "b9",
    "é",
    "\f",
    "\\\n",
    ";",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_both_paths_agree_on_text_without_directives(text: str) -> None:
    fast, fast_messages = run(text)
    slow, slow_messages = run(text, defines=[("UNUSED", "1")])
    assert (fast.text, fast_messages) == (slow.text, slow_messages)
    places = range(len(fast.text) + 1)
    key = [(s.start, s.end) for i in places for s in [fast.span(i, i + 1 if i < len(fast.text) else i)]]
    assert key == [(s.start, s.end) for i in places for s in [slow.span(i, i + 1 if i < len(fast.text) else i)]]


@given(
    st.lists(st.sampled_from([*FRAGMENTS, "#", "#define a b", "#if", "#else", "#endif", "a(", ")", ","]), max_size=40)
)
def test_no_text_makes_the_preprocessor_fail_and_pieces_cover_the_result(fragments: list[str]) -> None:
    result, _ = run("".join(fragments))
    position = 0
    for piece in result.pieces:
        assert piece.start == position
        assert piece.end > piece.start
        position = piece.end
    assert position == len(result.text)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_a_character_that_is_copied_has_its_own_place(text: str) -> None:
    result, _ = run(text)
    for piece in result.pieces:
        if piece.end - piece.start == piece.span.end - piece.span.start and "/" not in piece.span.text:
            assert result.text[piece.start : piece.end].strip() == piece.span.text.strip()


# Origins


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


# Macros


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#define A(x) push x\nA(1)\nA(2)\n", "\npush 1\npush 2\n"),
        ("#define A(x) push x\nA(\n1) // c\npop\n", "\npush 1 \n\npop\n"),
        ("#define A(x) x\nA\npop A\n(3)\nend\n", "\nA\npop 3\n\nend\n"),
        ("#define A a \\\n b\nA\n", "\n\na  b\n"),
        ("#define A a /* x\ny */ b\nA\n", "\n\na   b\n"),
        ("#define A 1\n#undef A\nA\n", "\n\nA\n"),
        ("push __LINE__\npush __LINE__", "push 1\npush 2"),
        ("__COUNTER__ __COUNTER__ __FILE__", '0 1 "t.rpn"'),
        ("#if defined __LINE__\nyes\n#endif\n", "\nyes\n\n"),
        ('#define A 1\n"A" A\n', '\n"A" 1\n'),
        ("#if 0\ndon't \"\n#foo\n#if\n#else\n#endif\n#else\nok\n#endif\n", "\n" * 7 + "ok\n\n"),
        ('# 7 "x.c" 2\n#line 3\n#pragma foo\n#\nok', "\n\n\n\nok"),
    ],
)
def test_macros_keep_one_line_for_one_line(text: str, expected: str) -> None:
    assert expected == output(text)


PROGRAMS = {
    "object and function macros": "#define A 1\n#define F(x, y) x + y * A\nF(A, F(2, A)) F (3,4) F\n",
    "self reference": "#define f(x) f(x) g\n#define g f(1)\ng f(f)(2)\n#define x x y\n#define y x\nx y\n",
    "stringising": '#define S(x) #x\n#define T(x) S(x)\n#define V 1 2\nS( a  b ) S("a\\n") T(V) S(V)\n',
    "pasting": "#define C(a, b) a##b\n#define D(a, b) C(a, b)\n#define x1 hit\nC(x, 1) "
    "D(x, 1) C(,b) C(a,) C(,) [C(+,)+]\n",
    "pasting in an object macro": "#define X a ## b\n#define ab yes\nX\n",
    "variadic macros": "#define P(f, ...) q(f, ##__VA_ARGS__)\n#define Q(r...) r\nP(a) P(a, b, c) Q(1, 2) Q()\n",
    "arguments with parentheses": "#define F(x) <x>\nF((1,2)) F(()) F(F(F(3)))\n",
    "names of other macros as arguments": "#define A(x) B(x)\n#define B(x) [x]\n#define L A\nL(1) L(L)(2) A(B)(3)\n",
    "no accidental tokens": "#define P +\n#define M -\n#define N 1\n#define I(x) x\n+P -M xN I(a)I(b) N I(1)2\n",
    "numbers are one token": "#define F 9\n#define e 8\n1F 0xF .5e F 1e+F\n",
    "conditions": (
        "#define A 3\n#if A == 3 && (A << 2) == 12 && -7 / 2 == -3 && -7 % 2 == -1\n1\n#endif\n"
        "#if 0x7fffffffffffffff / 3 == 0x2aaaaaaaaaaaaaaa && 010 == 8 && '\\n' == 10 && 'a' == 97\n2\n#endif\n"
        "#if -1 > 0u\n3\n#elif 1\n4\n#else\n5\n#endif\n#ifdef A\n6\n#elif junk (\n7\n#endif\n"
        "#if 0 && 1 / 0 || !defined(B) && defined A\n8\n#endif\n#if 1 ? 2 ? 0 : 1 : 1\n9\n#else\n10\n#endif\n"
        "#if ~0u >> 63 == 1\n11\n#endif\n#if 2 + 3 * 4 - 1 == 13 && (1 | 2 ^ 3 & 2) == 1\n12\n#endif\n"
        "#if UNKNOWN\n13\n#elif UNKNOWN == 0\n14\n#elif 1\n15\n#endif\n#if (2 || 3) != 1 || 1, 0\n#endif\n"
    ).replace("#if (2 || 3) != 1 || 1, 0\n#endif\n", ""),
    "hide sets": "#define AA BB\n#define BB AA\n#define f(a) a*g\n#define g(a) f(a)\nAA BB f(2)(9)\n",
    "standard example": (
        "#define x 3\n#define f(a) f(x * (a))\n#undef x\n#define x 2\n#define g f\n#define z z[0]\n#define h g(~\n"
        "#define m(a) a(w)\n#define w 0,1\n#define t(a) a\n#define p() int\n#define q(x) x\n#define r(x,y) x ## y\n"
        "#define str(x) # x\nf(y+1) + f(f(z)) % t(t(g)(0) + t)(1);\ng(x+(3,4)-w) | h 5) & m\n(f)^m(m);\n"
        "p() i[q()] = { q(1), r(2,3), r(4,), r(,5), r(,) };\nstr() str(a b)\n"
    ),
}


def tokens(text: str) -> list[str]:
    return re.findall(r'"(?:[^"\\]|\\.)*"|[\w.]+|<<|>>|\+\+|--|&&|\|\||\S', text)


def gcc(text: str) -> str:
    command = ["gcc", "-E", "-P", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@needs_gcc
@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_macros_expand_as_in_gcc(text: str) -> None:
    assert tokens(gcc(text)) == tokens(output(text))


@needs_gcc
@given(
    st.lists(st.sampled_from(["A ", "B ", "F", "G", "(", ")", ",", "a ", "1 ", "+", " "]), max_size=12).map("".join),
    st.lists(st.sampled_from(["A ", "B ", "F(", "G(", ")", "x ", "y ", "+ "]), max_size=6).map("".join),
)
def test_random_macros_expand_as_in_gcc(body: str, use: str) -> None:
    text = f"#define A B a\n#define B A b\n#define F(x) x {use.count('F')}\n#define G(x) {{x F}}\n"
    text += f"#define H {use}\n{body}\nH\n"
    command = ["gcc", "-E", "-P", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    result, errors = run(text)
    if done.returncode == 0:
        assert errors == ""
        assert tokens(done.stdout) == tokens(result.text)
    else:
        assert errors != ""


# Errors in directives and macros


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
t.rpn:5:1: error: #elif after #else
    #elif 1
    ^~~~~~~
t.rpn:3:1: note: the #if is here
    #if 1
    ^~~~~
t.rpn:3:1: error: unterminated #if
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


def test_a_wrong_number_of_arguments_is_an_error_at_the_use() -> None:
    expected = """\
t.rpn:2:6: error: macro 'F' takes 2 arguments, but 1 given
    push F(1)
         ^
t.rpn:1:9: note: the macro is defined here
    #define F(a, b) a b
            ^"""
    assert expected == messages("#define F(a, b) a b\npush F(1)\n")


def test_arguments_without_an_end_are_an_error_at_the_name() -> None:
    expected = """\
t.rpn:2:1: error: the arguments of macro 'F' have no ')'
    F(1
    ^"""
    assert expected == messages("#define F(a) a\nF(1\npop\n")


def test_another_definition_of_a_macro_is_a_warning() -> None:
    expected = """\
t.rpn:1:9: warning: macro 'A' is redefined
    #define A 2
            ^
<command line>:1:4: note: the previous definition is here
    -D A=1
       ^"""
    assert expected == messages("#define A 2\n#define A 2\n", defines=[("A", "1")])


def test_a_define_needs_the_name_of_a_macro() -> None:
    expected = """\
error: 'a-b' cannot be the name of a macro
hint: write it as '-D NAME=VALUE'"""
    assert expected == messages("push 1\n", defines=[("a-b", "1")])


# Include files


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


# Files


def test_a_file_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "x.rpn"
    path.write_bytes("push 1 // é\r\n".encode())
    source = read_source(path)
    assert (str(path), "push 1 // é\r\n") == (source.name, source.text)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x7fELF\0", "error: 'x.rpn' is not a text file\nnote: NUL at byte 4"),
        (b"push \xff", "error: 'x.rpn' is not a text file\nnote: invalid UTF-8 at byte 5"),
        (b"a" * (FILE_LIMIT + 1), "error: 'x.rpn' is larger than 16 MiB"),
        (None, "error: cannot read 'x.rpn': no such file or directory"),
    ],
    ids=["nul", "utf-8", "large", "missing"],
)
def test_a_file_that_cannot_be_used_raises_a_source_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path("x.rpn").write_bytes(data)
    with pytest.raises(SourceError) as caught:
        read_source(Path("x.rpn"))
    assert expected == str(caught.value)


def test_a_directory_is_not_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    with pytest.raises(SourceError) as caught:
        read_source(Path("d"))
    assert str(caught.value) == "error: cannot read 'd': is a directory"


# Limits


def test_ten_megabytes_without_directives_take_seconds_at_most() -> None:
    text = 'push r, eax // comment "x"\nname = "a b"\n' * 250_000
    start = time.perf_counter()
    output(text)
    assert time.perf_counter() - start < 10  # 2 s on an idle machine


def test_long_text_with_directives_is_refused() -> None:
    expected = """\
error: 't.rpn' has more than 2 MiB of text, too much for the built-in preprocessor
hint: remove directives, macros and names that begin with '__', or use '--cpp "gcc -E"'"""
    assert expected == messages("#define A\n" + "push 1\n" * 400_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "#define A0 x\n" + "".join(f"#define A{i + 1} A{i} A{i}\n" for i in range(40)) + "A40\n",
            "t.rpn:42:1: error: macros produce more than 4 MiB of text\n    A40\n    ^~~",
        ),
        (
            "#define A0 x\n" + "".join(f"#define A{i + 1} A{i}\n" for i in range(2000)) + "A2000\n",
            "t.rpn:2002:1: error: macros nest more than 200 deep\n    A2000\n    ^~~~~",
        ),
    ],
    ids=["bomb", "chain"],
)
def test_runaway_macros_are_stopped(text: str, expected: str) -> None:
    assert expected == messages(text)


def test_deeply_nested_arguments_and_expressions_are_stopped() -> None:
    assert "macro arguments nest more than 50 deep" in messages("#define F(x) x\n" + "F(" * 3000 + ")" * 3000)
    assert "the expression nests too deep" in messages("#if " + "(" * 3000 + "\n#endif\n")
    assert messages("#if " + "!" * 3000 + "0\n#endif\n#if 1 << 1000000000000\n#endif\n") == ""


def test_pcpp_is_not_imported_for_text_without_directives() -> None:
    code = (
        "import sys; from dprobes.rpn.preprocess import preprocess; from dprobes.source import SourceFile;"
        "from dprobes.diagnostics import Diagnostics; preprocess(SourceFile('x', 'push 1 // y'), Diagnostics());"
        "print('pcpp' in sys.modules)"
    )
    source_root = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source_root}, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    run('#error x\n#define\n#if 1 +\n#endif\n#include "no"\n#foo\n#define F(x) x\nF(\n')
    assert tuple(capfd.readouterr()) == ("", "")


# Another preprocessor


@needs_gcc
def test_an_external_preprocessor_keeps_the_places_of_lines(tmp_path: Path) -> None:
    (tmp_path / "i.h").write_text("\nincluded here\n")
    name = str(tmp_path / "t.rpn")
    text = '#include "i.h"\n#define A 7\npush A // x\npop  /* y */\nexact 123\n'
    result, errors = run(text, name=name, defines=[("B", "1")], external="gcc -E")
    assert errors == ""
    assert [line.strip() for line in result.text.split("\n") if line.strip()] == [
        "included here",
        "push 7",
        "pop",
        "exact 123",
    ]
    assert f"{tmp_path}/i.h:2:10" == str(origin(result, "here"))
    assert f"{name}:5:7" == str(origin(result, "123"))
    assert (f"{name}:3:1", "push A // x") == (str(origin(result, "7")), origin(result, "7").text)


@needs_gcc
def test_errors_of_an_external_preprocessor_become_diagnostics() -> None:
    expected = """\
t.rpn:2:2: error: #error no
    #error no
     ^~~~~~~~"""
    assert expected == messages("push 1\n#error no\n", external="gcc -E")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("no-such-program -E", "error: cannot run 'no-such-program': no such file or directory"),
        ("gcc '", "error: malformed preprocessor command 'gcc '': no closing quotation"),
        ("", "error: the preprocessor command is empty\nhint: give one like '--cpp \"gcc -E\"'"),
        (
            "sh -c 'echo oops >&2; exit 3'",
            "error: 'sh -c 'echo oops >&2; exit 3'' failed with exit status 3\nnote: oops",
        ),
    ],
)
def test_an_external_preprocessor_that_fails_is_an_error(command: str, expected: str) -> None:
    assert expected == messages("push 1\n", external=command)
