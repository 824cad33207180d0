"""The accesses of instructions to memory: operands, sizes and directions, and what has no address."""

from __future__ import annotations

import pytest

from dprobes.target.code.memory_accesses import MemoryAccess, OtherMemory, StringAccess, accesses_in, memory_access

HERE = 0x1000


@pytest.mark.parametrize(
    ("raw", "access"),
    [
        ("488b07", MemoryAccess("rdi", "", 1, 0, False, 8, True, False)),  # mov rax, [rdi]
        ("c6440bff01", MemoryAccess("rbx", "rcx", 1, -1, False, 1, False, True)),  # mov byte [rbx+rcx-1], 1
        ("4201549d10", MemoryAccess("rbp", "r11", 4, 16, False, 4, True, True)),  # add [rbp+r11*4+16], edx
        ("f0480fb10f", MemoryAccess("rdi", "", 1, 0, False, 8, True, True)),  # lock cmpxchg [rdi], rcx
        ("480fb60500010000", MemoryAccess("", "", 1, 0x1108, True, 1, True, False)),  # movzx rax, byte [rip+0x100]
        ("8b04cd40404000", MemoryAccess("", "rcx", 8, 0x404040, False, 4, True, False)),  # mov eax, [rcx*8+0x404040]
        ("0f1007", MemoryAccess("rdi", "", 1, 0, False, 16, True, False)),  # movups xmm0, [rdi]
        ("62f17c481107", MemoryAccess("rdi", "", 1, 0, False, 64, False, True)),  # vmovups [rdi], zmm0
        ("ff2500010000", MemoryAccess("", "", 1, 0x1106, True, 8, True, False)),  # jmp [rip+0x100]
        ("ff37", MemoryAccess("rdi", "", 1, 0, False, 8, True, False)),  # push qword [rdi]
        ("0fae07", MemoryAccess("rdi", "", 1, 0, False, 512, False, True)),  # fxsave [rdi]
        ("f3ab", StringAccess(4, False, False, True, True, False)),  # rep stosd
        ("48a5", StringAccess(8, True, False, True, False, False)),  # movsq
        ("f3a6", StringAccess(1, True, True, False, True, True)),  # repe cmpsb
        ("f2ae", StringAccess(1, False, True, False, True, True)),  # repne scasb
        ("488d07", None),  # lea rax, [rdi]
        ("0f1f4000", None),  # nop [rax]
        ("0f1807", None),  # prefetchnta [rdi]
        ("4801c8", None),  # add rax, rcx
        ("50", None),  # push rax
        ("488b442408", OtherMemory.STACK),  # mov rax, [rsp+8]
        ("64488b042528000000", OtherMemory.THREAD),  # mov rax, fs:[0x28]
        ("480fab07", OtherMemory.BIT),  # bts [rdi], rax
        ("678b07", OtherMemory.NARROW),  # mov eax, [edi]
        ("67f3a4", OtherMemory.NARROW),  # rep movsb with addresses of 32 bits
        ("0fae27", OtherMemory.UNKNOWN),  # xsave [rdi]
        ("d7", OtherMemory.UNKNOWN),  # xlatb
        ("c4e26992040f", OtherMemory.SCATTERED),  # vgatherdps xmm0, [rdi+xmm1], xmm2
        ("660ff7c1", OtherMemory.MASKED),  # maskmovdqu xmm0, xmm1
        ("62f17c485800", MemoryAccess("rax", "", 1, 0, False, 64, True, False)),  # vaddps zmm0, zmm0, [rax]
        ("62f17c585800", MemoryAccess("rax", "", 1, 0, False, 4, True, False)),  # vaddps zmm0, zmm0, [rax]{1to16}
        ("8f04c4", OtherMemory.STACK),  # pop [rsp+rax*8], whose address contains the new rsp
        ("660f38f80f", OtherMemory.UNKNOWN),  # movdir64b rcx, [rdi], which writes to [rcx]
    ],
)
def test_the_access(raw: str, access: object) -> None:
    assert memory_access(bytes.fromhex(raw), HERE) == access


def test_the_instructions_of_code_that_access_memory() -> None:
    code = bytes.fromhex("55 488b07 90 488917 c3")
    found = list(accesses_in(code, HERE))
    assert [(address, raw.hex()) for address, raw, _ in found] == [(HERE + 1, "488b07"), (HERE + 5, "488917")]


def test_the_address_is_the_sum_of_registers() -> None:
    registers = {"rbx": (1 << 64) - 8, "rcx": 3}
    access = memory_access(bytes.fromhex("8b44cb20"), HERE)  # mov eax, [rbx+rcx*8+32]
    assert isinstance(access, MemoryAccess)
    assert access.address(registers.__getitem__, 0x5000) == 48
    relative = memory_access(bytes.fromhex("8b0500010000"), HERE)
    assert isinstance(relative, MemoryAccess)
    assert relative.address(registers.__getitem__, 0x5000) == 0x6106
