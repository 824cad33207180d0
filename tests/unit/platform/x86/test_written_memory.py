"""The memory that instructions write, against their encodings (Intel SDM, volume 2)."""

from __future__ import annotations

import pytest

from dprobes.platform.linux.ptrace_calls import Register, Registers, RegisterWords
from dprobes.platform.x86.written_memory import written_memory

PC = 0x400000


def registers() -> RegisterWords:
    found = Registers()
    for register in Register:
        found[register] = 0x1000 * (register + 1)
    found[Register.RIP] = PC
    return found


R15, RBP, RBX, R9, RAX, RCX, RSI, RDI, RSP, FS = (
    0x1000 * (Register[name] + 1) for name in ("R15", "RBP", "RBX", "R9", "RAX", "RCX", "RSI", "RDI", "RSP", "FS_BASE")
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("8803", [(RBX, 1)]),  # mov [rbx], al
        ("488905f00f0000", [(PC + 7 + 0xFF0, 8)]),  # mov [rip+0xff0], rax
        ("f0480fc103", [(RBX, 8)]),  # lock xadd [rbx], rax
        ("55", [(RSP - 8, 8)]),  # push rbp
        ("e800000000", [(RSP - 8, 8)]),  # call
        ("f3aa", [(RDI, 1)]),  # rep stosb: one element
        ("48ab", [(RDI, 8)]),  # stosq
        ("a4", [(RDI, 1)]),  # movsb
        ("6489042500000000", [(FS, 4)]),  # mov fs:[0], eax
        ("43895c4f10", [(R15 + 2 * R9 + 0x10, 4)]),  # mov [r15+2*r9+0x10], ebx
        ("67668903", [(RBX & 0xFFFFFFFF, 2)]),  # mov [ebx], ax
        ("0f1107", [(RDI, 16)]),  # movups [rdi], xmm0
        ("8b03", []),  # mov eax, [rbx]
        ("90", []),
    ],
)
def test_operands_are_computed_from_registers(code: str, expected: list[tuple[int, int]]) -> None:
    assert written_memory(bytes.fromhex(code) + b"\x90" * 8, registers(), 8) == expected


@pytest.mark.parametrize("code", ["0fae20", "62f17f481007", "62f17f49117f01", "06"])
def test_what_has_no_known_extent_is_none(code: str) -> None:
    """These are xsave, an undefined encoding, a masked store, and an instruction that 64-bit code lacks."""
    assert written_memory(bytes.fromhex(code) + b"\x00" * 8, registers(), 8) is None


def test_addresses_of_32_bit_code() -> None:
    words = registers()
    words[Register.RBX] = 0xFFFFFFFC
    assert written_memory(bytes.fromhex("894308"), words, 4) == [(4, 4)]  # mov [ebx+8], eax
    assert written_memory(bytes.fromhex("a300100000"), words, 4) == [(0x1000, 4)]  # mov [0x1000], eax
