"""Which instructions can be executed at another address, and what becomes of their bytes there."""

from __future__ import annotations

import pytest
from iced_x86 import Decoder

from dprobes.platform.x86.instruction_relocation import Copy, copy_of, relocated

FREE = Copy(cannot_fault=True, leads_on=True)
ON = Copy(leads_on=True)
COPIES = [
    ("31c0", 8, FREE),  # xor eax, eax
    ("4885ff", 8, FREE),  # test rdi, rdi
    ("b82a000000", 8, FREE),  # mov eax, 42
    ("0f94c0", 8, FREE),  # sete al
    ("48c1e004", 8, FREE),  # shl rax, 4
    ("480fafc6", 8, FREE),  # imul rax, rsi
    ("40", 4, FREE),  # inc eax
    ("48f7f6", 8, ON),  # div rsi
    ("488b07", 8, ON),  # mov rax, [rdi]
    ("f00fc107", 8, ON),  # lock xadd [rdi], eax
    ("488b0510000000", 8, Copy(displacement=3, leads_on=True)),  # mov rax, [rip+0x10]
    ("c7051000000001000000", 8, Copy(displacement=2, leads_on=True)),  # mov dword ptr [rip+0x10], 1
    ("67488b0510000000", 8, Copy(displacement=4, leads_on=True)),  # mov rax, [eip+0x10]
    ("c5fc580510000000", 8, Copy(displacement=4, leads_on=True)),  # vaddps ymm0, ymm0, [rip+0x10]
    ("ff1510000000", 8, Copy(displacement=2, pushes_return=True)),  # call [rip+0x10]
    ("ff10", 8, Copy(pushes_return=True)),  # call [rax]
    ("ff2510000000", 8, Copy(displacement=2)),  # jmp [rip+0x10]
    ("8b0510000000", 4, ON),  # mov eax, [0x10]: absolute in 32-bit code
    ("0f05", 8, Copy()),  # syscall
    ("cd80", 4, Copy()),  # int 0x80
    ("0f0b", 8, Copy()),  # ud2
    ("8ed0", 8, ON),  # mov ss, eax
    ("0fa2", 8, ON),  # cpuid
    ("660f58c1", 8, ON),  # addpd xmm0, xmm1: may raise SIGFPE
    ("cb", 8, Copy()),  # retf
    ("9d", 8, Copy()),  # popf may set the trap flag
]
IN_PLACE = [
    ("e800000000", 8),  # call: emulated, or with a shadow stack executed in place
    ("d9c0", 8),  # fld st(0): the x87 unit keeps the address
    ("ff1d00000000", 8),  # far call
    ("0f05", 4),  # syscall returns to the vDSO in 32-bit code
    ("0f34", 4),  # sysenter
    ("c7f800000000", 8),  # xbegin
    ("cc", 8),
    ("06", 8),  # no instruction in 64-bit code
]


@pytest.mark.parametrize(("code", "word_size", "expected"), COPIES)
def test_copies(code: str, word_size: int, expected: Copy) -> None:
    assert copy_of(bytes.fromhex(code), word_size) == expected


@pytest.mark.parametrize(("code", "word_size"), IN_PLACE)
def test_what_must_be_executed_in_place(code: str, word_size: int) -> None:
    assert copy_of(bytes.fromhex(code), word_size) is None


@pytest.mark.parametrize("slot", [0x7F00_0000_2000, 0x7EFF_F000_0000, 0x7F00_3FFF_0000])
@pytest.mark.parametrize("code", [code for code, _, copy in COPIES if copy.displacement])
def test_a_copy_names_the_same_memory(code: str, slot: int) -> None:
    raw, site = bytes.fromhex(code), 0x7F00_0000_1000
    copy = copy_of(raw, 8)
    assert copy is not None
    moved = relocated(raw, copy, site, slot)
    assert moved is not None
    assert moved != raw
    original, there = (Decoder(64, data, ip=at).decode() for data, at in ((raw, site), (moved, slot)))
    assert there.ip_rel_memory_address == original.ip_rel_memory_address
    assert str(there) == str(original)


def test_a_copy_that_cannot_reach_its_operand_is_none() -> None:
    raw = bytes.fromhex("488b0510000000")
    copy = copy_of(raw, 8)
    assert copy is not None
    assert relocated(raw, copy, 0x7F00_0000_0000, 0x7F01_0000_0000) is None
