"""The code of guards: what it compares, and that it changes only rax, the flags and the frame."""

from __future__ import annotations

import struct

import pytest
from iced_x86 import Decoder, Formatter, FormatterSyntax

from dprobes.engines.inline.access_guards import GUARD_SIZE, OPENING_SIZE, guard_code, guard_of
from dprobes.native.x86.x86_operations import FRAME_SIZE, X86Operations
from dprobes.rpn.rpn_program import AccessCheck

HERE, SITE, BIAS = 0x7000_2000, 0x1000, 0x7000_0000
OPEN = ["lea rsp,[rsp-130h]", "mov [rsp-2D0h],rax", "mov [rsp+50h],rax", "lahf", "seto al", "mov [rsp+90h],rax"]
RESTORE = ["mov rax,[rsp+90h]", "add al,7Fh", "sahf", "mov rax,[rsp+50h]"]
MISS = [*RESTORE, "lea rsp,[rsp+130h]", "jmp"]


def lines_of(code: bytes, address: int) -> list[str]:
    formatter = Formatter(FormatterSyntax.INTEL)
    texts = [formatter.format(instruction) for instruction in Decoder(64, code, ip=address)]
    return [text.split()[0] if text.startswith("j") else text for text in texts]


def made(raw: str, check: AccessCheck) -> tuple[list[str], list[str], int]:
    """Return the instructions before the jump of a miss, those of a hit, and the constant between them."""
    guard = guard_of(check, bytes.fromhex(raw))
    assert guard is not None
    found = guard_code(guard.placed(BIAS), HERE)
    assert len(found.code) <= GUARD_SIZE
    assert found.touch == OPENING_SIZE
    after = found.jump + 12
    (constant,) = struct.unpack_from("<Q", found.code, found.jump + 4)
    return lines_of(found.code[: found.jump + 4], HERE), lines_of(found.code[after:], HERE + after), constant


@pytest.mark.parametrize(
    ("raw", "operand", "size"),
    [
        ("488b0f", ["lea rax,[rdi]"], 8),
        ("488b4c0710", ["mov rax,[rsp+50h]", "lea rax,[rdi+rax+10h]"], 8),
        ("88480f", ["mov rax,[rsp+50h]", "lea rax,[rax+0Fh]"], 1),
        ("8b0cf504000000", ["lea rax,[rsi*8+4]"], 4),
        ("420f114c6d80", ["lea rax,[rbp+r13*2-80h]"], 16),
        ("8b0ccc", ["lea rax,[rsp+rcx*8+130h]"], 4),
        ("8b0d00010000", ["lea rax,[70001106h]"], 4),
    ],
)
def test_the_guard_of_a_range(raw: str, operand: list[str], size: int) -> None:
    before, hit, constant = made(raw, AccessCheck(SITE, 0x4000, 0x48))
    assert before[: len(OPEN)] == OPEN
    rest = before[len(OPEN) :]
    assert rest[: len(operand)] == operand
    assert rest[len(operand)].startswith("sub rax,[7000")
    assert rest[len(operand) + 1 :] == [f"cmp rax,{_hexadecimal(0x48 + size - 1)}", "jb", *MISS]
    assert constant == BIAS + 0x4000 - (size - 1)
    assert hit == [*([f"lea rax,[rax-{_hexadecimal(size - 1)}]"] if size > 1 else []), "mov [rsp+78h],rax", *RESTORE]


def _hexadecimal(number: int) -> str:
    text = f"{number:X}h" if number > 9 else str(number)
    return f"0{text}" if text[0] in "ABCDEF" else text


def test_an_absolute_range_does_not_move_with_the_module() -> None:
    *_, constant = made("880f", AccessCheck(SITE, 0x4000, 0x48, absolute=True))
    assert constant == 0x4000


def test_the_handler_begins_with_the_instruction_that_the_guard_replaces() -> None:
    asm = X86Operations()
    asm.move_stack(-FRAME_SIZE)
    assert len(asm.assemble()) == OPENING_SIZE


@pytest.mark.parametrize("raw", ["f3a4", "480fab07", "4801c8"])
def test_an_access_without_a_computable_address_has_no_guard(raw: str) -> None:
    assert guard_of(AccessCheck(SITE, 0x4000, 8), bytes.fromhex(raw)) is None
