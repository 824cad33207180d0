"""Macros: what they expand to, their errors and limits, and agreement with the preprocessor of gcc."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .support import chain, messages, origin, output, run

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


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
    "variadic macros without arguments": (
        "#define V(x, ...) [x, ## __VA_ARGS__]\n#define W(...) f(a , ##__VA_ARGS__) #__VA_ARGS__\n"
        "#define A B\n#define B 2\n"
        "V(1) V(1,) V(1, A) W() W(A, 1) W( x ,y )\n"
    ),
    "optional tokens of variadic macros": (
        "#define F(a, ...) f(a __VA_OPT__(,) __VA_ARGS__)\n#define E\n#define G(x, ...) x ## __VA_OPT__(y z) ## w\n"
        "#define H(x, ...) __VA_OPT__(x ## _) x __VA_OPT__ ( ) end\n#define K(...) a __VA_OPT__(__VA_ARGS__ ## z) b\n"
        "#define L(...) #__VA_ARGS__ __VA_OPT__(; #__VA_ARGS__ ())\n#define J(x) __VA_OPT__(x)\n"
        "F(1) F(1,2) F(1,2,3) F(1,) F(1,E) G(a) G(a,b) H(q) H(q,1) K() K(1) K(1,2) L() L(a  b) J(2)\n"
    ),
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("__VA_OPT__", "'__VA_OPT__' needs tokens in parentheses after it"),
        ("__VA_OPT__ x", "'__VA_OPT__' needs tokens in parentheses after it"),
        ("__VA_OPT__(x", "'__VA_OPT__' needs tokens in parentheses after it"),
        ("__VA_OPT__(__VA_OPT__(x))", "'__VA_OPT__' inside '__VA_OPT__'"),
    ],
)
def test_optional_tokens_stand_in_parentheses_and_once(body: str, message: str) -> None:
    text = f"#define F(...) {body}\n"
    expected = f"t.rpn:1:16: error: {message}\n    {text}    {' ' * 15}^~~~~~~~~~"
    assert expected == messages(text)


def test_optional_tokens_do_not_begin_or_end_with_a_paste() -> None:
    expected = """\
t.rpn:1:29: error: '##' cannot be at either end of '__VA_OPT__'
    #define F(...) __VA_OPT__(x ##) y
                                ^~"""
    assert expected == messages("#define F(...) __VA_OPT__(x ##) y\n")


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


def test_a_long_chain_of_pastes_is_stopped() -> None:
    found = messages("#define A a " + "##b " * 100_000 + "\nA\n")
    assert found.splitlines()[0] == "t.rpn:1:4103: error: '##' makes a token of more than 1024 characters"


def test_deeply_nested_arguments_and_expressions_are_stopped() -> None:
    assert "macro arguments nest more than 50 deep" in messages("#define F(x) x\n" + "F(" * 3000 + ")" * 3000)
    assert "the expression nests too deep" in messages("#if " + "(" * 3000 + "\n#endif\n")
    assert messages("#if " + "!" * 3000 + "0\n#endif\n#if 1 << 1000000000000\n#endif\n") == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#define F(x) # y", "t.rpn:1:14: error: '#' is not followed by a parameter of the macro"),
        ("#define F(x) #", "t.rpn:1:14: error: '#' is not followed by a parameter of the macro"),
        ("#define A ## b", "t.rpn:1:11: error: '##' cannot be at either end of a macro"),
        ("#define F(x) x ##", "t.rpn:1:16: error: '##' cannot be at either end of a macro"),
        ("#define F(a, a) a", "t.rpn:1:1: error: macro 'F' has two parameters of the same name"),
        ("#define F(..., a) a", "t.rpn:1:1: error: malformed #define directive"),
    ],
)
def test_a_wrong_definition_is_an_error_where_it_is_wrong(text: str, expected: str) -> None:
    assert expected == messages(text).splitlines()[0]


def test_tokens_that_do_not_paste_stay_side_by_side() -> None:
    assert output("#define REG(x) %##x\nREG(eax)\n") == "\n%eax\n"


def test_a_pasted_token_has_a_place_in_the_definition() -> None:
    result, _ = run("#define C(a, b) a ## b\nC(x, 1)\n")
    assert chain(origin(result, "x1")) == [("t.rpn:2:1", "C(x, 1)", ""), ("t.rpn:1:17", "a ## b", "C")]


def test_a_define_whose_value_begins_with_an_equals_sign_keeps_it() -> None:
    assert output("A", defines=[("A", "=1")]) == "=1"
