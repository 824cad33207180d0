"""Which instructions can fault."""

from __future__ import annotations

import pytest

from dprobes.target.code.uprobe_sites import may_fault

CANNOT = {
    "nop": "90",
    "nopw 0(rax,rax)": "66 0f 1f 44 00 00",
    "endbr64": "f3 0f 1e fa",
    "mov rbp, rsp": "48 89 e5",
    "lea rax, [rdi+8]": "48 8d 47 08",
    "sub rsp, 16": "48 83 ec 10",
    "jmp +0": "eb 00",
    "je +0": "74 00",
    "xor eax, eax": "31 c0",
}
CAN = {
    "push rbp": "55",
    "ret": "c3",
    "call +0": "e8 00 00 00 00",
    "mov rax, [rdi]": "48 8b 07",
    "mov [rdi], rax": "48 89 07",
    "div ecx": "f7 f1",
    "ud2": "0f 0b",
    "hlt": "f4",
    "fdivp": "de f9",
    "divsd xmm0, xmm1": "f2 0f 5e c1",
    "rep movsb": "f3 a4",
}


@pytest.mark.parametrize("text", CANNOT)
def test_what_cannot_fault(text: str) -> None:
    assert not may_fault(bytes.fromhex(CANNOT[text]), 64)


@pytest.mark.parametrize("text", CAN)
def test_what_can_fault(text: str) -> None:
    assert may_fault(bytes.fromhex(CAN[text]), 64)
