"""Arguments of USDT probes: each form that compilers write, and what no value can be had of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprobes.arch import architecture
from dprobes.arch.usdt_arguments import Argument, MemoryPlace, RegisterPart, parse_arguments

X86_64, I386 = architecture("x86_64"), architecture("i386")


def one(text: str, name: str = "x86_64") -> Argument:
    (argument,) = parse_arguments(text, architecture(name))
    return argument


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("-4@%eax", RegisterPart("eax", 0, 32)),
        ("8@%rdi", RegisterPart("edi", 0, 64)),
        ("1@%ah", RegisterPart("eax", 8, 8)),
        ("1@%sil", RegisterPart("esi", 0, 8)),
        ("2@%bp", RegisterPart("ebp", 0, 16)),
        ("4@%r10d", RegisterPart("r10", 0, 32)),
        ("2@%r15w", RegisterPart("r15", 0, 16)),
        ("1@%r8b", RegisterPart("r8", 0, 8)),
        ("4@%rax", RegisterPart("eax", 0, 32)),  # the lower part of a wider register
        ("8@%eax", RegisterPart("eax", 0, 32)),  # no more than the register has
        ("8@$5", 5),
        ("-4@$-0x10", -16),
        ("4@-20(%rbp)", MemoryPlace(-20, "ebp")),
        ("-4@-4-8-16(%rsp)", MemoryPlace(-28, "esp")),
        ("8@(%rax,%rbx,8)", MemoryPlace(0, "eax", "ebx", 8)),
        ("8@( %rax, %rbx, 8)", MemoryPlace(0, "eax", "ebx", 8)),
        ("8@4(,%r9,2)", MemoryPlace(4, "", "r9", 2)),
        ("4@symbol(%rip)", MemoryPlace(symbol="symbol")),
        ("4@symbol+4(%rip)", MemoryPlace(4, symbol="symbol")),
        ("4@8+symbol.0-1(%rip)", MemoryPlace(7, symbol="symbol.0")),
        ("4@table(,%rsi,4)", MemoryPlace(0, "", "esi", 4, "table")),
        ("4@0x601040", MemoryPlace(0x601040)),
        ("%rax", RegisterPart("eax", 0, 64)),  # without a size it is a word
    ],
)
def test_each_form_of_an_operand_is_understood(text: str, operand: object) -> None:
    argument = one(text)
    assert (argument.text, argument.operand, argument.obstacle) == (text, operand, "")


def test_i386_has_registers_and_symbols_of_its_own() -> None:
    assert one("2@%ebp", "i386").operand == RegisterPart("ebp", 0, 16)
    assert one("-4@shared@GOTOFF(%ebx)", "i386") == Argument(
        "-4@shared@GOTOFF(%ebx)", 4, signed=True, operand=MemoryPlace(symbol="shared")
    )
    assert one("-8@16(%esp)", "i386").operand == MemoryPlace(16, "esp")


def test_size_sign_and_kind_are_those_of_the_note() -> None:
    found = parse_arguments("-1@$1 1@$1 -2@$1 2@$1 -4@$1 4@$1 -8@$1 8@$1 4f@%eax 8f@%rax", X86_64)
    assert [argument.type_name for argument in found] == [
        "s8",
        "u8",
        "s16",
        "u16",
        "s32",
        "u32",
        "s64",
        "u64",
        "f32",
        "f64",
    ]
    assert one("8@sym(%rip)").symbol == "sym"
    assert one("8@$1").symbol == ""


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        ("8f@%xmm0", "its operand '%xmm0' is not a general register of x86_64"),
        ("16@%rax", "it has 16 bytes"),
        ("3@$1", "it has 3 bytes"),
        ("8@$sym", "its operand '$sym' is a number that only the linker knows"),
        ("4@%fs:8", "its operand '%fs:8' cannot be read: only numbers, registers and memory are"),
        ("4@a+b(%rip)", "its operand 'a+b(%rip)' cannot be read: only numbers, registers and memory are"),
        ("4@-sym(%rip)", "its operand '-sym(%rip)' cannot be read: only numbers, registers and memory are"),
        ("4@4(%rip)", "its operand '4(%rip)' has no symbol"),
        ("4@(%eax)", "its operand '(%eax)' is at an address of 32 bits"),
        ("4@tls@tpoff(%rax)", "its operand 'tls@tpoff(%rax)' is relative to something that is not known ('@tpoff')"),
        ("4@%cr3", "its operand '%cr3' is not a general register of x86_64"),
        ("4@" + "1" * 300, "it cannot be understood"),
    ],
)
def test_what_has_no_value_says_why(text: str, obstacle: str) -> None:
    argument = one(text)
    assert (argument.operand, argument.obstacle) == (None, obstacle)


@given(st.text(max_size=400) | st.from_regex(r"-?[0-9]f?@[$%()a-z0-9@+,-]{0,20}", fullmatch=True))
def test_whatever_a_note_says_arguments_come_out(text: str) -> None:
    for argument in (*parse_arguments(text, X86_64), *parse_arguments(text, I386)):
        assert (argument.operand is None) == bool(argument.obstacle)
        assert len(argument.text) < 300
